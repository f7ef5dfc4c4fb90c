"""Options of the simulator, declared like those of `dsv3.config.options`, and its rule of scaling.

The rule says how many instances of a role run: up on queue seconds or use, down where the rest could bear it. As
Dynamo's planner it adds an instance where all are over the bound, and removes one only if what the others would have
then stays below a share of the bound (a flat bound gave 2 to 1 to 2).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from dsv3.config.declaration import check, option

Routing = Literal["cost", "events", "round_robin"]


@dataclasses.dataclass(frozen=True)
class Pressure:
    """What one instance has before it: seconds of prompts to compute, and the share of its cache or slots in use."""

    queue_s: float
    use: float


@dataclasses.dataclass(frozen=True)
class Rule:
    """Looks every `period_s`; a new instance serves after `start_s`. Between `least` and `most` instances run.

    One more where the mean queue is above `queue_s` or the mean use above `use`. One fewer where for `calm` looks in a
    row the others could take its share and stay below `sensitivity` of both. Raises ValueError for what cannot be.
    """

    queue_s: float = 2.0
    use: float = 0.8
    sensitivity: float = 0.8
    period_s: float = 10.0
    start_s: float = 60.0
    calm: int = 6
    least: int = 1
    most: int = 64

    def __post_init__(self) -> None:
        for name in ("queue_s", "use", "sensitivity", "period_s", "calm"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0")
        if self.start_s < 0 or not 1 <= self.least <= self.most:
            raise ValueError(
                f"least: {self.least} is not from 1 to most, {self.most}, or start_s {self.start_s} is below 0"
            )

    def wants(self, pressures: Sequence[Pressure]) -> int:
        """Returns 1 for one more, -1 for one fewer that may be, 0 for as many; `pressures` are of those that serve."""
        count = len(pressures)
        if not count:
            return 1
        queue = sum(each.queue_s for each in pressures) / count
        use = sum(each.use for each in pressures) / count
        if queue > self.queue_s or use > self.use:
            return 1
        if count == 1:
            return 0
        more = count / (count - 1) / self.sensitivity
        return -1 if queue * more <= self.queue_s and use * more <= self.use else 0


_RULE = Rule()
_METRICS = ("ttft", "itl", "tpot", "e2e")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Which instances there are, what comes, and what is done about it. Raises ValueError for what cannot be."""

    prefill: str | None = option(None, "Have instances of this deployment compute prompts; needs --decode.")
    decode: str | None = option(None, "Have instances of this deployment answer; needs --prefill.")
    instances: str | None = option(None, "Have instances of this deployment do both, in place of the two.")
    num_prefill: int = option(1, "Start with this many prefill instances.", low=1, high=1024)
    num_decode: int = option(1, "Start with this many decode instances.", low=1, high=1024)
    num_instances: int = option(1, "Start with this many of --instances.", low=1, high=1024)
    times: str | None = option(
        None, "Read step times from this JSON file; what it lacks is compiled, in minutes, and added to it."
    )
    trace: str | None = option(
        None, "Replay these requests: Mooncake's JSON Lines, or ShareGPT's conversations as .json or .jsonl."
    )
    request_rate: float | None = option(
        None, "Have this many requests, or conversations, per second begin at random times.", above=0, high=1e6
    )
    concurrency: int | None = option(
        None, "Keep this many requests on their way, in place of a rate.", low=1, high=10**7
    )
    day: bool = option(False, "Let --request_rate follow DeepSeek's published day, compressed to --seconds.")
    seconds: float | None = option(
        None, "Simulate this long; default: until all requests of the trace have ended.", above=0, high=1e7
    )
    warm_up: float = option(0.0, "Leave what comes before this second out of the figures.", low=0, high=1e7)
    ramp_up: float = option(60.0, "Let the clients of --concurrency begin within this many seconds.", low=0, high=1e6)
    prompt: float = option(4383.0, "Draw prompts of this many tokens at the mean; default: DeepSeek's day.", low=1)
    answer: float = option(1208.0, "Draw answers of this many tokens at the mean.", low=1)
    shared: float = option(
        0.56, "Let this share of the prompts' tokens be prefixes that others have.", low=0, high=0.99
    )
    num_prefixes: int = option(256, "Draw them from this many prefixes, by Zipf's law.", low=1, high=10**6)
    max_model_len: int = option(32_768, "Limit prompt and answer together to this many tokens.", low=128, high=2**20)
    routing: Routing = option(
        "cost",
        "Send a request where it costs least, as the router does, with what it has sent there or (events) with what "
        "KV events say; or to the next in turn.",
    )
    kv_offloading_size: float = option(
        0.0, "Keep pages of prompts in this many GiB of each instance's host memory, too.", low=0
    )
    kv_store_size: float = option(0.0, "Keep them in a store of this many GiB that all share, too.", low=0)
    scale: bool = option(False, "Start and drain instances by --scale_queue and --scale_use.")
    scale_queue: float = option(_RULE.queue_s, "Add one above so many seconds of prompts per instance.", above=0)
    scale_use: float = option(_RULE.use, "Add one above this share of cache or slots in use.", above=0, high=10)
    scale_start: float = option(_RULE.start_s, "Let a new instance serve after this many seconds.", low=0)
    goodput: tuple[str, ...] = option((), "Count requests that keep these bounds, such as ttft:5000,tpot:100.")
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
            raise ValueError("seconds: drawn requests have no end; say how long")
        if self.seconds is not None and self.warm_up >= self.seconds:
            raise ValueError(f"warm_up: {self.warm_up} leaves nothing of --seconds {self.seconds}")
        if self.day and self.trace is not None:
            raise ValueError("day: a trace has its own times")
        self.limits  # noqa: B018  # raises for what cannot be

    @property
    def limits(self) -> dict[str, float]:
        """The bounds of goodput: milliseconds by metric."""
        return dict(map(_limit, self.goodput))

    @property
    def rule(self) -> Rule | None:
        """How many instances run; None for as many as at first."""
        if not self.scale:
            return None
        return Rule(queue_s=self.scale_queue, use=self.scale_use, start_s=self.scale_start)


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
        raise ValueError("goodput: itl is not kept per request; bound tpot")
    return metric, milliseconds
