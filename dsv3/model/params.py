"""The parameters of a model: one declaration defines shapes, initial values and shardings.

Linear weights are `[out, in]`, the layout of a checkpoint and the K-major operand that FP8 matrix products need, so
loading transposes nothing. Layers are stacked on a leading axis (61 layers take fewer than 300 arrays); routed experts
are `[layers, experts, ...]`, so that expert parallelism splits the expert axis. Inside a step the two axes are merged
without a copy, and kernels address `layer * experts + expert` in the stack. Leaves of a parameter tree are arrays, or
`Fp8Weight`, `Int4Weight` or `Fp4Weight` if quantized weights of the checkpoint are kept.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.model import CompressedAttention, DSparkConfig, ModelConfig

Axis = Literal["layers", "experts", "vocab", "channels", "heads", "heads_latent", "mlp", "gate_up"] | None
"""Logical axes: "channels" are those of an embedding, "gate_up" is "mlp" twice, "heads_latent" the rows of all heads,
then those of the latent."""
Init = Literal["normal", "ones", "zeros", "range"]
"""How a parameter starts; "range" counts along the last axis."""


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One declared parameter: its shape, logical axes (for `sharding.mesh`) and initial distribution.

    `quantizable` marks the products that an FP8 checkpoint stores in FP8 and that the server may keep in FP8. `dtype`
    fixes the type of a parameter that does not follow the model's dtype (the router needs float32). With `as_stored`,
    such a parameter keeps the model's dtype if its checkpoint tensor has that dtype: nothing is rounded, and half the
    bytes are read.
    """

    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    init: Init = "normal"
    quantizable: bool = False
    dtype: Any = None
    as_stored: bool = False

    def dtype_in(self, model: Any, checkpoint: Iterable[Any] = ()) -> np.dtype:
        """Returns the dtype of this parameter in a model of dtype `model`.

        `checkpoint` are the dtypes of its tensors, if any.
        """
        model = jnp.dtype(model)
        follows = self.dtype is None or (self.as_stored and {jnp.dtype(t) for t in checkpoint} == {model})
        return model if follows else jnp.dtype(self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Weight:
    """Block-quantized stack: `data` e4m3 [..., N, K], `scale` float32 [..., ceil(N/128), ceil(K/128)], multiplied."""

    data: Any
    scale: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexerParams:
    """The indexers of sparse attention, of the `Li` layers that have one; all heads share one key."""

    q_b: Any  # [Li, Hi * Y, Q]
    k: Any  # [Li, Y, D]
    k_norm: Any  # [Li, Y] float32, or the model's dtype (`as_stored`), like the next two
    k_bias: Any  # [Li, Y]
    weights: Any  # [Li, Hi, D]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4Weight:
    """Routed experts of four bits: `data` int32 [..., N, K / 8], `scale` bfloat16 [..., K / 32, N], multiplied.

    `pallas_kernels.int4` defines the order of words. Scales are transposed, so that those of neighboring rows are
    contiguous.
    """

    data: Any
    scale: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp4Weight:
    """Routed experts of e2m1 codes, which stand for the e4m3 values of an `Fp8Weight` with the same `scale`.

    `data` is uint32 [..., N, K / 8], and `powers`, uint32 [..., K / 128, N], are those of 32 columns: four bytes each
    (`pallas_kernels.fp4`). `scale` is float32 [..., ceil(N/128), K / 128].
    """

    data: Any
    powers: Any
    scale: Any


E4m3Weight = Fp8Weight | Fp4Weight
"""Weights whose products take quantized rows."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionParams:
    """Multi-head latent attention of L layers.

    `qkv_a` stacks the rows of q_a_proj (or q_proj when there is no query latent) and kv_a_proj_with_mqa: one product
    reads the hidden state once. `k_up` and `v_up` are the two halves of kv_b_proj; they are separate because absorbed
    attention multiplies with `k_up` before its core and with `v_up` after it.
    """

    qkv_a: Any  # [L, Q + R + P, D], or [L, H * (N + P) + R + P, D] without a query latent
    q_norm: Any  # [L, Q], None without a query latent
    q_b: Any  # [L, H * (N + P), Q], None without a query latent
    kv_norm: Any  # [L, R]
    k_up: Any  # [L, H, N, R]
    v_up: Any  # [L, H, V, R]
    o: Any  # [L, D, H * V]
    indexer: IndexerParams | None = None  # of the layers that have one; None in dense attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressorParams:
    """What makes compressed entries of d values in `Lc` layers, whose entries stand for `ratio` tokens each.

    Tokens give C = c * d values and as many scores: c is 2 where the entries overlap, else 1.
    """

    value_score: Any  # [Lc, 2 * C, D]: rows of the values first
    position: Any  # [Lc, ratio, C] float32, added to the scores of a token by its place in the window
    norm: Any  # [Lc, d]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PooledIndexerParams:
    """The indexers of the `Ls` layers that choose among compressed entries, with keys of their own compressor."""

    q_b: Any  # [Ls, Hi * Y, Q]
    weights: Any  # [Ls, Hi, D]
    compressor: CompressorParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressedAttentionParams:
    """Attention to a window and compressed entries, of L layers; d = R + P values are key and value at once.

    `sparse` and `indexer` are those of the layers whose entries are chosen, `heavy` of those that see all entries.
    """

    qkv_a: Any  # [L, Q + d, D]: the query latent's rows first
    q_norm: Any  # [L, Q]
    q_b: Any  # [L, H * d, Q]
    kv_norm: Any  # [L, d]
    sink: Any  # [L, H] float32
    o_a: Any  # [L, G, r, H * d / G]: the first of two output projections, of each of G groups of heads
    o_b: Any  # [L, D, G * r]
    sparse: CompressorParams | None
    indexer: PooledIndexerParams | None
    heavy: CompressorParams | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixingParams:
    """How n streams are mixed at one place of L layers, float32: M = n * (n + 2) weights and 3 scales, see
    `dsv3.model.layers.hyper_connections`. Behind the last layer M is n, there is 1 scale, and there are no layers.
    """

    weight: Any  # [L, M, n * D]
    base: Any  # [L, M]
    scale: Any  # [L, 3]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MlpParams:
    """SwiGLU: rows of the gate first, then those of the up projection."""

    gate_up: Any  # [L, 2 * F, D]
    down: Any  # [L, D, F]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoeParams:
    """Routed experts, the router and the shared expert of L layers.

    The first `Lh` layers may choose experts by a table; only the others have biases then.
    """

    router: Any  # [L, E, D] float32, or the model's dtype (`as_stored`)
    router_bias: Any  # [L - Lh, E] float32, None unless topk_method is noaux_tc
    gate_up: Any  # [L, E, 2 * I, D]
    down: Any  # [L, E, D, I]
    shared: MlpParams | None  # [L, ...], width n_shared_experts * I
    by_token: Any = None  # [Lh, V, K] int32, the experts of each token id


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerParams:
    """L decoder layers of one kind; `mlp` is set for dense layers, `moe` for the others.

    `post_moe_norm` normalizes the experts' sum, in models that have it.
    """

    input_norm: Any  # [L, D]
    attention: Any  # AttentionParams, or CompressedAttentionParams
    post_norm: Any  # [L, D]
    mlp: MlpParams | None
    moe: MoeParams | None
    post_moe_norm: Any  # [L, D], None in dense layers and in models without it
    attention_mixing: MixingParams | None = None  # of models with several streams, as the next one
    moe_mixing: MixingParams | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MtpParams:
    """Multi-token prediction modules (DeepSeek-V3 report, 2.2); embedding and head are the main model's."""

    embed_norm: Any  # [L, D]
    hidden_norm: Any  # [L, D]
    proj: Any  # [L, D, 2 * D], embedding columns first (the checkpoint's order, not the paper's)
    layers: LayerParams
    norm: Any  # [L, D]
    head_mixing: MixingParams | None = None  # [L, ...], of models with several streams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DSparkParams:
    """The stages of DSpark, which draft a block of tokens; embedding and head are the main model's."""

    main_proj: Any  # [1, D, M * D], of the M target layers' means
    main_norm: Any  # [1, D]
    layers: LayerParams
    norm: Any  # [1, D]
    head_mixing: MixingParams | None
    markov_embed: Any  # [W, r], of the token before
    markov_head: Any  # [W, r], of the token's scores
    confidence: Any  # [1, D + r], columns of the hidden state first


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Params:
    """All parameters of a model; `dense`, `moe`, `mtp` are None without such layers, `head` if it is tied.

    `mtp` makes drafts, and is named so in checkpoints: MTP modules, or the stages of DSpark.
    """

    embed: Any  # [W, D]
    dense: LayerParams | None
    moe: LayerParams | None
    norm: Any  # [D]
    head: Any  # [W, D]
    mtp: MtpParams | DSparkParams | None
    head_mixing: MixingParams | None = None  # of models with several streams


def declare(cfg: ModelConfig) -> Params:
    """Returns the parameter tree of `cfg` with a `ParamSpec` at every leaf."""
    D, W = cfg.hidden_size, cfg.vocab_size
    groups = {group.name: _layers(cfg, group.first, group.depth, moe=group.name == "moe") for group in cfg.layer_groups}
    drafting: MtpParams | DSparkParams | None = None
    if cfg.dspark is not None:
        drafting = _dspark(cfg, cfg.dspark)
    elif cfg.num_nextn_predict_layers:
        drafting = _mtp(cfg, cfg.num_nextn_predict_layers)
    return Params(
        embed=ParamSpec((W, D), (None, "channels")),
        dense=groups.get("dense"),
        moe=groups.get("moe"),
        norm=ParamSpec((D,), (None,), "ones"),
        head=None if cfg.tie_word_embeddings else ParamSpec((W, D), ("vocab", None)),
        mtp=drafting,
        head_mixing=_mixing(cfg, at_head=True),
    )


def _layers(cfg: ModelConfig, first: int, L: int, *, moe: bool) -> LayerParams:
    """Declares the layers `first` to `first + L - 1`."""
    return LayerParams(
        input_norm=_norm(L, cfg.hidden_size),
        attention=_attention(cfg, first, L) if cfg.compressed is None else _compressed(cfg, cfg.compressed, first, L),
        post_norm=_norm(L, cfg.hidden_size),
        mlp=None if moe else _mlp(L, cfg.hidden_size, cfg.intermediate_size),
        moe=_moe(cfg, first, L) if moe else None,
        post_moe_norm=_norm(L, cfg.hidden_size) if moe and cfg.post_moe_norm else None,
        attention_mixing=_mixing(cfg, L),
        moe_mixing=_mixing(cfg, L),
    )


def _attention(cfg: ModelConfig, first: int, L: int) -> AttentionParams:
    indexers = sum(first <= layer < first + L for layer in cfg.index_layers)
    D, H, R, Q = cfg.hidden_size, cfg.num_attention_heads, cfg.kv_lora_rank, cfg.q_lora_rank
    q_rows = H * cfg.qk_head_dim
    return AttentionParams(
        qkv_a=_linear(L, (Q or q_rows) + cfg.latent_dim, D, None if Q else "heads_latent"),
        q_norm=_norm(L, Q) if Q else None,
        q_b=_linear(L, q_rows, Q, "heads") if Q else None,
        kv_norm=_norm(L, R),
        k_up=ParamSpec((L, H, cfg.qk_nope_head_dim, R), ("layers", "heads", None, None)),
        v_up=ParamSpec((L, H, cfg.v_head_dim, R), ("layers", "heads", None, None)),
        o=_linear(L, D, H * cfg.v_head_dim, None, "heads"),
        indexer=_indexer(cfg, indexers) if indexers else None,
    )


def _compressed(cfg: ModelConfig, compressed: CompressedAttention, first: int, L: int) -> CompressedAttentionParams:
    D, H, Q, d = cfg.hidden_size, cfg.num_attention_heads, cfg.q_lora_rank, cfg.latent_dim
    G, r, indexer = compressed.output_groups, compressed.output_rank, compressed.indexer
    assert Q is not None  # every configuration with compressed attention has it
    ratios = compressed.ratios[first : first + L]  # layers that make drafts come behind them, and have no entries
    Ls, heavy = ratios.count(compressed.sparse_ratio), [r for r in ratios if r not in (0, compressed.sparse_ratio)]
    return CompressedAttentionParams(
        qkv_a=_linear(L, Q + d, D),
        q_norm=_norm(L, Q),
        q_b=_linear(L, H * d, Q, "heads"),
        kv_norm=_norm(L, d),
        sink=ParamSpec((L, H), ("layers", "heads"), "zeros", dtype=jnp.float32),
        o_a=ParamSpec((L, G, r, H * d // G), ("layers", "heads", None, None)),
        o_b=_linear(L, D, G * r, None, "heads"),
        sparse=_compressor(Ls, D, d, compressed.sparse_ratio, 2) if Ls else None,
        indexer=(
            PooledIndexerParams(
                q_b=_linear(Ls, indexer.num_heads * indexer.head_dim, Q),
                weights=_exact(Ls, indexer.num_heads, D),
                compressor=_compressor(Ls, D, indexer.head_dim, compressed.sparse_ratio, 2),
            )
            if Ls
            else None
        ),
        heavy=_compressor(len(heavy), D, d, heavy[0], 1) if heavy else None,
    )


def _compressor(Lc: int, D: int, d: int, ratio: int, series: int) -> CompressorParams:
    return CompressorParams(
        value_score=ParamSpec((Lc, 2 * series * d, D), ("layers", None, None)),
        position=ParamSpec((Lc, ratio, series * d), ("layers", None, None), "zeros", dtype=jnp.float32),
        norm=_norm(Lc, d),
    )


def _mixing(cfg: ModelConfig, *layers: int, at_head: bool = False) -> MixingParams | None:
    """Declares the mixing of streams at one place of so many `layers`, or behind the last one; None for one stream."""
    if cfg.hyper_connections is None:
        return None
    n = cfg.hyper_connections.streams
    rows, scales = (n, 1) if at_head else (n * (n + 2), 3)
    axes: tuple[Axis, ...] = tuple("layers" for _ in layers)
    return MixingParams(
        weight=ParamSpec((*layers, rows, n * cfg.hidden_size), (*axes, None, None), dtype=jnp.float32),
        base=ParamSpec((*layers, rows), (*axes, None), "zeros", dtype=jnp.float32),
        scale=ParamSpec((*layers, scales), (*axes, None), "ones", dtype=jnp.float32),
    )


def _indexer(cfg: ModelConfig, Li: int) -> IndexerParams:
    indexer, D = cfg.indexer, cfg.hidden_size
    assert indexer is not None and cfg.q_lora_rank is not None  # layers have indexers only then
    Hi, Y = indexer.num_heads, indexer.head_dim
    return IndexerParams(
        q_b=_linear(Li, Hi * Y, cfg.q_lora_rank),
        k=_linear(Li, Y, D),
        k_norm=_exact(Li, Y, init="ones"),
        k_bias=_exact(Li, Y, init="zeros"),
        weights=_exact(Li, Hi, D),
    )


def _exact(L: int, *shape: int, init: Init = "normal") -> ParamSpec:
    """Declares a float32 parameter, which takes the model's type where the checkpoint holds it so."""
    return ParamSpec((L, *shape), ("layers", *(None for _ in shape)), init, dtype=jnp.float32, as_stored=True)


def _moe(cfg: ModelConfig, first: int, L: int) -> MoeParams:
    D, E, I = cfg.hidden_size, cfg.n_routed_experts, cfg.moe_intermediate_size  # noqa: E741
    stack: tuple[Axis, ...] = ("layers", "experts", None, None)
    Lh = max(0, min(first + L, cfg.num_hash_layers) - first)
    biased = L - Lh if cfg.topk_method == "noaux_tc" else 0
    table = (Lh, cfg.vocab_size, cfg.num_experts_per_tok)
    return MoeParams(
        router=_exact(L, E, D),
        router_bias=ParamSpec((biased, E), ("layers", None), "zeros", dtype=jnp.float32) if biased else None,
        gate_up=ParamSpec((L, E, 2 * I, D), stack, quantizable=True),
        down=ParamSpec((L, E, D, I), stack, quantizable=True),
        shared=_mlp(L, D, cfg.n_shared_experts * I) if cfg.n_shared_experts else None,
        by_token=ParamSpec(table, ("layers", None, None), "range", dtype=jnp.int32) if Lh else None,
    )


def _dspark(cfg: ModelConfig, dspark: DSparkConfig) -> DSparkParams:
    D, W, r = cfg.hidden_size, cfg.vocab_size, dspark.markov_rank
    return DSparkParams(
        main_proj=_linear(1, D, cfg.draft_input_width),
        main_norm=_norm(1, D),
        layers=_layers(cfg, cfg.num_hidden_layers, dspark.stages, moe=True),
        norm=_norm(1, D),
        head_mixing=_mixing(cfg, at_head=True),
        markov_embed=ParamSpec((W, r), (None, None)),
        markov_head=ParamSpec((W, r), ("vocab", None)),
        confidence=ParamSpec((1, D + r), (None, None)),
    )


def _mtp(cfg: ModelConfig, L: int) -> MtpParams:
    D = cfg.hidden_size
    return MtpParams(
        embed_norm=_norm(L, D),
        hidden_norm=_norm(L, D),
        proj=ParamSpec((L, D, 2 * D), ("layers", None, None)),
        layers=_layers(cfg, cfg.num_hidden_layers, L, moe=True),
        norm=_norm(L, D),
        head_mixing=_mixing(cfg, L, at_head=True),
    )


def _mlp(L: int, D: int, F: int) -> MlpParams:
    return MlpParams(gate_up=_linear(L, 2 * F, D, "gate_up"), down=_linear(L, D, F, None, "mlp"))


def _linear(L: int, out: int, inp: int, out_axis: Axis = None, in_axis: Axis = None) -> ParamSpec:
    return ParamSpec((L, out, inp), ("layers", out_axis, in_axis), quantizable=True)


def _norm(L: int, width: int) -> ParamSpec:
    return ParamSpec((L, width), ("layers", None), "ones")


def abstract(cfg: ModelConfig, dtype: Any) -> Params:
    """Returns what `initialize` makes in `dtype`, with `jax.ShapeDtypeStruct` for arrays."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype_in(dtype)), declare(cfg))


def initialize(cfg: ModelConfig, key: jax.Array, dtype: Any, *, std: float = 0.02) -> Params:
    """Returns random parameters: normal with standard deviation `std`, ones for norms, zeros for the router's bias."""
    specs, tree = jax.tree.flatten(declare(cfg))
    keys = jax.random.split(key, len(specs))
    return jax.tree.unflatten(tree, [_draw(s, k, dtype, std) for s, k in zip(specs, keys, strict=True)])


def _draw(spec: ParamSpec, key: jax.Array, dtype: Any, std: float) -> jax.Array:
    dtype = spec.dtype_in(dtype)
    if spec.init == "normal":
        return (std * jax.random.normal(key, spec.shape)).astype(dtype)
    if spec.init == "range":
        return jnp.broadcast_to(jnp.arange(spec.shape[-1], dtype=dtype), spec.shape)
    return jnp.full(spec.shape, 1 if spec.init == "ones" else 0, dtype)
