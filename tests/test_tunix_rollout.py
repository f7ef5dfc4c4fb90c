"""The rollout class for Tunix, with Tunix where it is installed, and its interface's records where it is not."""

import dataclasses
import importlib.util
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3 import LLM
from dsv3.checkpoint import load_params
from dsv3.engine.build import bundled_model
from dsv3.model.forward import forward

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "tunix_rollout.py"


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    max_tokens_to_generate: int = 64
    temperature: float = 0.9
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: jax.Array | None = None
    max_prompt_length: int = 64
    eos_tokens: list[int] | None = None


@dataclasses.dataclass
class RolloutOutput:
    text: list[str]
    logits: list[jax.Array]
    tokens: list[np.ndarray]
    left_padded_prompt_tokens: np.ndarray
    logprobs: list[np.ndarray] | None


@pytest.fixture(scope="module")
def tunix():
    """The example's module."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("tunix") is None:
            base = types.SimpleNamespace(BaseRollout=object, RolloutConfig=RolloutConfig, RolloutOutput=RolloutOutput)
            names = ("tunix", "tunix.rl", "tunix.rl.rollout", "tunix.rl.rollout.base_rollout")
            for name in names:
                patch.setitem(sys.modules, name, types.ModuleType(name))
            sys.modules["tunix.rl.rollout"].base_rollout = base
        spec = importlib.util.spec_from_file_location("tunix_rollout", EXAMPLE)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def llm():
    with LLM(max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64, dtype="float32", progress=False) as made:
        yield made


@pytest.fixture(scope="module")
def actor(tunix, llm):
    cfg = llm.engine.model_cfg
    return tunix.Actor(cfg, load_params(bundled_model(), cfg, dtype=jnp.float32, progress=False))


def test_logits_of_padded_rows_are_those_of_the_rows(tunix, actor, llm) -> None:
    rows = [[5, 6, 7, 8, 9], [10, 11, 12]]
    padded = np.full((2, 8), 2, np.int32)
    padded[0, 1:6], padded[1, 3:6] = rows
    segments = (padded != 2).astype(np.int32)
    run = nnx.jit(
        lambda actor, tokens: actor(tokens, positions=None, cache=None, attention_mask=None, segment_ids=segments)
    )
    logits, cache = run(actor, jnp.asarray(padded))
    assert cache is None and logits.shape[:2] == (2, 8)
    plain = jax.jit(lambda params, tokens: forward(params, llm.engine.model_cfg, tokens).logits)
    for got, row, start in zip(np.asarray(logits), rows, (1, 3), strict=True):
        wanted = np.asarray(plain(actor.params(), jnp.asarray([row + [2] * (8 - len(row))])))[0, : len(row)]
        np.testing.assert_allclose(got[start : start + len(row)], wanted, atol=1e-4)


def test_it_generates_scores_and_takes_new_weights(tunix, actor, llm) -> None:
    rollout = tunix.DeepSeekRollout(llm=llm, rollout_actor=actor, tokenizer=None, mesh=None, rollout_config=None)
    config = RolloutConfig(
        max_tokens_to_generate=8, temperature=1.0, max_prompt_length=12, seed=jax.random.key_data(jax.random.key(3))
    )
    prompts = ["def add(a, b):", "import json and several other modules which nobody ever needs to have"]
    output = rollout.generate(prompts, config)
    tokens = output.left_padded_prompt_tokens
    assert tokens.shape == (2, 12) and tokens[0, 0] == rollout.pad_id() != tokens[1, 0]
    completions = np.full((2, 8), rollout.pad_id(), np.int32)
    for row, ids in zip(completions, output.tokens, strict=True):
        row[: len(ids)] = ids
    scored = np.asarray(rollout.get_per_token_logps(jnp.asarray(tokens), jnp.asarray(completions)))
    for row, logprobs in zip(scored, output.logprobs, strict=True):
        np.testing.assert_allclose(row[: len(logprobs)], logprobs, atol=1e-3)
        assert not row[len(logprobs) :].any()
    state = nnx.state(rollout.model())
    rollout.update_params(jax.tree.map(lambda leaf: leaf * 0.9, state))
    again = np.asarray(rollout.get_per_token_logps(jnp.asarray(tokens), jnp.asarray(completions)))
    assert np.abs(again - scored).max() > 1e-3
    assert rollout.eos_id() == llm.tokenizer.eos_token_id
