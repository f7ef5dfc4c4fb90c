"""Options of the simulator, declared like those of `dsv3.config.options`, and its scaling policy.

As in Dynamo's planner, the policy adds an instance of a role if the mean queue or use is above a bound, and removes one
only if the others would then stay below a share of the bound. With one bound for both the number oscillates.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from dsv3.config.declaration import check, option

Routing = Literal["cost", "events", "round_robin"]
_MAX_GIB = 2**20  # a pebibyte, less than an engine accepts: a simulated pool has a record for each of its pages


@dataclasses.dataclass(frozen=True)
class ScalingPolicy:
    """Checks the load every `period_s` and keeps between `min_instances` and `max_instances` running.

    Adds one, which serves after `start_s`, if the mean queue is above `queue_s` or the mean use above `use`. Removes
    one if in `scale_down_checks` successive checks the others could take its load and stay below `sensitivity` of both
    bounds. Raises ValueError for invalid values.
    """

    queue_s: float = 2.0
    use: float = 0.8
    sensitivity: float = 0.8
    period_s: float = 10.0
    start_s: float = 60.0
    scale_down_checks: int = 6
    min_instances: int = 1
    max_instances: int = 64

    def __post_init__(self) -> None:
        for name in ("queue_s", "use", "sensitivity", "period_s", "scale_down_checks"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0")
        if self.start_s < 0 or not 1 <= self.min_instances <= self.max_instances:
            raise ValueError(
                f"min_instances {self.min_instances} must be from 1 to max_instances {self.max_instances}, and start_s "
                f"{self.start_s} at least 0"
            )

    def decide(self, pressures: Sequence[tuple[float, float]]) -> int:
        """Returns the change in instances: 1, 0 or -1.

        `pressures` are, of each serving instance, the seconds of prompts to compute, and the used share of its cache or
        batch slots.
        """
        count = len(pressures)
        if not count:
            return 1
        queue, use = (sum(column) / count for column in zip(*pressures, strict=True))
        if queue > self.queue_s or use > self.use:
            return 1
        if count == 1:
            return 0
        more = count / (count - 1) / self.sensitivity
        return -1 if queue * more <= self.queue_s and use * more <= self.use else 0


_POLICY = ScalingPolicy()
_METRICS = ("ttft", "itl", "tpot", "e2e")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Instances, traffic, routing and scaling of a simulation. Raises ValueError for invalid combinations."""

    prefill: str | None = option(None, "Compute prompts on instances of this deployment; needs --decode.")
    decode: str | None = option(None, "Decode on instances of this deployment; needs --prefill.")
    instances: str | None = option(None, "Do both on instances of this deployment, in place of the two.")
    num_prefill: int = option(1, "Start with this many prefill instances.", low=1, high=1024)
    num_decode: int = option(1, "Start with this many decode instances.", low=1, high=1024)
    num_instances: int = option(1, "Start with this many of --instances.", low=1, high=1024)
    times: str | None = option(
        None, "Read step times from this JSON file; compile missing ones, which takes minutes, and add them to it."
    )
    trace: str | None = option(
        None, "Replay these requests: Mooncake's JSON Lines, or ShareGPT's conversations as .json or .jsonl."
    )
    request_rate: float | None = option(
        None, "Start this many requests, or conversations, per second at random times.", above=0, high=1e6
    )
    concurrency: int | None = option(None, "Keep this many requests in flight, in place of a rate.", low=1, high=10**7)
    day: bool = option(False, "Let --request_rate follow DeepSeek's published day, compressed to --seconds.")
    seconds: float | None = option(
        None, "Simulate this long; default: until all requests of the trace have ended.", above=0, high=1e7
    )
    warm_up: float = option(0.0, "Exclude requests and tokens before this second from the figures.", low=0, high=1e7)
    ramp_up: float = option(60.0, "Start the clients of --concurrency over this many seconds.", low=0, high=1e6)
    prompt: float = option(
        4383.0, "Draw prompts of this mean length in tokens; default: DeepSeek's day.", low=1, high=2**31
    )
    answer: float = option(1208.0, "Draw answers of this mean length in tokens.", low=1, high=2**31)
    shared: float = option(0.56, "Draw this share of the prompts' tokens from common prefixes.", low=0, high=0.99)
    num_prefixes: int = option(256, "Draw them from this many prefixes, by Zipf's law.", low=1, high=10**6)
    max_model_len: int = option(32_768, "Limit prompt and answer together to this many tokens.", low=128, high=2**20)
    routing: Routing = option(
        "cost",
        "Send a request to the instance of the least cost, as the router does, by the pages of earlier requests (cost) "
        "or of KV events (events); or to the next in turn.",
    )
    kv_offloading_size: float = option(
        0.0, "Offload pages of prompts to this many GiB of each instance's host memory.", low=0, high=_MAX_GIB
    )
    kv_store_size: float = option(
        0.0, "Offload them also to a store of this many GiB that all share.", low=0, high=_MAX_GIB
    )
    scale: bool = option(False, "Start and drain instances by --scale_queue and --scale_use.")
    scale_queue: float = option(_POLICY.queue_s, "Add one above so many seconds of prompts per instance.", above=0)
    scale_use: float = option(_POLICY.use, "Add one above this used share of cache or batch slots.", above=0, high=10)
    scale_start: float = option(_POLICY.start_s, "Start serving on a new instance after this many seconds.", low=0)
    goodput: tuple[str, ...] = option((), "Count requests within these bounds, such as ttft:5000,tpot:100.")
    seed: int = option(0, "Draw with this seed.", low=0, high=2**32)

    def __post_init__(self) -> None:
        check(self)
        if bool(self.prefill) != bool(self.decode) or bool(self.instances) == bool(self.decode):
            raise ValueError("instances: give this deployment, or else --prefill and --decode")
        if self.concurrency is not None and (self.request_rate is not None or self.trace is not None or self.day):
            raise ValueError(
                f"concurrency: {self.concurrency} is for drawn requests, without --request_rate and --trace"
            )
        if self.trace is None and self.concurrency is None and self.request_rate is None:
            raise ValueError("trace: give requests to replay, or else --concurrency or --request_rate")
        if self.trace is None and self.seconds is None:
            raise ValueError("seconds: drawn requests never end; give the length of the simulation")
        if self.seconds is not None and self.warm_up >= self.seconds:
            raise ValueError(f"warm_up: {self.warm_up} leaves nothing of --seconds {self.seconds}")
        if self.day and self.trace is not None:
            raise ValueError("day: a trace has its own times")
        self.limits  # noqa: B018  # raises for invalid bounds

    @property
    def limits(self) -> dict[str, float]:
        """Goodput's bounds in milliseconds, by metric."""
        return dict(map(_limit, self.goodput))

    @property
    def policy(self) -> ScalingPolicy | None:
        """The scaling policy; None for a fixed number of instances."""
        if not self.scale:
            return None
        return ScalingPolicy(queue_s=self.scale_queue, use=self.scale_use, start_s=self.scale_start)


def _limit(text: str) -> tuple[str, float]:
    """Returns metric and milliseconds of a bound such as `ttft:2000`. Raises ValueError for anything else."""
    metric, _, value = text.partition(":")
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = math.nan
    if metric not in _METRICS or not 0 < milliseconds < math.inf:
        raise ValueError(f"--goodput {text!r}: expected METRIC:MILLISECONDS, METRIC one of {_METRICS}")
    if metric == "itl":
        raise ValueError("goodput: itl is not recorded per request; bound tpot")
    return metric, milliseconds
