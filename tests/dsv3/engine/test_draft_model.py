"""Drafts by the bundled model's MTP module: texts as without, right drafts, a correct cache.

Over ranks of several devices: test_balance.py.
"""

import jax
import numpy as np
import pytest

from dsv3.config.options import EngineOptions
from dsv3.engine.build import build_engine, bundled_model
from dsv3.engine.engine import Engine
from dsv3.text.tokenizer import Tokenizer
from tests.dsv3.engine.driving import drain, request, run
from tests.dsv3.engine.fewer import one_bucket

LIMITS = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 256, "max_num_batched_tokens": 64}
SOURCE = (
    "import json\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def read(self):\n"
)


def engine(**options) -> Engine:
    """The bundled model, whose programs are compiled as they are needed."""
    with one_bucket():
        return build_engine(bundled_model(), EngineOptions(**(LIMITS | options)), progress=False)


@pytest.fixture(scope="module")
def plain() -> Engine:
    return engine()


@pytest.fixture(scope="module")
def drafting() -> Engine:
    return engine(speculative_config={"method": "mtp", "num_speculative_tokens": 2})


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return Tokenizer.from_directory(bundled_model()).encode(SOURCE)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "logit_bias": {30: 2}},
    ],
    ids=["greedy", "sampled"],
)
def test_texts_are_those_without_drafts(plain: Engine, drafting: Engine, prompt, sampling: dict) -> None:
    """The toy (`test_draft`) has the other samplers."""
    wanted = {"max_tokens": 60, "ignore_eos": True, "seed": 4, **sampling}
    got = [run(e, request("a", prompt, **wanted), request("b", prompt[:9], **wanted)) for e in (plain, drafting)]
    assert {name: entry.tokens for name, entry in got[0].items()} == {n: entry.tokens for n, entry in got[1].items()}


def test_half_of_the_first_drafts_are_right(drafting: Engine, prompt) -> None:
    """The module was right at 68 % of held-out positions when it was trained; a wrong state would be right at few."""
    before = drafting.stats().jobs["draft"]
    run(drafting, request("a", prompt, max_tokens=120, ignore_eos=True))
    after = drafting.stats().jobs["draft"]
    first, second = np.subtract(after.num_accepted_tokens_per_pos, before.num_accepted_tokens_per_pos)
    assert first > 0.5 * (after.num_drafts - before.num_drafts) and second > 0


def test_the_cache_holds_what_a_fresh_prefill_writes(drafting: Engine, prompt) -> None:
    """All layers, the module's too, after many rejected drafts; a hit would show it to other requests."""
    before = drafting.stats().jobs["draft"]
    sampling = {"temperature": 1.5, "seed": 1, "presence_penalty": 0.1}  # of the sampler that is there already
    drafting.add(request("a", prompt, max_tokens=90, ignore_eos=True, **sampling))
    tokens, pages = list(prompt), []
    while drafting.has_work:
        for sequence in drafting.scheduler.sequences.values():
            pages = list(sequence.pages)
        tokens += [token for output in drafting.step() for token in output.token_ids]
    after = drafting.stats().jobs["draft"]
    wrong = [stats.num_draft_tokens - stats.num_accepted_tokens for stats in (before, after)]
    assert wrong[1] - wrong[0] > 20
    answered = latents(drafting, pages, len(tokens) - 1)

    clear_caches(drafting)
    drafting.add(request("b", tokens, max_tokens=1, ignore_eos=True))
    for _ in range(-(-len(tokens) // LIMITS["max_num_batched_tokens"])):
        drafting.step()
    [sequence] = drafting.scheduler.sequences.values()
    again = latents(drafting, list(sequence.pages), len(tokens) - 1)
    assert drain(drafting)["b"].last.num_cached_tokens == 0
    layers = drafting.model_cfg.num_hidden_layers
    np.testing.assert_allclose(answered[:layers], again[:layers], atol=1e-4)
    np.testing.assert_allclose(answered[layers:, :-1], again[layers:, :-1], atol=1e-4)  # the last has no next token


def clear_caches(engine: Engine) -> None:
    """Empties the prefix cache, and the pages too."""
    for cache in engine.scheduler.caches:
        cache.clear()
    devices = engine.executor.devices
    devices.pages = jax.tree.map(lambda p: jax.device_put(np.zeros(p.shape, p.dtype), p.sharding), devices.pages)


def latents(engine: Engine, pages: list[int], count: int) -> np.ndarray:
    """The first `count` rows of a request in each cache layer, [layers, count, R + P]."""
    pool = np.asarray(engine.executor.devices.pages["latents"])[0]
    layers = pool.reshape(engine.model_cfg.num_cache_layers, -1, *pool.shape[1:])
    return layers[:, pages].reshape(len(layers), -1, pool.shape[-1])[:, :count]


def test_a_model_without_a_module_is_refused(tmp_path) -> None:
    config = (bundled_model() / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 0')
    )
    with pytest.raises(ValueError, match="speculative_config: method 'mtp' needs a model"):
        build_engine(tmp_path, EngineOptions(speculative_config={"method": "mtp"}), progress=False)
