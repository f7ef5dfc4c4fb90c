"""The simulator's clock, and an instance's limits and table of step times. Imports no jax.

`tools.simulate.from_plan` computes the table of a deployment from the plan's estimates.
"""

import bisect
import heapq
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from dsv3.config.engine import EngineConfig, pages_for
from dsv3.config.model import PAGE_SIZE
from dsv3.config.options import Role
from tools.plan.deployment import Phase

KEYS = (0, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
"""Keys per token for which the table has times; others are interpolated, or extrapolated, linearly."""


class TimesError(ValueError):
    """An invalid table of step times; the message names it."""


class InstanceTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an instance, and its table of step times.

    `prefill` and `decode` have for each bucket (tokens or rows of one rank, padding included) the seconds of a step at
    `KEYS` keys per token of the slowest rank, including `host` seconds. A rank's cache has `num_pages` pages of
    `page_bytes` bytes and `page_size` tokens, and for a model with a window of `window_size` tokens `num_window_pages`
    of `window_bytes`; it sends `link` bytes per second to another node. `keys` cost as much as a token
    (`dsv3.scheduler.cost.keys_per_token`). `digest` identifies model and deployment.
    """

    name: str
    digest: str
    role: Role
    nodes: int
    gpus_per_node: int
    num_ranks: int
    num_pages: int
    page_bytes: int
    page_size: int = PAGE_SIZE
    window_size: int = 0
    num_window_pages: int = 0
    window_bytes: int = 0
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    keys: float
    link: float
    host: float
    prefill: dict[int, tuple[float, ...]]
    decode: dict[int, tuple[float, ...]] = {}

    def seconds(self, phase: Phase, bucket: int, keys: float) -> float:
        """Returns the time of a step whose slowest rank attends to `keys` keys per token of the bucket."""
        row = (self.prefill if phase == "prefill" else self.decode)[bucket]
        i = min(bisect.bisect_right(KEYS, keys), len(KEYS) - 1) - 1
        share = (keys - KEYS[i]) / (KEYS[i + 1] - KEYS[i])
        return row[i] + share * (row[i + 1] - row[i])

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second in full steps without context."""
        whole = self.max_num_batched_tokens
        return self.num_ranks * whole / self.seconds("prefill", whole, 0)

    def limits(self, max_model_len: int | None, *, prefix_caching: bool, offload_gib: float = 0.0) -> EngineConfig:
        """Returns the engine's limits. Raises ValueError if the longest request does not fit a rank's cache."""
        return EngineConfig(
            max_model_len=min(max_model_len or self.max_model_len, self.max_model_len),
            num_pages=self.num_pages,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_ranks=self.num_ranks,
            num_nodes=self.nodes,
            enable_prefix_caching=prefix_caching,
            page_size=self.page_size,
            window_size=self.window_size,
            num_window_pages=self.num_window_pages,
            kv_offloading_size=offload_gib,
            role=self.role,
        )

    def transfer_seconds(self, tokens: int) -> float:
        """Returns the seconds that the pages of a prompt, and a window page, take over one rank's link."""
        return (pages_for(tokens, self.page_size) * self.page_bytes + self.window_bytes) / self.link


def read_times(path: Path) -> dict[str, InstanceTimes]:
    """Reads tables of step times by deployment name; raises TimesError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, InstanceTimes])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TimesError(f"{path}: cannot be read: {error}") from None
    for name, times in found.items():
        _check(times, f"{path}: {name}")
    return found


def write_times(path: Path, by_name: Mapping[str, InstanceTimes]) -> None:
    """Writes tables of step times for `read_times`."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(by_name), indent=0) + b"\n")


def _check(times: InstanceTimes, where: str) -> None:
    """Raises TimesError for invalid limits and times."""
    for name in (
        "nodes",
        "gpus_per_node",
        "num_ranks",
        "num_pages",
        "page_bytes",
        "page_size",
        "max_num_seqs",
        "link",
        "keys",
    ):
        if not getattr(times, name) > 0:
            raise TimesError(f"{where}: {name} {getattr(times, name)} must be above 0")
    try:
        limits = times.limits(None, prefix_caching=True)
    except ValueError as error:
        raise TimesError(f"{where}: {error}") from None
    for kind, buckets, wanted in (
        ("prefill", times.prefill, limits.prefill_buckets),
        ("decode", times.decode, () if times.role == "prefill" else limits.decode_buckets),
    ):
        for bucket in wanted:
            row = buckets.get(bucket, ())
            if len(row) != len(KEYS) or not all(0 < s < float("inf") for s in row):
                raise TimesError(f"{where}: {kind} has no {len(KEYS)} times above 0 for the bucket {bucket}")


class VirtualClock:
    """Runs callbacks in order of time, and of scheduling for equal times. `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Schedules a callback; `when` in the past means now."""
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), call))

    def run(self, until: float | None = None, is_over: Callable[[], bool] = lambda: False) -> None:
        """Runs callbacks until none is left, the time `until` is reached, or `is_over` returns True."""
        while self._due and (until is None or self._due[0][0] <= until) and not is_over():
            self.now, _, call = heapq.heappop(self._due)
            call()
        if until is not None:
            self.now = max(self.now, until)
