"""Random MLA problems with hostile padding, and a float64 oracle that shares no code with the library."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

UNUSED_PAGE = 2147480000  # FlashMLA's tests put it into unused table entries
PAGE = 64


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    q: jnp.ndarray  # [B, S, H, R + P]
    pages: jnp.ndarray  # [layers * pages_per_layer, 64, R + P]
    page_table: jnp.ndarray  # [B, MP]
    lengths: jnp.ndarray  # [B]
    layer: int
    pages_per_layer: int


def decode_case(
    lengths, *, S=1, H=16, R=512, P=64, dtype=jnp.bfloat16, layers=2, layer=1, table_width=None, pool=None, seed=0
):
    """NaN in every row outside of requests: page tails, unused pages, other layers."""
    rng = np.random.default_rng(seed)
    needed = [-(-n // PAGE) for n in lengths]
    width = table_width or max([*needed, 1])
    per_layer = pool or sum(needed) + 2
    order = rng.permutation(per_layer)
    table = np.full((len(lengths), width), UNUSED_PAGE, np.int32)
    pages = np.full((layers * per_layer, PAGE, R + P), np.nan, np.float32)
    for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        mine, order = order[:count], order[count:]
        table[row, :count] = mine
        tokens = _values(rng, (count * PAGE, R + P))
        tokens[length:] = np.nan
        pages[layer * per_layer + mine] = tokens.reshape(count, PAGE, R + P)
    q = _values(rng, (len(lengths), S, H, R + P))
    arrays = q.astype(dtype), pages.astype(dtype), table, np.array(lengths, np.int32)
    return DecodeCase(
        *jax.device_put(arrays),  # `jnp.asarray` would compile a program for each shape
        layer,
        per_layer,
    )


def _values(rng, shape):
    return np.clip(rng.standard_normal(shape, np.float32) / 10, -1, 1)  # FlashMLA's test inputs


def gather_tokens(case, row, count):
    """The first `count` cached rows of a request, [count, R + P] float64."""
    ids = np.asarray(case.page_table)[row, : -(-count // PAGE)] + case.layer * case.pages_per_layer
    return np.asarray(case.pages, np.float64)[ids].reshape(-1, case.pages.shape[-1])[:count]


def attend(q, k, v, scale):
    """Softmax attention of queries [M, D] over all keys [K, D]; 0 and +inf without keys."""
    if len(k) == 0:
        return np.zeros((len(q), v.shape[-1])), np.full(len(q), np.inf)
    scores = q @ k.T * scale
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return weights @ v / total, (top + np.log(total))[:, 0]


def decode_oracle(case, scale, value_width):
    q = np.asarray(case.q, np.float64)
    B, S, H, _ = q.shape
    out, lse = np.zeros((B, S, H, value_width)), np.zeros((B, S, H))
    for b, length in enumerate(np.asarray(case.lengths)):
        for s in range(S):
            k = gather_tokens(case, b, max(length - (S - 1 - s), 0))
            out[b, s], lse[b, s] = attend(q[b, s], k, k[:, :value_width], scale)
    return out, lse


def prefill_oracle(q, k, v, lengths, scale):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, lse = np.zeros((*q.shape[:2], v.shape[-1])), np.full(q.shape[:2], np.inf)
    start = 0
    for length in lengths:
        for t in range(start, start + length):
            for h in range(q.shape[1]):
                seen = slice(start, t + 1)
                out[t, h], lse[t, h] = (x[0] for x in attend(q[t, h][None], k[seen, h], v[seen, h], scale))
        start += length
    return out, lse


def context_oracle(q, case, token_counts, scale, value_width):
    """`case.lengths` are the context lengths of the requests that own `token_counts` tokens of q [T, H, R + P]."""
    q = np.asarray(q, np.float64)
    out, lse = np.zeros((*q.shape[:2], value_width)), np.full(q.shape[:2], np.inf)
    start = 0
    for row, (count, context) in enumerate(zip(token_counts, np.asarray(case.lengths), strict=True)):
        k = gather_tokens(case, row, context)
        for t in range(start, start + count):
            out[t], lse[t] = attend(q[t], k, k[:, :value_width], scale)
        start += count
    return out, lse


def assert_close(out, lse, expected_out, expected_lse, *, dtype):
    """FlashMLA's measures: inf and NaN in the same places, absolute or relative error, cosine difference."""
    exact = jnp.dtype(dtype) == jnp.float32
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(np.isinf(lse), np.isinf(expected_lse))
    np.testing.assert_allclose(out, expected_out, atol=2e-6 if exact else 8e-4, rtol=1e-5 if exact else 2.01 / 128)
    finite = np.isfinite(expected_lse)
    np.testing.assert_allclose(lse[finite], expected_lse[finite], atol=1e-6, rtol=8.01 / 65536)
    assert cosine_difference(out, expected_out) < (1e-10 if exact else 5e-6)


def cosine_difference(a, b):
    norm = (a * a + b * b).sum()
    return 0.0 if norm == 0 else 1 - 2 * (a * b).sum() / norm
