"""The hyper-parameters of a model of the DeepSeek-V3 family, as plain frozen dataclasses.

Field names follow the Hugging Face `config.json` of the family, so that a reader who knows one knows the other.
`dsv3.config.hugging_face` builds a `ModelConfig` from such a file and refuses what it does not understand.
"""

import dataclasses
import math
import sys
from typing import Literal, NamedTuple

PAGE_SIZE = 64
"""Tokens in a page of latents: FlashMLA's page, which the kernels are made for."""

FP8 = "fp8"
"""The cache dtype whose rows are e4m3 values with their scales; the others are names of float types."""

LATENTS, INDEX_KEYS = "latents", "index_keys"
"""Names of the cache groups of MLA and of its indexer."""

SPARSE_ENTRIES, HEAVY_ENTRIES = "sparse_entries", "heavy_entries"
"""Names of the cache groups of compressed entries: those that an indexer chooses among, and those that all are seen."""

WINDOW_LATENTS = "window_latents"
"""Name of the cache group of the last tokens' latents, beside compressed entries."""

SPARSE_PARTS, INDEX_PARTS, HEAVY_PARTS = "sparse_parts", "index_parts", "heavy_parts"
"""Names of the cache groups of what the last tokens give to entries and index keys that are not complete."""

SPARSE_TAILS, INDEX_TAILS = "sparse_tails", "index_tails"
"""Names of the cache groups of what the last tokens of a page give to the first entry, and key, of the next one."""

DRAFT_ROWS = 8
"""Rows that a ring has beyond what the next token needs: so many drafts a step may have, and reject."""

Lifetime = Literal["context", "window", "request"]
"""How long the cache keeps the rows of a group; see `CacheGroup`."""


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Layers that keep the same thing of a token.

    Each of the cache layers `layers` has one row, `width` values of `dtype`, per `tokens_per_entry` tokens.

    `lifetime` says how long. Rows of the "context" lie in pages, which a request holds to its end. Those of the
    "window" lie in pages of as many tokens, but of a pool of their own: a request holds those that its window reaches.
    There token t of a page has row `t % ring`. Those of the "request" lie in its slot of the batch, token t of the
    request in row `t % ring`, and nothing keeps them beyond the request.
    """

    name: str
    layers: tuple[int, ...]
    width: int
    dtype: str
    tokens_per_entry: int = 1
    lifetime: Lifetime = "context"
    ring: int = 0  # rows of a page, or of a slot, where the lifetime is not "context"


def cache_row(cache_dtype: str, values: int, rotated: int = 0) -> tuple[int, str]:
    """Returns width and dtype of a cached row of `values`, and of `rotated` ones that FP8 keeps in bfloat16.

    FP8 rows are bytes, with a float32 scale per 128 values, as `pallas_kernels.mla.layout` has them.
    """
    if cache_dtype == FP8:
        return values + 4 * -(-values // 128) + 2 * rotated, "uint8"
    return values + rotated, cache_dtype


def entry_row(cache_dtype: str, values: int, rotated: int) -> tuple[int, str]:
    """Returns width and dtype of a compressed entry, or of a latent of the window beside it: 584 bytes in FP8.

    FP8 rows have an e8m0 scale per 64 values, padded to whole 8 bytes, as FlashMLA has them; see `cache_row`.
    """
    if cache_dtype == FP8:
        return values + 8 * -(-values // 512) + 2 * rotated, "uint8"
    return values + rotated, cache_dtype


@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """YaRN rotary scaling (arXiv:2309.00071) as DeepSeek uses it; `rope_scaling` with type "yarn" in a checkpoint."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclasses.dataclass(frozen=True)
class QueryScaling:
    """A factor on queries that grows with their position (Llama 4, Mistral).

    The query at position p is multiplied by `1 + beta * ln(1 + floor(p / original_max_position_embeddings))`.
    """

    beta: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class Fp8Config:
    """Block-scaled FP8 weights: e4m3 values, one float32 scale per 128 x 128 block, by which values are multiplied.

    `scale_fmt` "ue8m0" rounds scales, of weights and activations, up to powers of two (DeepSeek-V3.1).
    """

    scale_fmt: Literal["float32", "ue8m0"] = "float32"


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """Sparse attention (DeepSeek-V3.2): an indexer scores the cached tokens, and a query attends to the best of them.

    `num_heads` heads of width `head_dim` score each token; the `topk` tokens with the highest sums are attended to, all
    where there are no more. The first P values of the indexer's queries and keys are rotated in two halves, or in pairs
    like those of the heads where it is `interleaved` (GLM). `shared_layers` are decoder layers without an indexer: they
    attend to what the last layer with one has chosen.
    """

    num_heads: int
    head_dim: int
    topk: int
    interleaved: bool = False
    shared_layers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class CompressedAttention:
    """Attention to a window and to compressed entries (DeepSeek-V4, arXiv:2606.19348): one latent is key and value.

    A query of any layer sees the last `window` tokens, itself included. Layer i also sees an entry per `ratios[i]`
    earlier tokens; 0: none. Entries of `sparse_ratio` are made of two windows each, and `indexer` chooses among them;
    of another ratio all are seen. Layers with entries rotate by `rope_theta` and `yarn`, the others by the model's own
    `rope_theta`. The heads' output goes through `output_groups` products of width `output_rank` before the last one.
    """

    ratios: tuple[int, ...]
    sparse_ratio: int
    window: int
    indexer: IndexerConfig
    rope_theta: float
    yarn: YarnConfig | None
    output_groups: int
    output_rank: int

    @property
    def num_sparse(self) -> int:
        """Layers whose entries an indexer chooses."""
        return self.ratios.count(self.sparse_ratio)

    @property
    def heavy_ratios(self) -> tuple[int, ...]:
        """Ratios of the layers that see all their entries."""
        return tuple(ratio for ratio in self.ratios if ratio not in (0, self.sparse_ratio))

    @property
    def num_heavy(self) -> int:
        """Layers that see all their entries."""
        return len(self.heavy_ratios)


