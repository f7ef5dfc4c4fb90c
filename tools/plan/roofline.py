"""The roofline model of a step's time, and a calibrated model by stage. Both are estimates.

`decode_roofline` assumes peak rates and perfect overlap. `decode_stages` and `prefill_stages` are calibrated: they use
the rates of DeepSeek's kernels on an H800 (FlashMLA, DeepGEMM, DeepEP; other devices scale by their peaks) and a fixed
time per kernel. Tests recompute the errors in `KNOWN_ERRORS`.

A stage is one micro-batch's part of one layer, named as in `tools.plan.hlo.LABELS`. The stage "attention" is from the
attention core to the output projection.
"""

import dataclasses
from collections.abc import Callable

from dsv3.config.device_rates import FP4_PRODUCTS, LAUNCH_S, PREFILL_OVERHEAD
from dsv3.config.model import ModelConfig, absorbed_operations, common_weights, itemsizes, sizes_of
from dsv3.kv_cache.layout import row_bytes
from dsv3.model.forms import needs_topk
from tools.plan.attention import (
    SparseCore,
    cache_reads,
    compressed_core,
    core_operations,
    dense_core,
    index_share,
    index_weights,
    product_elements,
    product_launches,
    sparse_core,
    sparse_roofline,
)
from tools.plan.deployment import Device, PlannedBatch, Rates

KNOWN_ERRORS = (
    "decode, DeepSeek's profile (EP128, 128 tokens per micro-batch, 4K): 61 layers -3 %",
    "decode, DeepSeek's profile (64 tokens per micro-batch, 18.6k tokens/s per node): +1 %",
    "decode, DeepSeek's fleet (14.8k tokens/s per node): 0 %: one constant (32 us of small kernels) is fitted to it",
    "prefill, DeepSeek's profile (62.7k tokens/s per node): +10 %; its fleet reached half (32.2k computed tokens/s)",
)


_SMALL_KERNELS_S = 32e-6
_ROUTER_S = 19e-6
_MIXING_LAUNCHES = 3  # of a block: product, weights and what it reads, what it writes (`benchmarks.launches`)
_STREAM_PASSES = 4  # of a block over all streams: three that read them, and one that writes
_FLOAT32_FLOPS = 67 / 989  # of the peak in bfloat16: products of mixing, by the data sheet of an H200
_MERGE_LAUNCHES = 3  # with context parallelism: pack the queries, unpack the parts, merge them
TRANSFER_S = 20e-6
HOOK_S = 8e-6
HOST_S = 1.5e-3


@dataclasses.dataclass(frozen=True)
class DecodeRoofline:
    """Seconds of the parts of a decode step at peak rates, on one device."""

    weights: float
    cache: float
    core: float
    products: float
    wire: float

    @property
    def step(self) -> float:
        """Seconds of the step: compute or wire, whichever is longer."""
        return max(self.weights + max(self.cache, self.core) + self.products, self.wire)


def decode_roofline(
    model: ModelConfig,
    device: Device,
    requests: int,
    context: int,
    experts_per_device: int,
    cache_dtype: str = "bfloat16",
    width: int = 1,
    sharing: int = 1,
    link: float | None = None,
) -> DecodeRoofline:
    """Returns the roofline of one device that decodes `width` tokens of `requests` with `context` tokens each.

    `sharing` devices split the head. Each of a token's experts gets its own copy over `link`, by default that between
    nodes, as in DeepEP's low-latency kernels.
    """
    sizes, L, moe = sizes_of(model), model.num_hidden_layers, model.num_moe_layers
    expert_item, item = itemsizes(model)
    indexers = L * index_share(model) * index_weights(model, needs_topk(model, context))
    shared = common_weights(model) + indexers
    tokens = requests * width
    experts = experts_read(experts_per_device, tokens * model.num_experts_per_tok)
    read = item * shared + expert_item * moe * experts * sizes.expert + 2 * sizes.head / sharing
    done = 2 * tokens * (shared + moe * model.num_experts_per_tok * sizes.expert)
    head = 2 * tokens * sizes.head
    row = sum(wire_rows(model))
    cached, operations = (L * each for each in sparse_roofline(model, context, cache_dtype))
    if model.compressed is not None:
        cached, operations = sum(cache_reads(model, context, cache_dtype)), core_operations(model, context)
    return DecodeRoofline(
        weights=read / device.hbm_bytes_per_second,
        cache=requests * cached / device.hbm_bytes_per_second,
        core=tokens * operations / device.bf16_flops,
        products=done / (device.fp8_flops if model.fp8 else device.bf16_flops) + head / device.bf16_flops,
        wire=moe * model.num_experts_per_tok * tokens * row / (link or device.cross_link),
    )


def experts_read(experts: int, rows: float) -> float:
    """Returns how many of a device's `experts` any of `rows` choices fall on, all equally likely."""
    return experts * (1 - (1 - 1 / experts) ** rows) if experts else 0.0


