"""Log-probabilities of the trained policy with the bits of a batch-invariant engine.

`dsv3.model.forward` rounds otherwise than the engine: it materializes keys and values, its products are those of whole
sequences, and XLA chooses the order of their sums. So the first ratio of a step would be 1 up to 1e-5. Here the trained
weights run through the engine's own prefill, with its batch-invariant kernels, its types, and the experts of the
rollout; `with_values_of` gives these values the gradient of the trainer's forward. The price is one more forward pass.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv3.checkpoint.layout import leaf_path
from dsv3.checkpoint.quantize import quantize_stack
from dsv3.config.model import ModelConfig
from dsv3.engine.device import sampling
from dsv3.engine.device.programs import Programs
from dsv3.engine.functions import batch_invariant, in_full_precision, model_functions
from dsv3.kv_cache.layout import pool
from dsv3.model.batch import AttentionForm, PrefillBatch
from dsv3.model.forms import applies, suits
from dsv3.model.params import Params, declare
from training.step import compute_copy

_BLOCK = 64  # rows whose logits exist at a time


def served_params(params: Params, cfg: ModelConfig, dtype: Any, *, fp8: bool) -> Params:
    """Returns the parameters as `LLM.update_weights` makes them: in `dtype`, and with `fp8` quantized from it."""
    computed = compute_copy(params, cfg, jnp.dtype(dtype))
    if not fp8:
        return computed
    ue8m0 = cfg.fp8 is not None and cfg.fp8.scale_fmt == "ue8m0"
    quantize = functools.partial(quantize_stack, ue8m0=ue8m0)
    return jax.tree.map(lambda spec, leaf: quantize(leaf) if spec.quantizable else leaf, declare(cfg), computed)


def served_logprobs(
    params: Params,
    cfg: ModelConfig,
    tokens: Any,
    routed_experts: Any = None,
    *,
    dtype: Any = "float32",
    fp8: bool = False,
    cache_dtype: str | None = None,
) -> jax.Array:
    """Returns the log-probabilities of `tokens[:, 1:]` that an engine with `batch_invariant` samples with and scores.

    It runs a program of its own on one device, so it cannot be traced. Raises ValueError, which names a leaf, for
    parameters that lie on several.

    Args:
      params: trained weights in the layout of `dsv3.model.params.declare`, of any floating-point type.
      cfg: the model.
      tokens: int32 `[B, S]`, padded on the right.
      routed_experts: those of `dsv3.model.forward.forward`, `[B, S, num_moe_layers, K]`, or None.
      dtype: the engine's type of activations, `float32` or `bfloat16`; `fp8`: its products are FP8.
      cache_dtype: the engine's type of pages; None: `dtype`.

    Returns:
      float32 `[B, S - 1]`.
    """
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        if isinstance(leaf, jax.Array) and (devices := len(leaf.sharding.device_set)) > 1:
            raise ValueError(
                f"{leaf_path(keys)} lies on {devices} devices, but the bits are those of one: copy the parameters to "
                "one, or train with the trainer's own log-probabilities"
            )
    platform = jax.default_backend()
    served, cached = served_params(params, cfg, dtype, fp8=fp8), cache_dtype or jnp.dtype(dtype).name
    return _program(platform)(served, tokens, routed_experts, cfg=cfg, cache_dtype=cached, platform=platform)


@functools.cache
def _program(platform: str) -> Callable[..., jax.Array]:
    options = Programs(platform, overlaps=False, invariant=True).options
    return jax.jit(_logprobs, static_argnames=("cfg", "cache_dtype", "platform"), compiler_options=dict(options or {}))


def _logprobs(
    params: Params, tokens: jax.Array, routed_experts: Any, *, cfg: ModelConfig, cache_dtype: str, platform: str
) -> jax.Array:
    functions = batch_invariant(in_full_precision(model_functions(dtype=params.embed.dtype)))
    (B, S), Mp = tokens.shape, -(-tokens.shape[1] // cfg.page_size)
    shapes = pool(cfg, cache_dtype, B * Mp, B * Mp, B)
    pages = {name: jnp.zeros(each.shape, each.dtype) for name, each in shapes.items()}
    fitting = (form for form in AttentionForm if applies(form, cfg, platform, S, batch_invariant=True))
    table = jnp.arange(B * Mp, dtype=jnp.int32).reshape(B, Mp)
    batch = PrefillBatch(
        tokens=tokens.reshape(-1),
        positions=jnp.tile(jnp.arange(S, dtype=jnp.int32), B),
        cu_lengths=jnp.arange(B + 1, dtype=jnp.int32) * S,
        context_lengths=jnp.zeros(B, jnp.int32),
        page_table=table,
        form=next(form for form in fitting if suits(form, cfg, S, has_context=False)),
        window_table=table,
        slots=jnp.arange(B, dtype=jnp.int32),
    )
    prefill: Callable[..., Any] = functions.prefill
    hidden = prefill(params, cfg, batch, pages, routed_experts=routed_experts).hidden
    after = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1))).reshape(-1)

    def block(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        return sampling.log_probabilities(functions.logits(params, cfg, rows[0]), rows[1], 1)[0]

    padding = -(B * S) % _BLOCK
    blocked = (jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for x in (hidden, after))
    found = lax.map(block, tuple(x.reshape(-1, _BLOCK, *x.shape[1:]) for x in blocked))
    return found.reshape(-1)[: B * S].reshape(B, S)[:, :-1]


@jax.custom_vjp
def with_values_of(served: jax.Array, trained: jax.Array) -> jax.Array:
    """Returns `served`, bit by bit, with the gradient of `trained`."""
    del trained
    return served


with_values_of.defvjp(lambda served, trained: (served, None), lambda _, dy: (jnp.zeros_like(dy), dy))
