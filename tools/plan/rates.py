"""The rates that published kernels reach on a device, and the micro-batch whose time they give."""

import dataclasses

from dsv3.config import device_rates as shares
from dsv3.config.model import ModelConfig
from tools.plan.deployment import Device

# Shares of the links that DeepEP reaches on an H800 (160 and 50 GB/s).
_DISPATCH_LINK = 45 / 50
_COMBINE_LINK = 40.5 / 50
_NODE_LINK = 153 / 160
_CLOCK = 1.83e9  # at which the data sheet's peaks hold: 989e12 = 132 x 4,096 x 1.83e9

SELECT_CYCLES = 1.35
"""Cycles of a multiprocessor per score: of 16 warps on 4 schedulers each has 4 x 170 and 695 instructions for 4,096."""


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
    decoding, prefilling = (1.0, 1.0) if taken is None else (taken, taken / shares.PREFILL_TAKEN)
    product = device.fp8_flops if model.fp8 else device.bf16_flops
    hbm = device.hbm_bytes_per_second
    return Rates(
        dense_bandwidth=hbm * shares.DENSE_BANDWIDTH,
        dense_flops=product * shares.DENSE_FLOPS * decoding,
        grouped_bandwidth=hbm * shares.GROUPED_BANDWIDTH,
        grouped_flops=product * shares.GROUPED_FLOPS * decoding,
        prefill_flops=product * shares.PREFILL_FLOPS * prefilling,
        decode_core_flops=device.bf16_flops * shares.DECODE_CORE_FLOPS * decoding,
        prefill_core_flops=device.bf16_flops * shares.PREFILL_CORE_FLOPS * prefilling,
        fp8_core_flops=device.fp8_flops * shares.DECODE_CORE_FLOPS * decoding,
        selection=_CLOCK / SELECT_CYCLES,
        multiprocessors=round(device.multiprocessors * decoding),
        hbm=hbm,
        node_link=device.node_link * _NODE_LINK,
        dispatch_link=device.cross_link * _DISPATCH_LINK,
        combine_link=device.cross_link * _COMBINE_LINK,
    )


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a rank: `tokens`, their mean number of `keys`, and the `experts` on each device.

    `width` tokens of each request read its cache together. `split` devices share the heads of these tokens, the widths
    of their MLPs, and their routed experts' rows. The first token of a prompt sees the `fewest` keys, and the next ones
    evenly more; None: all tokens see as many, and none is cached. Where queries choose in prefill, masked attention has
    `room` for so many tokens; 0: chosen rows are copied.
    """

    tokens: int
    keys: float
    experts: int
    split: int = 1
    cache_dtype: str = "bfloat16"
    width: int = 1
    fewest: float | None = None
    room: int = 0

    @property
    def most(self) -> float:
        """Keys that the last token sees."""
        return self.keys if self.fewest is None else 2 * self.keys - self.fewest