def wire_rows(model: ModelConfig) -> tuple[int, int]:
    """Returns the bytes of a row on dispatch (FP8 and scales, or bf16) and on combine (bf16)."""
    D = model.hidden_size
    return (D + 4 * -(-D // 128) if model.fp8 else 2 * D), 2 * D


def sparse_parts(model: ModelConfig, rates: Rates, batch: PlannedBatch) -> SparseCore | None:
    """Returns the parts of sparse attention if any query needs top-k selection; None for dense attention.

    Compressed attention always has such parts.
    """
    if model.compressed is not None:
        return compressed_core(model, rates, batch, LAUNCH_S)
    return sparse_core(model, rates, batch, LAUNCH_S) if needs_topk(model, batch.max_keys) else None


def decode_stages(model: ModelConfig, rates: Rates, batch: PlannedBatch) -> dict[str, float]:
    """Returns the seconds of each stage of one layer for a decode micro-batch.

    A device reads the experts that rows choose: all it has, except in small batches. Loads of devices are even.
    """
    sizes, b, n = sizes_of(model), batch.tokens, batch.split
    expert_item, item = itemsizes(model)

    def dense(elements: float, itemsize: float = item, split: int = n) -> float:
        work = 2 * b * elements / rates.dense_flops
        return max(elements * itemsize / rates.dense_bandwidth, work) / split + LAUNCH_S

    # The devices of a rank share heads, but not those of the indexer.
    sparse = sparse_parts(model, rates, batch)
    products = b * batch.keys * absorbed_operations(model) / n / rates.decode_core_flops
    keys = batch.keys / batch.context_split
    cache = b / batch.width * keys * row_bytes(model, batch.cache_dtype) / rates.hbm
    core = max(products, cache) if sparse is None else sparse.seconds
    core += 0.0 if batch.context_split == 1 else _MERGE_LAUNCHES * LAUNCH_S
    rows = b * model.num_experts_per_tok / n  # even load: a device receives as many rows as it sends
    routed = experts_read(batch.experts, rows) * sizes.expert * expert_item / rates.grouped_bandwidth
    work = 2 * rows * sizes.expert / expert_flops(model, rates.grouped_flops)
    per_head = bf16_product(model, rates, b, sizes.per_head) / n + LAUNCH_S
    chosen = _indexing_seconds(model, rates, b, index_weights(model, sparse is not None), dense)
    return {
        "project": dense(sizes.down, split=1) + (dense(sizes.query) if sizes.query else 0) + chosen + 4 * LAUNCH_S,
        "attention": core + per_head + dense(sizes.out) + _SMALL_KERNELS_S,
        "mixing": mixing_seconds(model, rates, b) + 2 * _MIXING_LAUNCHES * LAUNCH_S if sizes.mixing else 0.0,
        "router": _ROUTER_S,
        "shared_expert": dense(sizes.shared) + 3 * LAUNCH_S if sizes.shared else 0.0,
        "experts": max(routed, work) + 5 * LAUNCH_S,
        "mlp": dense(sizes.dense) + 3 * LAUNCH_S if sizes.dense else 0.0,
        "head": bf16_product(model, rates, b, sizes.head),
    }


def _indexing_seconds(model: ModelConfig, rates: Rates, rows: int, elements: int, dense: Callable[..., float]) -> float:
    """Returns the mean seconds of a layer's products for indexers and compressors; `elements` are V3.2's."""
    if model.compressed is None:
        return index_share(model) * (dense(elements, split=1) if elements else 0)
    L, (fp8, bf16) = model.num_hidden_layers, product_elements(model)
    seconds = max(fp8 / rates.dense_bandwidth, 2 * rows * fp8 / rates.dense_flops)
    return (seconds + bf16_product(model, rates, rows, bf16)) / L + product_launches(model) * LAUNCH_S


def expert_flops(model: ModelConfig, flops: float) -> float:
    """Returns the rate of products with routed experts, of `flops` in FP8. Few rows wait for memory, FP4's too."""
    return flops * FP4_PRODUCTS if model.fp4_experts else flops


def mixing_seconds(model: ModelConfig, rates: Rates, rows: int) -> float:
    """Returns the seconds of a layer's mixing of streams, float32 products and passes over the streams; no launches."""
    sizes, hyper = sizes_of(model), model.hyper_connections
    if hyper is None:
        return 0.0
    products = max(2 * rows * sizes.mixing / (_FLOAT32_FLOPS * rates.bf16_flops), 4 * sizes.mixing / rates.hbm)
    return products + 2 * _STREAM_PASSES * rows * hyper.streams * model.hidden_size * 2 / rates.hbm


def bf16_product(model: ModelConfig, rates: Rates, rows: int, elements: int) -> float:
    """Returns the seconds of a product of `rows` with `elements` weights in bfloat16, such as the head."""
    flops = rates.dense_flops / 2 if model.fp8 else rates.dense_flops  # FP8 products run at twice the rate
    return max(2 * elements / rates.dense_bandwidth, 2 * rows * elements / flops)


def prefill_stages(model: ModelConfig, rates: Rates, batch: PlannedBatch) -> dict[str, float]:
    """Returns the seconds of each stage of one layer for a prefill micro-batch: compute-bound, linear in tokens."""
    sizes, n = sizes_of(model), batch.split

    def seconds(elements: float, flops: float = rates.prefill_flops) -> float:
        return PREFILL_OVERHEAD * 2 * batch.tokens * elements / flops

    def in_bf16(elements: float) -> float:
        return seconds(elements, rates.prefill_flops / (2 if model.fp8 else 1))

    sparse = sparse_parts(model, rates, batch)
    core = dense_core(model, rates, batch) if sparse is None else sparse.seconds
    # Masked attention already materializes keys and values of all tokens.
    per_head = 0.0 if sparse is not None and sparse.masked else in_bf16(sizes.per_head)
    chosen = seconds(index_share(model) * index_weights(model, sparse is not None))
    if model.compressed is not None:
        fp8, bf16 = product_elements(model)
        chosen = (seconds(fp8) + in_bf16(bf16)) / model.num_hidden_layers
    expert = seconds(model.num_experts_per_tok * sizes.expert / n, expert_flops(model, rates.prefill_flops))
    return {
        "project": seconds(sizes.down + sizes.query / n) + chosen,
        "attention": core + per_head / n + seconds(sizes.out / n),
        "mixing": mixing_seconds(model, rates, batch.tokens),
        "router": 0.0,
        "shared_expert": seconds(sizes.shared / n),
        "experts": expert,
        "mlp": seconds(sizes.dense / n),
        "head": 0.0,
    }
