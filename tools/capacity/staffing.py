"""How many instances of each kind run when, and what follows from it: nodes, rates, bytes, dollars.

Every figure has its formula in `FORMULAS`; docs/fleet.md explains them.
"""

import dataclasses
import math
from collections.abc import Sequence

from tools.capacity.instances import Instance, Kind
from tools.capacity.traffic import DAY_S, Span, Traffic

FORMULAS = (
    "instances = ceil(tokens per second / tokens per second of an instance), at least 1; prefill counts computed "
    "tokens (prompts less hits)",
    "requests of a day = (prompt tokens + answer tokens / 2) / mean context, where they are not given",
    "requests at once = answer tokens per second / tokens per second of one request (Little's law)",
    "cost = nodes x GPUs per node x 24 h x dollars per GPU and hour; income = sum of tokens x price; "
    "margin = income / cost - 1",
    "pages to decode = prompt tokens x bytes per token; read from the cache = hits x bytes per token; "
    "written = computed and answer tokens x bytes per token, each page once",
)
_ROUNDING = 1e-9  # of an instance: what float sums may be off


@dataclasses.dataclass(frozen=True)
class Staffed:
    """A span of traffic and the instances that run in it."""

    span: Span
    prefill: int
    decode: int


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the sums need besides: bytes of a token in the cache of all layers, dollars per GPU and hour."""

    token_bytes: int
    gpu_hour: float


@dataclasses.dataclass(frozen=True)
class Fleet:
    """A staffed day; every property is computed from it by one of `FORMULAS`."""

    traffic: Traffic
    prefill: Instance
    decode: Instance
    terms: Terms
    staffed: tuple[Staffed, ...]

    def nodes_in(self, staffed: Staffed) -> int:
        """Returns the nodes that run in a span."""
        return staffed.prefill * self.prefill.nodes + staffed.decode * self.decode.nodes

    @property
    def prefill_nodes(self) -> float:
        """Nodes of prefill instances at the mean."""
        return self._mean("prefill") * self.prefill.nodes

    @property
    def decode_nodes(self) -> float:
        """Nodes of decode instances at the mean."""
        return self._mean("decode") * self.decode.nodes

    @property
    def nodes(self) -> float:
        """Nodes at the mean."""
        return self.prefill_nodes + self.decode_nodes

    @property
    def bare_nodes(self) -> float:
        """Nodes at the mean if parts of instances could run: tokens per second over those of a node."""
        computed, answered = self.traffic.mean("computed"), self.traffic.mean("output")
        return computed / self.prefill.tokens_per_node + answered / self.decode.tokens_per_node

    @property
    def peak_nodes(self) -> int:
        """Nodes where most run."""
        return max(map(self.nodes_in, self.staffed))

    @property
    def input_per_node(self) -> float:
        """Tokens of prompts, hits included, per second and prefill node."""
        return self.traffic.mean("input") / self.prefill_nodes

    @property
    def output_per_node(self) -> float:
        """Tokens of answers per second and decode node."""
        return self.traffic.mean("output") / self.decode_nodes

    @property
    def cost(self) -> float:
        """Dollars per day."""
        return self._dollars(self.prefill, self.prefill_nodes) + self._dollars(self.decode, self.decode_nodes)

    @property
    def margin(self) -> float | None:
        """Income over cost, less 1; None without prices."""
        return None if self.traffic.income is None else self.traffic.income / self.cost - 1

    def per_million(self, field: str) -> float:
        """Returns the dollars per million tokens: `input` and `computed` share prefill's cost, `output` has decode's.

        `all` divides the whole cost by tokens of prompts and answers.
        """
        if field == "all":
            return self.cost / (self.traffic.per_day("input") + self.traffic.per_day("output")) * 1e6
        is_output = field == "output"
        paid = (self.decode, self.decode_nodes) if is_output else (self.prefill, self.prefill_nodes)
        return self._dollars(*paid) / self.traffic.per_day(field) * 1e6

    def load(self, kind: Kind, staffed: Sequence[Staffed] = ()) -> float:
        """Returns the share of what the instances of a kind could do that they do, in some spans or in all."""
        instance, field = (self.prefill, "computed") if kind == "prefill" else (self.decode, "output")
        mine = staffed or self.staffed
        asked = sum(getattr(each.span, field) * each.span.seconds for each in mine)
        return asked / sum(getattr(each, kind) * each.span.seconds * instance.tokens_per_second for each in mine)

    def at_once(self, staffed: Staffed) -> float:
        """Returns how many requests are answered at the same time in a span."""
        return staffed.span.output / self.decode.per_batch

    def bytes_per_second(self, field: str) -> float:
        """Returns the bytes that the tokens of a rate have in the cache, per second at the mean."""
        return self.traffic.mean(field) * self.terms.token_bytes

    def _mean(self, kind: Kind) -> float:
        total = sum(getattr(each, kind) * each.span.seconds for each in self.staffed)
        return total / self.traffic.seconds

    def _dollars(self, instance: Instance, nodes: float) -> float:
        return nodes * instance.gpus_per_node * self.terms.gpu_hour * DAY_S / 3600


def staff(traffic: Traffic, prefill: Instance, decode: Instance, terms: Terms) -> Fleet:
    """Returns the fleet with as many instances in every span as its traffic needs."""
    staffed = tuple(
        Staffed(span, _needed(span.computed, prefill), _needed(span.output, decode)) for span in traffic.spans
    )
    return Fleet(traffic, prefill, decode, terms, staffed)


def _needed(tokens_per_second: float, instance: Instance) -> int:
    return max(1, math.ceil(tokens_per_second / instance.tokens_per_second - _ROUNDING))
