"""A random problem of prefill attention to chosen keys, and its answer in float64."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import mla

SCALE = 0.1352338
T, KEYS, H, CHOSEN = 150, 384, 1, 20
REQUESTS = ((0, 61, 40), (128, 111, 90))  # first key, what its first query sees, queries; 20 rows of padding follow


@dataclasses.dataclass(frozen=True)
class ChosenCase:
    arguments: dict[str, Any]
    expected: np.ndarray  # [T, H, V] float64


def chosen_case(*, dtype) -> ChosenCase:
    """Returns two requests whose queries choose 20 keys each; queries of padding are NaN, keys of nobody are not."""
    rng = np.random.default_rng(0)
    shapes = {"q": (T, H, 192), "k": (KEYS, H, 128), "shared_key": (KEYS, 64), "v": (KEYS, H, 128)}
    arrays = {name: (rng.standard_normal(shape) / 3).astype(dtype) for name, shape in shapes.items()}
    starts, ends = np.zeros(T, np.int32), np.zeros(T, np.int32)
    chosen, t = np.full((T, CHOSEN), KEYS, np.int32), 0
    for first, sees, queries in REQUESTS:
        for _ in range(queries):
            starts[t], ends[t] = first, first + sees
            chosen[t] = first + rng.permutation(sees)[:CHOSEN]
            t, sees = t + 1, sees + 1
    arrays["q"][t:] = np.nan
    bits = mla.chosen_bits(jnp.asarray(chosen), jnp.asarray(chosen < KEYS), KEYS)
    arguments = {name: jnp.asarray(x) for name, x in arrays.items()}
    arguments |= {"bits": bits, "starts": jnp.asarray(starts), "ends": jnp.asarray(ends)}
    return ChosenCase(arguments, _answer(arrays, chosen, t))


def _answer(arrays: dict[str, np.ndarray], chosen: np.ndarray, live: int) -> np.ndarray:
    q, k, shared, v = (arrays[name].astype(np.float64) for name in ("q", "k", "shared_key", "v"))
    keys, out = np.concatenate([k, np.broadcast_to(shared[:, None], (KEYS, H, 64))], axis=-1), np.zeros((T, H, 128))
    for t in range(live):
        scores = np.einsum("hd,khd->hk", q[t], keys[chosen[t]]) * SCALE
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[t] = np.einsum("hk,khv->hv", weights / weights.sum(axis=1, keepdims=True), v[chosen[t]])
    return out
