"""Random problems of prefill attention to chosen keys and to spans of keys, and their answers in float64."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import mla

SCALE = 0.1352338
T, KEYS, H, CASES = 150, 384, 1, 20
NOBODYS = 128  # keys behind all spans
REQUESTS = ((0, 61, 40), (128, 111, 90))  # first key, what its first query sees, queries; 20 rows of padding follow


@dataclasses.dataclass(frozen=True)
class TopkCase:
    arguments: dict[str, Any]
    expected: np.ndarray  # [T, H, V] float64


def topk_case(*, dtype) -> TopkCase:
    """Returns two requests whose queries choose 20 keys each; queries of padding are NaN, keys of nobody are not."""
    rng = np.random.default_rng(0)
    shapes = {"q": (T, H, 192), "k": (KEYS, H, 128), "shared_key": (KEYS, 64), "v": (KEYS, H, 128)}
    arrays = {name: (rng.standard_normal(shape) / 3).astype(dtype) for name, shape in shapes.items()}
    starts, ends = np.zeros(T, np.int32), np.zeros(T, np.int32)
    chosen, t = np.full((T, CASES), KEYS, np.int32), 0
    for first, sees, queries in REQUESTS:
        for _ in range(queries):
            starts[t], ends[t] = first, first + sees
            chosen[t] = first + rng.permutation(sees)[:CASES]
            t, sees = t + 1, sees + 1
    arrays["q"][t:] = np.nan
    bits = mla.topk_bitmask(jnp.asarray(chosen), jnp.asarray(chosen < KEYS), KEYS)
    arguments = {name: jnp.asarray(x) for name, x in arrays.items()}
    arguments |= {"bits": bits, "starts": jnp.asarray(starts), "ends": jnp.asarray(ends)}
    return TopkCase(arguments, _answer(arrays, chosen, t))


def _answer(arrays: dict[str, np.ndarray], chosen: np.ndarray, live: int) -> np.ndarray:
    out = np.zeros((T, H, 128))
    for t in range(live):
        out[t] = _answer_of(arrays, t, chosen[t])
    return out


def _answer_of(arrays: dict[str, np.ndarray], t: int, seen: np.ndarray) -> np.ndarray:
    """Returns the answer `[H, V]` of query t, which sees these keys."""
    q, k, shared, v = (arrays[name].astype(np.float64) for name in ("q", "k", "shared_key", "v"))
    keys = np.concatenate([k[seen], np.broadcast_to(shared[seen, None], (len(seen), H, 64))], axis=-1)
    scores = np.einsum("hd,khd->hk", q[t], keys) * SCALE
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hk,khv->hv", weights / weights.sum(axis=1, keepdims=True), v[seen])


def spans_case(*, dtype) -> TopkCase:
    """Returns the same requests, whose queries take all keys of their spans; keys behind all spans are NaN, too."""
    arguments = topk_case(dtype=dtype).arguments
    del arguments["bits"]
    arrays = {name: np.asarray(x) for name, x in arguments.items()}
    expected = np.zeros((T, H, 128))
    for t, (start, end) in enumerate(zip(arrays["starts"], arrays["ends"], strict=True)):
        if end:
            expected[t] = _answer_of(arrays, t, np.arange(start, end))
    for name in ("k", "shared_key", "v"):
        behind = jnp.full((NOBODYS, *arguments[name].shape[1:]), jnp.nan, dtype)
        arguments[name] = jnp.concatenate([arguments[name], behind])
    return TopkCase(arguments, expected)
