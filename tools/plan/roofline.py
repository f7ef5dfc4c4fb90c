"""How long a step could take: a stated model of a device's rates, and what it says of a deployment. An estimate.

There are two models. `floor_decode` is the bare roofline: peak rates, perfect overlap. `decode_stages` and
`prefill_stages` are calibrated: they use the rates that DeepSeek's kernels reach on an H800 (FlashMLA, DeepGEMM,
DeepEP; other devices are scaled by their peaks) and a fixed time per kernel. Known errors are in `KNOWN_ERRORS`, and
tests recompute them.

A stage is one micro-batch's part of one layer, under the names of `tools.plan.collectives.LABELS`. The stage
"attention" is the core, the output projection and what stands between them.
"""

import dataclasses

from dsv3.config.model import ModelConfig
from dsv3.config.sizes import sizes_of
from dsv3.kv_cache.layout import row_bytes
from tools.plan.dense import dense_core
from tools.plan.deployment import Device
from tools.plan.sparse import (
    PREFILL_OVERHEAD,
    SELECT_CYCLES,
    SparseCore,
    core_operations,
    expansion_seconds,
    index_share,
    index_weights,
    must_choose,
    sparse_core,
    sparse_floor,
)

KNOWN_ERRORS = (
    "decode, DeepSeek's profile (EP128, 128 tokens per micro-batch, 4K): 61 layers -3 %",
    "decode, DeepSeek's profile (64 tokens per micro-batch, 18.6k tokens/s per node): +1 %",
    "decode, DeepSeek's fleet (14.8k tokens/s per node): 0 %: one constant (32 us of small kernels) is fitted to it",
    "prefill, DeepSeek's profile (62.7k tokens/s per node): +10 %; its fleet reached half (32.2k computed tokens/s)",
)

# Shares of a device's peak, from published measurements on an H800 (3.35 TB/s, 1979 and 989 TFLOP/s, 160 and 50 GB/s).
# Those of prefill were reached on 108 of 132 multiprocessors, the others on all.
_PREFILL_TAKEN = 108 / 132
_DENSE_BANDWIDTH = 2.4 / 3.35
_DENSE_FLOPS = 900 / 1979
_GROUPED_BANDWIDTH = 2.6 / 3.35
_GROUPED_FLOPS = 1000 / 1979
_PREFILL_FLOPS = 993 / 1979
_DECODE_CORE_FLOPS = 580 / 989
_PREFILL_CORE_FLOPS = 535 / 989
_DISPATCH_LINK = 45 / 50
_COMBINE_LINK = 40.5 / 50
_NODE_LINK = 153 / 160

_CLOCK = 1.83e9  # at which the data sheet's peaks hold: 989e12 = 132 x 4,096 x 1.83e9

_KERNEL_S = 3e-6
_SMALL_KERNELS_S = 32e-6
_ROUTER_S = 19e-6
TRANSFER_S = 20e-6
HOOK_S = 8e-6
HOST_S = 1.5e-3


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates per second that a device reaches: bytes for memory and links, operations for products."""

    dense_bandwidth: float
    dense_flops: float
    grouped_bandwidth: float
    grouped_flops: float
    prefill_flops: float
    decode_core_flops: float
    prefill_core_flops: float
    fp8_core_flops: float
    """Attention's products in e4m3: index scores of FP8 keys."""
    selection: float
    """Scores that one multiprocessor chooses from."""
    multiprocessors: int
    """Those that kernels take."""
    hbm: float
    node_link: float
    dispatch_link: float
    combine_link: float


