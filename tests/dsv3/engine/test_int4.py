"""A model with INT4 experts, served: the tokens of the dequantized model, on one device and with experts spread."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.kimi import KIMI_K2_THINKING
from dsv3.checkpoint import load_params
from dsv3.config.hugging_face import load_config, to_hf
from dsv3.config.options import EngineOptions
from dsv3.engine.description import describe
from dsv3.engine.dtypes import EngineDtypes, resolve_dtypes
from dsv3.llm import LLM, SamplingParams
from dsv3.model.params import Params
from pallas_kernels.backend import Backend
from tests.dsv3.checkpoint import hf, int4
from tests.dsv3.engine.fewer import greedy_samplers, one_bucket
from tests.dsv3.model.golden import relative_error, run

CFG = int4.config(
    **{"vocab_size": 64, "num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 6},
    **{"num_attention_heads": 2, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 32},
    rope_theta=10000.0,
)
PLAIN = dataclasses.replace(CFG, int4_experts=False)
PROMPTS = [[5, 9, 33, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9, 60, 61, 62], [40] * 7]


def tamed(name: str, tensor: np.ndarray) -> np.ndarray:
    """Weights that keep activations of order one."""
    if name.endswith("norm.weight"):
        return np.ones_like(tensor)
    return tensor if tensor.ndim < 2 else (tensor.astype(np.float32) * tensor.shape[-1] ** -0.5).astype(tensor.dtype)


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> Path:
    """The packed checkpoint, and the dequantized one in float32."""
    root = tmp_path_factory.mktemp("served")
    random = hf.random_tensors(PLAIN, dtype=np.dtype(np.float32))
    small, plain = int4.packed({name: tamed(name, tensor) for name, tensor in random.items()})
    for name, tensors in (("int4", small), ("plain", plain)):
        hf.write(root / name, tensors, shards=1)
        (root / name / "config.json").write_text(json.dumps(to_hf(CFG if name == "int4" else PLAIN)))
    return root


def load(directory: Path, **options) -> Params:
    return load_params(directory, load_config(directory), dtype="float32", progress=False, **options)


def described(leaf) -> tuple:
    return leaf.shape, np.dtype(leaf.dtype)


def logits(params: Params, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(run(params, PLAIN, tokens).logits)


def test_logits_are_those_of_the_dequantized_model(directories: Path) -> None:
    """Nothing is rounded where INT4 is kept; FP8 rounds weights and activations of the experts."""
    tokens = np.random.default_rng(0).integers(0, CFG.vocab_size, (3, 32))
    wanted = logits(load(directories / "plain"), tokens)
    packed, fp8 = (load(directories / "int4", int4=mode) for mode in ("keep", "fp8"))
    for mode, params in {"keep": packed, "fp8": fp8}.items():
        shapes = load(directories / "int4", int4=mode, shapes=True)
        assert jax.tree.map(described, shapes) == jax.tree.map(described, params)
    assert relative_error(logits(packed, tokens), wanted) < 1e-5
    rounded = logits(fp8, tokens)
    assert 0 < np.sqrt(np.mean((rounded - wanted) ** 2) / np.mean(wanted**2)) < 0.09


def test_tokens_are_those_of_the_dequantized_model(directories: Path) -> None:
    """Packed replicas on two devices serve; each token is the likeliest one in one full pass."""
    limits = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    spread = {"enable_expert_parallel": True, "data_parallel_size": 2, "num_redundant_experts": 2, "enable_eplb": True}
    with one_bucket(), greedy_samplers():
        llm = LLM(directories / "int4", progress=False, **limits, **spread)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    stats = llm.engine.stats()
    assert (stats.pages_in_use, stats.recompilations) == (0, 0)
    answers = [output.outputs[0].token_ids for output in outputs]
    tokens = np.zeros((3, 32), np.int32)
    for row, prompt, answer in zip(tokens, PROMPTS, answers, strict=True):
        row[: len(prompt) + len(answer)] = prompt + answer
    likeliest = logits(load(directories / "plain"), tokens).argmax(-1)
    for row, prompt, answer in zip(likeliest, PROMPTS, answers, strict=True):
        assert row[len(prompt) - 1 :][: len(answer)].tolist() == answer and len(answer) == 16


def test_unsupported_combinations_are_refused() -> None:
    cpu = jax.devices()[0]
    for mode in ("keep", "fp8"):
        with pytest.raises(ValueError, match=f"INT4 experts under int4 '{mode}'"):
            resolve_dtypes(CFG, EngineOptions(dtype="float16", int4=mode), cpu)
    resolve_dtypes(CFG, EngineOptions(dtype="float16", int4="dequantize"), cpu)


def test_the_description() -> None:
    half, single = (EngineDtypes(jax.numpy.dtype(name), "bfloat16") for name in ("bfloat16", "float32"))
    line = describe(KIMI_K2_THINKING, half, Backend.MOSAIC)
    assert line.startswith("family kimi_k2, 1.03 trillion parameters, 31.7 billion of them per token")
    assert line.endswith("; INT4 experts stay INT4")
    assert describe(KIMI_K2_THINKING, half, Backend.MOSAIC, "fp8").endswith("; INT4 experts as FP8")
    assert describe(KIMI_K2_THINKING, single, Backend.NATIVE).endswith("; INT4 experts stay INT4")
    assert describe(KIMI_K2_THINKING, single, Backend.TRITON).endswith("; INT4 experts stay INT4, by jax.numpy")
