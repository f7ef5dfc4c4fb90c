"""FP8 checkpoints: partial blocks, and FP8 weights against a dequantized float32 run.

Activations of each product are rounded to e4m3 (3 mantissa bits) per row and 128 channels, so logits differ: on this
random two-layer model by 7.0 % of their root mean square, with either kind of scale. The most likely token is the same
in 90 % of all positions, and in 98 % of those where its lead is four times the error (a random model has thin leads);
for the rest, rounding changed the selected experts.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.checkpoint import load_params, save_hf
from dsv3.config.hugging_face import load_config
from dsv3.config.model import Fp8Config, ModelConfig
from dsv3.model import PAGE_SIZE, DecodeBatch, Fp8Weight, Params, PrefillBatch, declare, decode, prefill
from pallas_kernels.fp8 import dequantize_128x128, quantize_128x128
from tests.dsv3.model.golden import DIRECTORY, model, run

# Fused rows begin on block borders (q_lora_rank, moe_intermediate_size), as in every published FP8 checkpoint; the
# other widths leave partial blocks: kv_a_proj_with_mqa has 96 rows, o_proj 160 columns, the dense MLP 192.
CFG = ModelConfig(
    vocab_size=96,
    hidden_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    kv_lora_rank=80,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    v_head_dim=40,
    intermediate_size=256,
    moe_intermediate_size=128,
    n_routed_experts=8,
    num_experts_per_tok=3,
    q_lora_rank=128,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.5,
    fp8=Fp8Config(),
)


def random_params(cfg: ModelConfig) -> Params:
    """Weights that keep activations of order one; the products quantised as the checkpoint has them."""
    rng, ue8m0 = np.random.default_rng(1), cfg.fp8.scale_fmt == "ue8m0"

    def draw(spec):
        drawn = rng.normal(1, 0.1, spec.shape) if spec.init == "ones" else rng.normal(size=spec.shape)
        return (drawn if spec.init == "ones" else drawn * spec.shape[-1] ** -0.5).astype(np.float32)

    def quantised(spec, w):
        return Fp8Weight(*quantize_128x128(w, ue8m0=ue8m0)) if spec.quantizable else w

    specs = declare(cfg)
    params = jax.jit(lambda drawn: jax.tree.map(quantised, specs, drawn))(jax.tree.map(draw, specs))
    return dataclasses.replace(params, embed=params.embed * cfg.hidden_size**0.5)


@functools.cache
def checkpoint(tmp: pathlib.Path, scale_fmt: str) -> tuple[ModelConfig, Params, Params]:
    """The same checkpoint, kept in FP8 and multiplied out to float32."""
    cfg = dataclasses.replace(CFG, fp8=Fp8Config(scale_fmt))
    save_hf(tmp / scale_fmt, cfg, random_params(cfg))
    assert load_config(tmp / scale_fmt) == cfg
    load = functools.partial(load_params, tmp / scale_fmt, cfg, dtype=jnp.float32, progress=False)
    return cfg, load(fp8="keep"), load(fp8="dequantize")


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("fp8")


def texts(cfg: ModelConfig) -> np.ndarray:
    """Two texts of 64 tokens: one shape for the full pass of all tests."""
    return np.random.default_rng(2).integers(0, cfg.vocab_size, (2, 64)).astype(np.int32)


@pytest.mark.parametrize("scale_fmt", ["float32", "ue8m0"])
def test_fp8_path_against_float32(tmp: pathlib.Path, scale_fmt: str) -> None:
    cfg, kept, plain = checkpoint(tmp, scale_fmt)
    held = [w for w in jax.tree.leaves(kept, is_leaf=lambda w: isinstance(w, Fp8Weight)) if isinstance(w, Fp8Weight)]
    assert len(held) == 12
    assert all(w.data.dtype == jnp.float8_e4m3fn for w in held)
    tokens = texts(cfg)
    actual, wanted = (np.asarray(run(params, cfg, tokens).logits) for params in (kept, plain))
    error = np.sqrt(np.mean((actual - wanted) ** 2))
    assert 0 < error < 0.09 * np.sqrt(np.mean(wanted**2))
    best_two = np.sort(wanted, axis=-1)[..., -2:]
    clear = best_two[..., 1] - best_two[..., 0] > 4 * error
    same = actual.argmax(-1) == wanted.argmax(-1)
    assert same[clear].mean() > 0.95
    assert clear.mean() > 0.4
    assert same.mean() > 0.85


def test_the_served_steps_of_an_fp8_model_equal_its_full_pass(tmp: pathlib.Path) -> None:
    cfg, params, _ = checkpoint(tmp, "ue8m0")
    tokens = texts(cfg)
    wanted, tokens = np.asarray(run(params, cfg, tokens).logits[0]), tokens[:1]
    pages = {"latents": jnp.full((cfg.num_cache_layers * 3, PAGE_SIZE, cfg.latent_dim), jnp.nan)}
    ints, table = functools.partial(jnp.asarray, dtype=jnp.int32), jnp.array([[2, 0]], jnp.int32)
    batch = PrefillBatch(ints(tokens[0, :62]), np.arange(62, dtype=np.int32), ints([0, 62]), ints([0]), table)
    out = jax.jit(lambda p, b, g: prefill(p, cfg, b, g))(params, batch, pages)
    head = np.asarray(params.head).T
    close(out.hidden @ head, wanted[:62])
    batch = DecodeBatch(ints(tokens[:, 62:]), ints([64]), table)
    out = jax.jit(lambda p, b, g: decode(p, cfg, b, g))(params, batch, out.pages)
    close(out.hidden[0] @ head, wanted[62:])


def close(actual: np.ndarray, wanted: np.ndarray) -> None:
    # Another order of float32 sums can tip a value to the next of e4m3's coarse steps.
    assert np.sqrt(np.mean((actual - wanted) ** 2)) < 0.02 * np.sqrt(np.mean(wanted**2))


def test_partial_blocks_dequantise_as_the_oracle_does() -> None:
    params, cfg = model("deepseek_v31")
    assert cfg.fp8 == Fp8Config("ue8m0")
    rows = cfg.kv_lora_rank + cfg.qk_rope_head_dim
    assert rows == 152 and cfg.hidden_size == 160, "two blocks of 128 and a part each way"
    raw = load_file("deepseek_v31")
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    data, scale = raw[name].astype(np.float32), raw[f"{name}_scale_inv"]
    wanted = np.concatenate(
        [
            np.concatenate([data[:128, :128] * scale[0, 0], data[:128, 128:] * scale[0, 1]], axis=1),
            np.concatenate([data[128:, :128] * scale[1, 0], data[128:, 128:] * scale[1, 1]], axis=1),
        ]
    )
    np.testing.assert_array_equal(params.dense.attention.qkv_a[0, -rows:], wanted)


@pytest.mark.parametrize("shape", [(576, 7168), (192, 256), (130, 100)])
def test_rounding_error_of_partial_blocks(shape: tuple[int, int]) -> None:
    w = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    data, scale = jax.jit(quantize_128x128)(w)
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    back = np.asarray(jax.jit(lambda d, s: dequantize_128x128(d, s, jnp.float32))(data, scale))
    # Half a step of 3 mantissa bits, and half the smallest subnormal near zero.
    assert (np.abs(back - w) <= np.maximum(np.abs(w) / 16, np.max(scale) * 2**-10)).all()


def load_file(member: str) -> dict[str, np.ndarray]:
    """The tensors of a golden checkpoint as stored; safetensors' numpy reader knows no FP8."""
    content = (DIRECTORY / member / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    dtypes = {"F8_E4M3": jnp.float8_e4m3fn, "BF16": jnp.bfloat16, "F32": np.float32}
    tensors = {}
    for name, entry in json.loads(content[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            flat = np.frombuffer(content[start + begin : start + end], dtypes[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"])
    return tensors