def rates_of(device: Device, model: ModelConfig, taken: float | None = None) -> Rates:
    """Returns what published kernels would reach on `device`; products are bf16 where the model is not FP8.

    `taken` is the share of the device's multiprocessors that kernels take, with which arithmetic goes; None: as where
    the rates were measured. Rates of memory are taken to need no more than some four fifths of them.
    """
    decoding, prefilling = (1.0, 1.0) if taken is None else (taken, taken / _PREFILL_TAKEN)
    product = device.fp8_flops if model.fp8 else device.bf16_flops
    hbm = device.hbm_bytes_per_second
    return Rates(
        dense_bandwidth=hbm * _DENSE_BANDWIDTH,
        dense_flops=product * _DENSE_FLOPS * decoding,
        grouped_bandwidth=hbm * _GROUPED_BANDWIDTH,
        grouped_flops=product * _GROUPED_FLOPS * decoding,
        prefill_flops=product * _PREFILL_FLOPS * prefilling,
        decode_core_flops=device.bf16_flops * _DECODE_CORE_FLOPS * decoding,
        prefill_core_flops=device.bf16_flops * _PREFILL_CORE_FLOPS * prefilling,
        fp8_core_flops=device.fp8_flops * _DECODE_CORE_FLOPS * decoding,
        selection=_CLOCK / SELECT_CYCLES,
        multiprocessors=round(device.multiprocessors * decoding),
        hbm=hbm,
        node_link=device.node_link * _NODE_LINK,
        dispatch_link=device.cross_link * _DISPATCH_LINK,
        combine_link=device.cross_link * _COMBINE_LINK,
    )


def itemsizes(model: ModelConfig) -> tuple[float, float]:
    """Returns the bytes of a routed expert's weight, and of others.

    INT4 has 4 bits and a 32nd of a 16-bit scale. Block scales of FP8 do not count.
    """
    if model.int4_experts:
        return 4.5 / 8, 2
    return (1, 1) if model.fp8 else (2, 2)


@dataclasses.dataclass(frozen=True)
class DecodeFloor:
    """Seconds of a decode step's terms at peak rates, on one device."""

    weights: float
    cache: float
    core: float
    products: float
    wire: float

    @property
    def step(self) -> float:
        """Compute or wire, whichever is longer."""
        return max(self.weights + max(self.cache, self.core) + self.products, self.wire)


def floor_decode(
    model: ModelConfig,
    device: Device,
    requests: int,
    context: int,
    experts_per_device: int,
    cache_dtype: str = "bfloat16",
    width: int = 1,
    sharing: int = 1,
) -> DecodeFloor:
    """Returns the bare roofline of one device that decodes `width` tokens of `requests` with `context` tokens each.

    `sharing` devices share the head.
    The wire carries each chosen expert's copy of a token over the slower link, as DeepEP's low-latency kernels do.
    """
    sizes, L, moe = sizes_of(model), model.num_hidden_layers, model.num_moe_layers
    expert_item, item = itemsizes(model)
    indexer = index_share(model) * index_weights(model, must_choose(model, context))
    shared = moe * sizes.shared + model.num_dense_layers * sizes.dense + L * (sizes.attention + indexer)
    read = item * shared + expert_item * moe * experts_per_device * sizes.expert + 2 * sizes.head / sharing
    tokens = requests * width
    done = 2 * tokens * (shared + moe * model.num_experts_per_tok * sizes.expert)
    head = 2 * tokens * sizes.head
    row = sum(wire_rows(model))
    cached, operations = sparse_floor(model, context, cache_dtype)
    return DecodeFloor(
        weights=read / device.hbm_bytes_per_second,
        cache=requests * L * cached / device.hbm_bytes_per_second,
        core=tokens * L * operations / device.bf16_flops,
        products=done / (device.fp8_flops if model.fp8 else device.bf16_flops) + head / device.bf16_flops,
        wire=moe * model.num_experts_per_tok * tokens * row / device.cross_link,
    )


