"""What the simulator knows of time: its clock, an instance's limits, and how long its steps take. Imports no jax.

`tools.simulate.from_plan` makes the table of a deployment. All times in it are the plan's estimates.
"""

import bisect
import heapq
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from dsv3.config.engine import EngineConfig, pages_for
from dsv3.config.model import PAGE_SIZE
from dsv3.config.options import Role

Kind = Literal["prefill", "decode"]
KEYS = (0, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
"""Keys per token of a step, for which times are given; between them, and above, they are taken as linear."""


class TimesError(ValueError):
    """A table of step times that cannot be; the text names it."""


class InstanceTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an instance, and how long its steps take.

    `prefill` and `decode` have for each bucket (tokens or rows of one rank, padding included) the seconds of a step at
    `KEYS` keys per token of the rank that attends to the most. `host` seconds are part of each. A rank has room for
    `num_pages` pages of `page_bytes` bytes and `page_size` tokens, and sends `link` bytes per second to another node.
    `keys` cost as much as a token (`dsv3.scheduler.cost.keys_per_token`). `digest` says what it was made of.
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
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    keys: float
    link: float
    host: float
    prefill: dict[int, tuple[float, ...]]
    decode: dict[int, tuple[float, ...]] = {}

    def seconds(self, kind: Kind, bucket: int, keys: float) -> float:
        """Returns the time of a step whose slowest rank attends to `keys` keys per token of the bucket."""
        row = (self.prefill if kind == "prefill" else self.decode)[bucket]
        i = min(bisect.bisect_right(KEYS, keys), len(KEYS) - 1) - 1
        share = (keys - KEYS[i]) / (KEYS[i + 1] - KEYS[i])
        return row[i] + share * (row[i + 1] - row[i])

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second in whole steps without context: what waiting tokens are divided by."""
        whole = self.max_num_batched_tokens
        return self.num_ranks * whole / self.seconds("prefill", whole, 0)

    def limits(self, max_model_len: int | None, *, shares: bool, offload_gib: float = 0.0) -> EngineConfig:
        """Returns the limits of an engine on these devices. Raises ValueError for a request that no rank can hold."""
        return EngineConfig(
            max_model_len=min(max_model_len or self.max_model_len, self.max_model_len),
            num_pages=self.num_pages,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_ranks=self.num_ranks,
            num_nodes=self.nodes,
            enable_prefix_caching=shares,
            page_size=self.page_size,
            kv_offloading_size=offload_gib,
            role=self.role,
        )

    @property
    def token_bytes(self) -> float:
        """Bytes of a token in the cache of all layers."""
        return self.page_bytes / self.page_size

    def hand_over_seconds(self, tokens: int) -> float:
        """Returns how long the pages of a prompt take over one rank's link."""
        return pages_for(tokens, self.page_size) * self.page_bytes / self.link


def read_times(path: Path) -> dict[str, InstanceTimes]:
    """Reads what is known, by the deployments' names; raises TimesError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, InstanceTimes])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TimesError(f"{path}: cannot be read: {error}") from None
    for name, times in found.items():
        _check(times, f"{path}: {name}")
    return found


def write_times(path: Path, by_name: Mapping[str, InstanceTimes]) -> None:
    """Writes what `read_times` reads."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(by_name), indent=0) + b"\n")


def _check(times: InstanceTimes, where: str) -> None:
    """Raises TimesError for limits and times that cannot be."""
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
        limits = times.limits(None, shares=True)
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
    """Calls what is due, the earliest first, equals in the order in which they were asked for. `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Has `call` called at a time that has not passed."""
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), call))

    def run(self, until: float | None = None, is_over: Callable[[], bool] = lambda: False) -> None:
        """Calls what is due up to a time, or all that ever is, or what is due before it `is_over`."""
        while self._due and (until is None or self._due[0][0] <= until) and not is_over():
            self.now, _, call = heapq.heappop(self._due)
            call()
        if until is not None:
            self.now = max(self.now, until)