@dataclasses.dataclass(frozen=True)
class HyperConnections:
    """Several residual streams, mixed around every block (arXiv:2512.24880): `streams` of them.

    What goes from stream to stream is made doubly stochastic in `sinkhorn_iterations`, with `eps` in its quotients.
    """

    streams: int
    sinkhorn_iterations: int
    eps: float


@dataclasses.dataclass(frozen=True)
class DSparkConfig:
    """Drafts of a whole block in one pass (DSpark, in DeepSeek-V4's final checkpoints).

    `stages` layers read the mean streams behind `target_layers`, in ascending order, and propose `block_size` tokens,
    from placeholders `noise_token_id`; a correction of rank `markov_rank` makes each depend on the one before it.
    """

    stages: int
    block_size: int
    noise_token_id: int
    target_layers: tuple[int, ...]
    markov_rank: int


class LayerGroup(NamedTuple):
    """Consecutive decoder layers that are alike: `depth` of them, from layer `first` on, which is a cache layer too.

    `name` is that of their parameters, and occurs once: layers of "dense" have an MLP, those of "moe" routed experts.
    """

    name: Literal["dense", "moe"]
    first: int
    depth: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Hyper-parameters of one DeepSeek-V3-family model; hashable, so it can be a static argument of a jitted function.

    `q_lora_rank` None: queries come from one projection (V2-Lite, Moonlight). `topk_method` "greedy" picks over all
    experts, "group_limited_greedy" ranks groups by their best expert (V2), "noaux_tc" by the sum of their two best
    bias-corrected scores (V3). `latent_norm_eps` is the epsilon of the two latent norms, 1e-6 in every published
    model whatever `rms_norm_eps` says. `post_moe_norm` says that what the experts of a layer give together, the shared
    one included, is normed before it is added (A.X-K1). `int4_experts` says that the checkpoint holds its routed
    experts, and nothing else, as INT4 with a scale per 32 columns (Kimi-K2-Thinking), `fp4_experts` as e2m1 with an
    e8m0 scale per 32 columns (DeepSeek-V4).

    DeepSeek-V4 has `compressed` attention and `hyper_connections`. Its latent, key and value in one, has
    `kv_lora_rank` values that are not rotated and `qk_rope_head_dim` that are. In its first `num_hash_layers` layers a
    token's id says which experts take it. `swiglu_limit` bounds what SwiGLU multiplies. `dspark` describes what a
    model may have in place of MTP modules.

    `context_shards` is no property of a model: it says over how many devices serving divides a page of the cache
    (`dsv3.model.context_parallel`).

    `family` is the `model_type` of the file that a configuration was read from. It says nothing about what is computed,
    so it takes no part in comparisons.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    q_lora_rank: int | None = None
    n_group: int = 1
    topk_group: int = 1
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] = "noaux_tc"
    scoring_func: Literal["sigmoid", "softmax", "sqrtsoftplus"] = "sigmoid"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 1
    num_nextn_predict_layers: int = 0
    rms_norm_eps: float = 1e-6
    latent_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    yarn: YarnConfig | None = None
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    fp8: Fp8Config | None = None
    int4_experts: bool = False
    query_scaling: QueryScaling | None = None
    post_moe_norm: bool = False
    indexer: IndexerConfig | None = None
    compressed: CompressedAttention | None = None
    hyper_connections: HyperConnections | None = None
    num_hash_layers: int = 0
    swiglu_limit: float | None = None
    fp4_experts: bool = False
    dspark: DSparkConfig | None = None
    context_shards: int = 1
    family: str | None = dataclasses.field(default=None, compare=False)

    @property
    def page_size(self) -> int:
        """Tokens that a page of the cache covers, in all layers: 64, or those of 64 entries to choose among.

        Where devices divide a page, each has as many of it.
        """
        return PAGE_SIZE * self.context_shards * (1 if self.compressed is None else self.compressed.sparse_ratio)

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key of one head, N + P."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values the cache holds for one token in one layer, R + P (576 in DeepSeek-V3)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def num_dense_layers(self) -> int:
        """Leading layers with a dense MLP."""
        return min(self.first_k_dense_replace, self.num_hidden_layers)

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts, the MTP modules not counted."""
        return self.num_hidden_layers - self.num_dense_layers

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The decoder's layers in their order, without the MTP modules."""
        dense, moe = self.num_dense_layers, self.num_moe_layers
        return tuple(group for group in (LayerGroup("dense", 0, dense), LayerGroup("moe", dense, moe)) if group.depth)

    @property
    def num_cache_layers(self) -> int:
        """Layers that own pages in the latent cache: the decoder's, and behind them those that make drafts."""
        return self.num_hidden_layers + self.num_draft_layers

    @property
    def num_draft_layers(self) -> int:
        """Layers that make drafts: one per MTP module, or the stages of DSpark."""
        return self.num_nextn_predict_layers if self.dspark is None else self.dspark.stages

    @property
    def residual_width(self) -> int:
        """Values that a token carries from layer to layer: those of all streams."""
        return self.hidden_size * (1 if self.hyper_connections is None else self.hyper_connections.streams)

    @property
    def draft_input_width(self) -> int:
        """Values that the layers which make drafts take of a token: all streams, or a mean per target layer."""
        if self.dspark is None:
            return self.residual_width
        return self.hidden_size * len(self.dspark.target_layers)

    @property
    def index_layers(self) -> tuple[int, ...]:
        """Cache layers with an indexer: they own pages of index keys too. None in a model of dense attention."""
        if self.indexer is None:
            return ()
        return tuple(layer for layer in range(self.num_cache_layers) if layer not in self.indexer.shared_layers)

    def cache_groups(self, cache_dtype: str) -> tuple[CacheGroup, ...]:
        """Returns what the cache keeps of tokens. Names and layers are the same for every `cache_dtype`.

        Everything about the cache follows from them and from `page_size` (`dsv3.kv_cache.layout`). Their order is that
        of the bytes in a page's value, which tiers keep and instances send.

        In compressed attention, entries and index keys are kept for the whole context. The window, and what compressors
        need of the last tokens, grow with requests and not with tokens.
        """
        if self.compressed is not None:
            return self._entry_groups(self.compressed, cache_dtype)
        row = cache_row(cache_dtype, self.kv_lora_rank, self.qk_rope_head_dim)
        latents = CacheGroup(LATENTS, tuple(range(self.num_cache_layers)), *row)
        if self.indexer is None:
            return (latents,)
        return latents, CacheGroup(INDEX_KEYS, self.index_layers, *cache_row(cache_dtype, self.indexer.head_dim))

    def _entry_groups(self, compressed: CompressedAttention, cache_dtype: str) -> tuple[CacheGroup, ...]:
        row = entry_row(cache_dtype, self.kv_lora_rank, self.qk_rope_head_dim)
        keys = cache_row(cache_dtype, compressed.indexer.head_dim)
        ratio, d, Y = compressed.sparse_ratio, self.latent_dim, compressed.indexer.head_dim
        sparse = tuple(i for i, other in enumerate(compressed.ratios) if other == ratio)
        heavy = tuple(i for i, other in enumerate(compressed.ratios) if other not in (0, ratio))
        span = compressed.ratios[heavy[0]] if heavy else 1

        def rows(name: str, layers: tuple[int, ...], width: int, count: int, lifetime: Lifetime) -> CacheGroup:
            return CacheGroup(name, layers, width, "float32", lifetime=lifetime, ring=count)

        groups = (
            CacheGroup(SPARSE_ENTRIES, sparse, *row, ratio),
            CacheGroup(INDEX_KEYS, sparse, *keys, ratio),
            CacheGroup(HEAVY_ENTRIES, heavy, *row, span),
            CacheGroup(
                WINDOW_LATENTS,
                tuple(range(self.num_cache_layers)),
                *row,
                lifetime="window",
                ring=max(compressed.window, 2 * ratio) + DRAFT_ROWS,
            ),
            # Sparse layers keep two series of values and scores, and the next window starts with the first of them;
            # heavy layers keep one.
            rows(SPARSE_TAILS, sparse, 2 * d, ratio, "window"),
            rows(INDEX_TAILS, sparse, 2 * Y, ratio, "window"),
            rows(SPARSE_PARTS, sparse, 4 * d, 2 * ratio + DRAFT_ROWS, "request"),
            rows(INDEX_PARTS, sparse, 4 * Y, 2 * ratio + DRAFT_ROWS, "request"),
            rows(HEAVY_PARTS, heavy, 2 * d, span + DRAFT_ROWS, "request"),
        )
        return tuple(group for group in groups if group.layers)

    @property
    def index_topk(self) -> int:
        """Tokens that a query attends to at most: as many as an indexer chooses, in dense attention any number."""
        return sys.maxsize if self.indexer is None else self.indexer.topk

    @property
    def softmax_scale(self) -> float:
        """Scale of the attention scores, with YaRN's temperature (0.1352338 for DeepSeek-V3)."""
        scale = self.qk_head_dim**-0.5
        if self.yarn is None or not self.yarn.mscale_all_dim or self.yarn.factor <= 1:
            return scale
        return scale * (0.1 * self.yarn.mscale_all_dim * math.log(self.yarn.factor) + 1.0) ** 2


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Weights of one layer in elements (or bytes: FP8 has one each), and of the head.

    `per_head` are products of each head, or group of heads, which are bfloat16 in every model: kv_b, or the first of
    DeepSeek-V4's two output projections. Layers with compressed entries have a compressor, `sparse` where entries are
    chosen and `heavy` where all are seen. `indexer` includes the one of its keys. `mixing` is that of both blocks.
    """

    down: int  # qkv_a
    query: int  # q_b
    per_head: int
    out: int
    router: int
    expert: int
    shared: int
    dense: int
    head: int
    indexer: int = 0  # of a layer that has one
    sparse: int = 0
    heavy: int = 0
    mixing: int = 0

    @property
    def attention(self) -> int:
        """Weights that attention has in every layer."""
        return self.down + self.query + self.per_head + self.out


def sizes_of(model: ModelConfig) -> Sizes:
    """Returns the sizes of a model: 187.1M attention weights per layer and 44.04M per expert for DeepSeek-V3."""
    D, H, Q, d = model.hidden_size, model.num_attention_heads, model.q_lora_rank, model.latent_dim
    queries, expert = H * model.qk_head_dim, 3 * D * model.moe_intermediate_size
    compressed, hyper, indexer = model.compressed, model.hyper_connections, model.indexer
    per_head, out = H * (model.qk_nope_head_dim + model.v_head_dim) * model.kv_lora_rank, D * H * model.v_head_dim
    key = D  # weights of an index key, per value of it
    if compressed is not None:  # rows of values and of scores; two series of each where entries overlap
        per_head, out = compressed.output_rank * queries, D * compressed.output_groups * compressed.output_rank
        indexer, key = compressed.indexer, 4 * D
    return Sizes(
        down=D * ((Q or queries) + d),
        query=queries * Q if Q else 0,
        per_head=per_head,
        out=out,
        router=model.n_routed_experts * D,
        expert=expert,
        shared=expert * model.n_shared_experts,
        dense=3 * D * model.intermediate_size,
        head=D * model.vocab_size,
        indexer=indexer.num_heads * (indexer.head_dim * (Q or 0) + D) + indexer.head_dim * key if indexer else 0,
        sparse=4 * d * D if compressed else 0,
        heavy=2 * d * D if compressed else 0,
        mixing=2 * hyper.streams * (hyper.streams + 2) * hyper.streams * D if hyper else 0,
    )


def itemsizes(model: ModelConfig) -> tuple[float, float]:
    """Returns the bytes of an element of routed experts, and of other weights, on devices.

    INT4 and FP4 have 4 bits and a 32nd of a 16-bit scale, or of 8 bits. Scales of blocks are not counted.
    """
    item = 1 if model.fp8 else 2
    return 4.5 / 8 if model.int4_experts else 4.25 / 8 if model.fp4_experts else item, item


def entry_weights(model: ModelConfig) -> int:
    """Returns the weights of all compressors and of the indexers that choose among their entries."""
    if model.compressed is None:
        return 0
    sizes = sizes_of(model)
    return model.compressed.num_sparse * (sizes.sparse + sizes.indexer) + model.compressed.num_heavy * sizes.heavy


def common_weights(model: ModelConfig) -> int:
    """Returns the weights of all layers that every token meets, in elements, without routers and V3.2's indexers."""
    sizes = sizes_of(model)
    blocks = model.num_moe_layers * sizes.shared + model.num_dense_layers * sizes.dense
    return model.num_hidden_layers * (sizes.attention + sizes.mixing) + blocks + entry_weights(model)


