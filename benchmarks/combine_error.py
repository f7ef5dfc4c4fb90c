"""What it costs to send experts' sums back as int8: the error of the form, and of a model's outputs.

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.combine_error

The first table rounds rows of 7,168 channels once to each form, with a scale per 128 channels for int8 and e4m3: normal
channels, and channels with heavy tails (Student's t, 3 degrees). The second runs the bundled model in float32 on eight
devices of two nodes, over its own license and documentation, once with sums as they are and once as int8, which rounds
each partial sum in two hops. An error is the root mean square of the differences over that of the yardstick.
"""

from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.checkpoint import load_params
from dsv3.config.hugging_face import load_config
from dsv3.engine.build import bundled_model
from dsv3.engine.expert_parallel import expert_parallel_functions, spread_experts
from dsv3.kv_cache.layout import pool
from dsv3.model.batch import AttentionForm, PrefillBatch
from dsv3.text.tokenizer import Tokenizer
from sharding.experts import exchange
from sharding.mesh import RANK_SPEC, rank_mesh
from sharding.wire.sums import GROUP, pack, packed_bytes, unpack

RANKS, TOKENS, WIDTH = 8, 256, 7168


def main() -> None:
    print(f"bytes per row of {WIDTH}: bfloat16 {2 * WIDTH}, int8 and e4m3 with scales {packed_bytes(WIDTH)}")
    rng = np.random.default_rng(0)
    for name, x in {
        "normal": rng.standard_normal((64, WIDTH)).astype(np.float32),
        "heavy tails": rng.standard_t(3, (64, WIDTH)).astype(np.float32),
    }.items():
        forms = {"bfloat16": x.astype(jnp.bfloat16), "int8": unpack(pack(x), jax.ShapeDtypeStruct(x.shape, x.dtype))}
        errors = {form: relative(got, x) for form, got in (forms | {"e4m3": through_e4m3(x)}).items()}
        print(f"{name:<12}", ", ".join(f"{form} {error:.2%}" for form, error in errors.items()))
    exact, packed = (log_probabilities(combine) for combine in ("auto", "int8"))
    likely = exact.argmax(-1)
    nll = [-np.take_along_axis(each, targets()[..., None], -1).mean() for each in (exact, packed)]
    divergence = (np.exp(exact) * (exact - packed)).sum(-1)
    print(f"bundled model, {likely.size} tokens: error of log-probabilities {relative(packed, exact):.3%}", end=", ")
    print(f"likeliest token the same {np.mean(likely == packed.argmax(-1)):.2%}", end=", ")
    print(f"divergence {divergence.mean():.2e}, mean loss {nll[0]:.4f} and {nll[1]:.4f}")


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """Returns the root mean square of the differences over that of `wanted`."""
    difference = np.asarray(got, np.float64) - wanted
    return float(np.sqrt(np.mean(difference**2) / np.mean(np.asarray(wanted, np.float64) ** 2)))


def through_e4m3(x: np.ndarray) -> np.ndarray:
    """Returns `x` rounded to e4m3 with a scale per 128 channels."""
    groups = x.reshape(len(x), -1, GROUP)
    scale = np.abs(groups).max(-1, keepdims=True) / 448
    return (np.asarray((groups / scale).astype(jnp.float8_e4m3fn), np.float32) * scale).reshape(x.shape)


def text() -> np.ndarray:
    """Returns tokens `[RANKS, TOKENS + 1]`: a stretch of documentation for each rank."""
    root = Path(__file__).parents[1]
    words = "".join(path.read_text() for path in [root / "LICENSE", *sorted((root / "docs").glob("*.md"))])
    ids = Tokenizer.from_directory(bundled_model()).encode(words[: 16 * RANKS * TOKENS])
    return np.array(ids[: RANKS * (TOKENS + 1)], np.int32).reshape(RANKS, -1)


def targets() -> np.ndarray:
    """Returns the token behind each of those that the model reads."""
    return text()[:, 1:]


def log_probabilities(combine: str) -> np.ndarray:
    """Returns the model's log-probabilities `[RANKS, TOKENS, W]` with sums sent back so.

    There is room for all rows, so no step is computed again.
    """
    with mock.patch.object(exchange, "expected_capacity", lambda tokens, *_, **__: tokens):
        return _log_probabilities(combine)


def _log_probabilities(combine: str) -> np.ndarray:
    cfg = load_config(bundled_model())
    params = load_params(bundled_model(), cfg, dtype=np.float32, progress=False)
    mesh = rank_mesh(jax.devices()[:RANKS], num_nodes=2)
    how = {"transport": "hierarchical", "combine": combine, "dtype": jnp.float32}
    functions = expert_parallel_functions(cfg, mesh, 0, **how)
    pages_each = TOKENS // 64
    rows = pool(cfg, "float32", pages_each)
    batch = PrefillBatch(
        text()[:, :-1],
        np.tile(np.arange(TOKENS, dtype=np.int32), (RANKS, 1)),
        np.tile(np.array([0, TOKENS], np.int32), (RANKS, 1)),
        np.zeros((RANKS, 1), np.int32),
        np.tile(np.arange(pages_each, dtype=np.int32), (RANKS, 1, 1)),
        form=AttentionForm.NEW,
    )

    def body(spread, batch):
        own = jax.tree.map(lambda a: a[0], batch)
        out = functions.prefill(spread, cfg, own, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), rows))
        logits = functions.vocabulary.whole(functions.scores(spread, cfg, out.hidden))
        return jax.nn.log_softmax(logits)[None]

    in_specs = (functions.param_specs, RANK_SPEC)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=RANK_SPEC, check_vma=False)
    return np.asarray(jax.jit(mapped)(spread_experts(params, cfg, mesh, 0), batch), np.float64)


if __name__ == "__main__":
    main()
