"""Random problems of prefill attention to top-k keys and to spans of keys, with results in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import mla

SCALE = 0.1352338
T, KEYS, H, CASES = 150, 384, 1, 20
UNUSED_KEYS = 128  # keys after all spans
REQUESTS = ((0, 61, 40), (128, 111, 90))  # first key, keys of its first query, queries; 20 rows of padding follow


_bitmask = jax.jit(mla.topk_bitmask, static_argnums=2)


@dataclasses.dataclass(frozen=True)
class TopkCase:
    arguments: dict[str, Any]
    expected: np.ndarray  # [T, H, V] float64


def topk_case(*, dtype) -> TopkCase:
    """Returns two requests whose queries have 20 top-k keys each; padding queries are NaN, unused keys are not."""
    rng = np.random.default_rng(0)
    shapes = {"q": (T, H, 192), "k": (KEYS, H, 128), "shared_key": (KEYS, 64), "v": (KEYS, H, 128)}
    arrays = {name: (rng.standard_normal(shape) / 3).astype(dtype) for name, shape in shapes.items()}
    starts, ends = np.zeros(T, np.int32), np.zeros(T, np.int32)
    topk, t = np.full((T, CASES), KEYS, np.int32), 0
    for first, sees, queries in REQUESTS:
        for _ in range(queries):
            starts[t], ends[t] = first, first + sees
            topk[t] = first + rng.permutation(sees)[:CASES]
            t, sees = t + 1, sees + 1
    arrays["q"][t:] = np.nan
    bits = _bitmask(topk, topk < KEYS, KEYS)
    arguments = {name: jnp.asarray(x) for name, x in arrays.items()}
    arguments |= {"bits": bits, "starts": jnp.asarray(starts), "ends": jnp.asarray(ends)}
    return TopkCase(arguments, _result(arrays, topk, t))


def _result(arrays: dict[str, np.ndarray], topk: np.ndarray, live: int) -> np.ndarray:
    out = np.zeros((T, H, 128))
    for t in range(live):
        out[t] = _result_of(arrays, t, topk[t])
    return out


def _result_of(arrays: dict[str, np.ndarray], t: int, seen: np.ndarray) -> np.ndarray:
    """Returns the result `[H, V]` of query t, which sees these keys."""
    q, k, shared, v = (arrays[name].astype(np.float64) for name in ("q", "k", "shared_key", "v"))
    keys = np.concatenate([k[seen], np.broadcast_to(shared[seen, None], (len(seen), H, 64))], axis=-1)
    scores = np.einsum("hd,khd->hk", q[t], keys) * SCALE
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hk,khv->hv", weights / weights.sum(axis=1, keepdims=True), v[seen])


def spans_case(*, dtype) -> TopkCase:
    """Returns the same requests with all keys of the spans; keys after all spans are NaN, too."""
    arguments = topk_case(dtype=dtype).arguments
    del arguments["bits"]
    arrays = {name: np.asarray(x) for name, x in arguments.items()}
    expected = np.zeros((T, H, 128))
    for t, (start, end) in enumerate(zip(arrays["starts"], arrays["ends"], strict=True)):
        if end:
            expected[t] = _result_of(arrays, t, np.arange(start, end))
    for name in ("k", "shared_key", "v"):
        behind = np.full((UNUSED_KEYS, *arrays[name].shape[1:]), np.nan, arrays[name].dtype)
        arguments[name] = jnp.asarray(np.concatenate([arrays[name], behind]))
    return TopkCase(arguments, expected)