def wire_rows(model: ModelConfig) -> tuple[int, int]:
    """Returns the bytes of a row on dispatch (FP8 and scales, or bf16) and on combine (bf16)."""
    D = model.hidden_size
    return (D + 4 * -(-D // 128) if model.fp8 else 2 * D), 2 * D


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a rank: `tokens`, their mean number of `keys`, and the `experts` on each device.

    `width` tokens of each request read its cache together. `split` devices share the heads of these tokens, the widths
    of their MLPs, and their routed experts' rows. The first token of a prompt sees the `fewest` keys, and the next ones
    evenly more; None: all tokens see as many, and none is cached. Where queries choose in prefill, masked attention has
    room for `expands` tokens; 0: chosen rows are copied.
    """

    tokens: int
    keys: float
    experts: int
    split: int = 1
    cache_dtype: str = "bfloat16"
    width: int = 1
    fewest: float | None = None
    expands: int = 0

    @property
    def most(self) -> float:
        """Keys that the last token sees."""
        return self.keys if self.fewest is None else 2 * self.keys - self.fewest


def sparse_parts(model: ModelConfig, rates: Rates, batch: MicroBatch) -> SparseCore | None:
    """Returns what attention's core consists of where the step's queries choose; None where it is dense."""
    return sparse_core(model, rates, batch, _KERNEL_S) if must_choose(model, batch.most) else None


def decode_stages(model: ModelConfig, rates: Rates, batch: MicroBatch) -> dict[str, float]:
    """Returns the seconds of each stage of one layer for a decode micro-batch."""
    sizes, b, n = sizes_of(model), batch.tokens, batch.split
    expert_item, item = itemsizes(model)

    def dense(elements: int, itemsize: float = item, split: int = n) -> float:
        work = 2 * b * elements / rates.dense_flops
        return max(elements * itemsize / rates.dense_bandwidth, work) / split + _KERNEL_S

    # The devices of a rank share heads, but not those of the indexer.
    sparse = sparse_parts(model, rates, batch)
    products = b * batch.keys * core_operations(model) / n / rates.decode_core_flops
    cache = b / batch.width * batch.keys * row_bytes(model, batch.cache_dtype) / rates.hbm
    core = max(products, cache) if sparse is None else sparse.seconds
    chosen_by = index_weights(model, sparse is not None)
    indexer = index_share(model) * (dense(chosen_by, split=1) if chosen_by else 0)
    rows = b * model.num_experts_per_tok / n  # even load: what leaves a device also arrives
    routed = batch.experts * sizes.expert * expert_item / rates.grouped_bandwidth
    work = 2 * rows * sizes.expert / rates.grouped_flops
    key_value = bf16_product(model, rates, b, sizes.key_value) / n + _KERNEL_S
    return {
        "project": dense(sizes.down, split=1) + (dense(sizes.query) if sizes.query else 0) + indexer + 4 * _KERNEL_S,
        "attention": core + key_value + dense(sizes.out) + _SMALL_KERNELS_S,
        "router": _ROUTER_S,
        "shared_expert": dense(sizes.shared) + 3 * _KERNEL_S if sizes.shared else 0.0,
        "experts": max(routed, work) + 5 * _KERNEL_S,
        "mlp": dense(sizes.dense) + 3 * _KERNEL_S,
        "head": bf16_product(model, rates, b, sizes.head),
    }


def bf16_product(model: ModelConfig, rates: Rates, rows: int, elements: int) -> float:
    """Returns the seconds of a product of `rows` with `elements` weights in bfloat16, such as the head."""
    flops = rates.dense_flops / 2 if model.fp8 else rates.dense_flops  # FP8 products run at twice the rate
    return max(2 * elements / rates.dense_bandwidth, 2 * rows * elements / flops)


def prefill_stages(model: ModelConfig, rates: Rates, batch: MicroBatch) -> dict[str, float]:
    """Returns the seconds of each stage of one layer for a prefill micro-batch.

    Compute-bound, so proportional to the tokens.
    """
    sizes, n = sizes_of(model), batch.split

    def seconds(elements: float) -> float:
        return PREFILL_OVERHEAD * 2 * batch.tokens * elements / rates.prefill_flops

    sparse = sparse_parts(model, rates, batch)
    core = dense_core(model, rates, batch) if sparse is None else sparse.seconds
    # Masked attention makes those of all tokens.
    own_keys = 0.0 if sparse is not None and sparse.masked else batch.tokens * expansion_seconds(model, rates)
    indexer = index_share(model) * index_weights(model, sparse is not None)
    return {
        "project": seconds(sizes.down + sizes.query / n + indexer),
        "attention": core + own_keys / n + seconds(sizes.out / n),
        "router": 0.0,
        "shared_expert": seconds(sizes.shared / n),
        "experts": seconds(model.num_experts_per_tok * sizes.expert / n),
        "mlp": seconds(sizes.dense / n),
        "head": 0.0,
    }