def absorbed_operations(model: ModelConfig) -> int:
    """Returns the operations of absorbed attention in a layer, for one query token and one token that it sees.

    In compressed attention an entry costs as much as a token, and values are whole latents.
    """
    values = model.kv_lora_rank if model.compressed is None else model.latent_dim
    return 2 * model.num_attention_heads * (model.latent_dim + values)


def materialized_operations(model: ModelConfig) -> int:
    """Returns those of attention to keys and values of every head."""
    return 2 * model.num_attention_heads * (model.qk_head_dim + model.v_head_dim)


def materialization_operations(model: ModelConfig) -> int:
    """Returns the operations that materialize one token's keys and values in a layer; 0 in compressed attention."""
    if model.compressed is not None:
        return 0
    return 2 * model.num_attention_heads * (model.qk_nope_head_dim + model.v_head_dim) * model.kv_lora_rank


def index_operations(model: ModelConfig) -> int:
    """Returns the operations of an index score of one query token and one index key; 0 without an indexer."""
    indexer = model.indexer if model.compressed is None else model.compressed.indexer
    return 2 * indexer.num_heads * indexer.head_dim if indexer else 0


def key_operations(model: ModelConfig) -> float:
    """Returns the operations of attention in all layers for one query token and one more token of a long context.

    Dense attention is materialized. In compressed attention a token is a fraction of an entry, or of an index key.
    """
    compressed = model.compressed
    if compressed is None:
        return model.num_hidden_layers * materialized_operations(model)
    scores = compressed.num_sparse * index_operations(model) / compressed.sparse_ratio
    return scores + sum(absorbed_operations(model) / ratio for ratio in compressed.heavy_ratios)


def bounded_operations(model: ModelConfig) -> int:
    """Returns the operations of attention to the window and to the chosen entries, for one query token: they do not
    grow with the context."""
    compressed = model.compressed
    if compressed is None:
        return 0
    rows = model.num_hidden_layers * compressed.window + compressed.num_sparse * compressed.indexer.topk
    return rows * absorbed_operations(model)
