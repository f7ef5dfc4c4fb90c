"""What a window layer of DeepSeek-V4 computes, from its formulas in float64 and without our code."""

from typing import Any

import numpy as np

from dsv3.config.model import ModelConfig

Array = np.ndarray[Any, np.dtype[np.float64]]


def layer(x: Array, params: Any, cfg: ModelConfig, attend: Any = None) -> Array:
    """The streams `[T, n, D]` behind the layer; `attend` computes attention, of tokens from 0 on by default."""
    attend = attend or (lambda a: attention(a, params.attention, cfg))
    x = around(x, params.attention_mixing, lambda u: attend(rms(u, params.input_norm)))
    return around(x, params.moe_mixing, lambda u: experts(rms(u, params.post_norm), params.moe, cfg))


def collapsed(x: Array, mixing: Any) -> Array:
    """The sum of the streams `[T, n, D]` behind the last layer, before its norm."""
    weights = sigmoid(unit(x.reshape(len(x), -1)) @ mixing.weight.T * mixing.scale + mixing.base) + 1e-6
    return (weights[..., None] * x).sum(1)


def around(x: Array, mixing: Any, block: Any) -> Array:
    m = unit(x.reshape(len(x), -1)) @ mixing.weight.T
    a, b, c = (slice(0, 4), slice(4, 8), slice(8, 24))
    pre = sigmoid(m[:, a] * mixing.scale[0] + mixing.base[a]) + 1e-6
    post = 2 * sigmoid(m[:, b] * mixing.scale[1] + mixing.base[b])
    between = np.exp((m[:, c] * mixing.scale[2] + mixing.base[c]).reshape(-1, 4, 4))
    between = between / between.sum(2, keepdims=True) + 1e-6
    between = between / (between.sum(1, keepdims=True) + 1e-6)
    for _ in range(19):
        between = between / (between.sum(2, keepdims=True) + 1e-6)
        between = between / (between.sum(1, keepdims=True) + 1e-6)
    y = block(np.einsum("tj,tjd->td", pre, x))
    return post[..., None] * y[:, None] + np.einsum("tjk,tjd->tkd", between, x)


def attention(a: Array, params: Any, cfg: ModelConfig) -> Array:
    """Each row sees the window that ends with it."""
    positions = np.arange(len(a))
    q, k = queries_and_keys(a, params, cfg, positions)
    back = positions[:, None] - positions
    return heads_output(q, k, (back >= 0) & (back < cfg.compressed.window), params, cfg, positions)


def queries_and_keys(a: Array, params: Any, cfg: ModelConfig, positions: Array) -> tuple[Array, Array]:
    H, Q, d, P = cfg.num_attention_heads, cfg.q_lora_rank, cfg.latent_dim, cfg.qk_rope_head_dim
    down = a @ params.qkv_a.T
    q = unit((rms(down[:, :Q], params.q_norm) @ params.q_b.T).reshape(len(a), H, d))
    k = rms(down[:, Q:], params.kv_norm)
    return rotated(q, positions, P), rotated(k[:, None], positions, P)[:, 0]


def heads_output(q: Array, k: Array, seen: Array, params: Any, cfg: ModelConfig, positions: Array) -> Array:
    """What queries `[T, H, d]` at `positions` make of those keys `[N, d]` that they see, `seen` `[T, N]`."""
    d, P = cfg.latent_dim, cfg.qk_rope_head_dim
    weights = np.where(seen[:, None], np.exp(np.einsum("thd,sd->ths", q, k) * d**-0.5), 0)
    total = np.exp(params.sink) + weights.sum(-1)
    o = rotated(np.einsum("ths,sd->thd", weights / total[..., None], k), -positions, P)
    groups = o.reshape(len(q), len(params.o_a), -1)
    return np.einsum("tgi,gri->tgr", groups, params.o_a).reshape(len(q), -1) @ params.o_b.T


def rotated(x: Array, positions: Array, P: int) -> Array:
    """`x` `[T, H, d]`, whose last P values are turned in pairs of neighbors."""
    angles = positions[:, None, None] * 10000.0 ** (-np.arange(0, P, 2) / P)
    turned = (x[..., -P::2] + 1j * x[..., -P + 1 :: 2]) * np.exp(1j * angles)
    return np.concatenate([x[..., :-P], np.stack([turned.real, turned.imag], -1).reshape(*x.shape[:-1], P)], -1)


def experts(a: Array, params: Any, cfg: ModelConfig) -> Array:
    scores = np.sqrt(np.log1p(np.exp(a @ params.router.T)))
    chosen = np.argsort(-(scores + params.router_bias), axis=-1)[:, : cfg.num_experts_per_tok]
    weights = np.take_along_axis(scores, chosen, -1)
    weights = weights / weights.sum(-1, keepdims=True) * cfg.routed_scaling_factor
    y = swiglu(a, params.shared.gate_up, params.shared.down, cfg.swiglu_limit)
    for t, k in np.ndindex(chosen.shape):
        e = chosen[t, k]
        y[t] += weights[t, k] * swiglu(a[t], params.gate_up[e], params.down[e], cfg.swiglu_limit)
    return y


def swiglu(a: Array, gate_up: Array, down: Array, limit: float) -> Array:
    gate, up = np.split(a @ gate_up.T, 2, axis=-1)
    gate = np.minimum(gate, limit)
    return (gate * sigmoid(gate) * np.clip(up, -limit, limit)) @ down.T


def unit(x: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def rms(x: Array, weight: Array) -> Array:
    return unit(x) * weight


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))
