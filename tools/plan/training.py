"""Estimates the time of an overlapped forward/backward pair of a training layer, with the rates of `roofline`.

A backward takes as long as two forwards, its attention core two and a half, as it recomputes the scores. What else it
computes again (`training.pipeline.recompute`) is not counted.
"""

import dataclasses

from dsv3.config.model import ModelConfig
from tools.plan.deployment import Device, PlannedBatch, Rates, kernel_rates
from tools.plan.roofline import TRANSFER_S, prefill_stages, wire_rows

PROFILE_TOKENS, PROFILE_KEYS = 4096, 2048.5
PROFILE_PAIR_S, PROFILE_COMPUTE_S, PROFILE_WIRE_S = 31.9e-3, 31.5e-3, 28.6e-3
"""DeepSeek's training profile on H800s: DualPipe, EP64, micro-batches of 4,096 tokens per device. Seconds of a pair of
one MoE layer, and seconds in it in which compute and transfers are busy."""
_CORE_AGAIN = 2.5


@dataclasses.dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer on one device: its forward, both halves of its backward, and its transfers each way."""

    forward: float
    backward: float
    weight: float
    wire: float

    @property
    def pair(self) -> float:
        """An overlapped pair: compute or transfers of both directions, whichever takes longer."""
        return max(self.forward + self.backward, 2 * self.wire)

    @property
    def alone(self) -> tuple[float, float, float]:
        """A forward, a backward and a weight gradient without overlap: transfers are exposed."""
        return self.forward + self.wire, self.backward + self.wire, self.weight


def layer_times(model: ModelConfig, rates: Rates, tokens: int, keys: float, wire: float, *, dense: bool) -> LayerTimes:
    """Returns the times of one layer for `tokens` of a device, which attend to `keys` others on average."""
    stages = prefill_stages(model, rates, PlannedBatch(tokens, keys, experts=0))
    bare = prefill_stages(model, rates, PlannedBatch(tokens, 0, experts=0))
    core = stages["attention"] - bare["attention"]
    names = ("project", "mlp") if dense else ("project", "router", "shared_expert", "experts")
    products = bare["attention"] + sum(stages[name] for name in names)
    again = _CORE_AGAIN * core
    return LayerTimes(products + core, 2 * products + again, products, 0.0 if dense else wire)


def with_fp8_products(plain: LayerTimes, fp8: LayerTimes) -> LayerTimes:
    """Returns the times of a layer with `fp8_products`, from those of a plain model and of an FP8 one.

    Forward and input gradient run at the rate of FP8, the weight gradient at that of bfloat16.
    """
    return LayerTimes(fp8.forward, fp8.backward - fp8.weight + plain.weight, plain.weight, plain.wire)


def exchange_transfers(model: ModelConfig, rates: Rates, lines: int, team: int) -> tuple[int, float]:
    """Returns the bytes that a device sends, and the seconds of both transfers, in a layer's forward.

    As in `training.pipeline.experts`: `lines` bfloat16 rows for each device of `team`, full or not, and back. Links
    inside and across nodes of eight work at once.
    """
    if team == 1:
        return 0, 0.0
    outside, inside = max(0, team - 8), min(team, 8) - 1
    row = 2 * model.hidden_size
    choice = 8 * model.num_experts_per_tok  # ids and weights, float32
    seconds = 0.0
    for size, link in ((row + choice, rates.dispatch_link), (row, rates.combine_link)):
        seconds += TRANSFER_S + lines * size * max(inside / rates.node_link, outside / link)
    return (team - 1) * lines * (2 * row + choice), seconds


def deepep_transfer_seconds(model: ModelConfig, rates: Rates, tokens: int, team: int) -> float:
    """Returns the seconds of both transfers with DeepEP: a token is sent once to each node with one of its experts."""
    nodes = -(-team // 8)
    others = min(model.topk_group, nodes) * (1 - 1 / nodes)
    dispatch, combine = wire_rows(model)
    return 2 * TRANSFER_S + tokens * others * (dispatch / rates.dispatch_link + combine / rates.combine_link)


def against_profile(model: ModelConfig, device: Device) -> dict[str, tuple[float, float]]:
    """Returns estimated and published seconds of a `pair`, its `compute` and `transfers`: DeepSeek-V3's FP8 profile."""
    rates = kernel_rates(device, model)
    wire = deepep_transfer_seconds(model, rates, PROFILE_TOKENS, team=64)
    times = layer_times(model, rates, PROFILE_TOKENS, PROFILE_KEYS, wire, dense=False)
    return {
        "pair": (times.pair, PROFILE_PAIR_S),
        "compute": (times.forward + times.backward, PROFILE_COMPUTE_S),
        "transfers": (2 * wire, PROFILE_WIRE_S),
    }
