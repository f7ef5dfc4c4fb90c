"""One line about a served model: family, parameters, cache, kernels."""

import jax
import jax.numpy as jnp

from dsv3.config.model import INDEX_KEYS, LATENTS, ModelConfig
from dsv3.engine.dtypes import EngineDtypes, count_parameters, short
from dsv3.kv_cache.layout import pool, token_bytes
from dsv3.model.layers.indexer import indexer_of
from pallas_kernels import dsa, mla
from pallas_kernels.backend import Backend, fallbacks, has_jax_triton, uses_triton


def describe(cfg: ModelConfig, dtypes: EngineDtypes, backend: Backend, packed: str | None = "keep") -> str:
    """Returns the line for a model on devices whose kernels are `backend`; `packed` is that of `packed_mode`."""
    total, active = count_parameters(cfg)
    cache = token_bytes(cfg, dtypes.cache)
    return (
        f"family {cfg.family or 'unknown'}, {short(total)} parameters, {short(active)} of them per token; "
        f"{cache:,} bytes of cache per token ({dtypes.cache}); {kernels(cfg, dtypes, backend)}"
        + (f"; {dtypes.compute}, because {dtypes.reason}" if dtypes.reason else "")
        + _packed_experts(cfg, dtypes, backend, packed)
        + _choice(cfg, dtypes, backend)
        + _without_triton(cfg, backend)
        + "".join(f"; {name} by {each.value}, because its kernel fails its check" for name, each in fallbacks().items())
    )


def _choice(cfg: ModelConfig, dtypes: EngineDtypes, backend: Backend) -> str:
    """Returns how sparse attention selects its tokens, or entries; empty for dense attention."""
    if cfg.compressed is not None:
        seen = f"{cfg.compressed.window:,} tokens and, of entries that are chosen, {cfg.compressed.indexer.topk:,}"
        return f"; each token attends to {seen} at most"
    if not cfg.index_layers:
        return ""
    text = f"; each token attends to {cfg.index_topk:,} at most"
    if backend is Backend.REFERENCE:
        return text
    if not uses_triton(backend):
        return f"{text}, chosen by jax.numpy"
    indexer = indexer_of(cfg)
    q = jax.ShapeDtypeStruct((1, indexer.num_heads, indexer.head_dim), jnp.dtype(dtypes.compute))
    obstacle = dsa.scores_unsupported(q, pool(cfg, dtypes.cache, 1)[INDEX_KEYS], backend)
    return text + (f", scored by jax.numpy, because {obstacle}" if obstacle else "")


def _without_triton(cfg: ModelConfig, backend: Backend) -> str:
    """Returns which kernels of a model with several streams are absent on Hopper, where jax-triton starts them."""
    if cfg.hyper_connections is None or backend is not Backend.MOSAIC or has_jax_triton():
        return ""
    return "; mixing of streams and norm of queries by jax.numpy, because jax-triton is not installed (extra 'triton')"


def kernels(cfg: ModelConfig, dtypes: EngineDtypes, backend: Backend) -> str:
    """Returns the kernels' back end, and why attention uses another one, if it does."""
    if backend is Backend.REFERENCE:
        return "computed by jax.numpy"
    if backend is Backend.NATIVE:
        return "computed by C++ kernels, and by jax.numpy where more than a few rows meet a weight"
    obstacles = dict.fromkeys(filter(None, _obstacles(cfg, dtypes, backend)))
    kernels = "Mosaic GPU kernels" if backend is Backend.MOSAIC else "Triton kernels"
    return f"computed by {kernels}" + "".join(f"; attention by jax.numpy, because {why}" for why in obstacles)


def _packed_experts(cfg: ModelConfig, dtypes: EngineDtypes, backend: Backend, mode: str | None) -> str:
    """Returns how experts of four bits are served, and whether they lack a kernel; empty for other models."""
    if not cfg.int4_experts and not cfg.fp4_experts:
        return ""
    stored = "INT4" if cfg.int4_experts else "FP4"
    if mode != "keep":
        return f"; {stored} experts as {'FP8' if mode == 'fp8' else dtypes.compute}"
    on_gpu = backend in (Backend.MOSAIC, Backend.TRITON)
    without = ", by jax.numpy" if cfg.int4_experts and on_gpu and dtypes.compute != jnp.bfloat16 else ""
    return f"; {stored} experts stay {stored}{without}"


def _obstacles(cfg: ModelConfig, dtypes: EngineDtypes, backend: Backend) -> tuple[str | None, str | None]:
    """Returns why decode and prefill have no attention kernel; None where they have one."""
    if cfg.compressed is not None:
        return None, None

    def heads(width: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((cfg.page_size, cfg.num_attention_heads, width), jnp.dtype(dtypes.compute))

    pages = pool(cfg, dtypes.cache, 1)[LATENTS]
    return (
        mla.decode_unsupported(heads(cfg.latent_dim), pages, cfg.kv_lora_rank, backend),
        mla.prefill_unsupported(heads(cfg.qk_head_dim), heads(cfg.v_head_dim), backend),
    )
