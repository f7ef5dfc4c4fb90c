"""The orders in which a step's MoE layers can run.

`PLAIN` is one batch, in the order that XLA finds. `HOOKED` is one batch, whose shared expert runs under the combine.
`OVERLAPPED` cuts the batch in two micro-batches, each of which computes while the other communicates.
"""

import dataclasses

from dsv3.model.decoder import MoeLayers
from dsv3.model.schedules import hooked, overlapped, plain


@dataclasses.dataclass(frozen=True)
class Schedule:
    """An order of a step's MoE layers: into how many micro-batches the batch is cut, and what runs in each phase."""

    name: str
    micro_batches: int
    prefill: MoeLayers
    decode: MoeLayers


PLAIN = Schedule("plain", 1, plain.run, plain.run)
HOOKED = Schedule("hooked", 1, hooked.run, hooked.run)
OVERLAPPED = Schedule("overlapped", 2, overlapped.run_prefill, overlapped.run_decode)
