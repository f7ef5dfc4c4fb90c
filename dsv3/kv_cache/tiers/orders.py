"""What the process that schedules has the tiers of another one do, and what it hears of them, as msgpack types.

Keys and numbers travel; values never do. Orders are in a step's commands, so each process gets them in one order.
"""

import msgspec

from dsv3.kv_cache.events.record import Medium
from dsv3.kv_cache.keys import Key
from dsv3.kv_cache.tiers.counts import TierCounts


class Load(msgspec.Struct, frozen=True, tag=True):
    """Loads a batch of `bucket` rows, and keeps it under the number until a command or `Drop` names it."""

    number: int
    keys: list[Key]
    bucket: int


class Count(msgspec.Struct, frozen=True, tag=True):
    """Asks the store how many pages it holds, from the first on."""

    number: int
    keys: list[Key]


class Bring(msgspec.Struct, frozen=True, tag=True):
    """Brings pages of another instance to the host's memory."""

    number: int
    keys: list[Key]
    address: str


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Drops a batch that nobody wants any more."""

    number: int


class Rest(msgspec.Struct, frozen=True, tag=True):
    """Leaves the store alone for a while."""


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Drops pages that cannot be trusted, behind those that earlier steps have given."""

    keys: list[Key]


class Clear(msgspec.Struct, frozen=True, tag=True):
    """Empties the host's memory, behind what earlier steps have given."""


Order = Load | Count | Bring | Drop | Rest | Forget | Clear


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What has come of the order with a number: so many pages, from the first on."""

    number: int
    count: int


class Change(msgspec.Struct, frozen=True, tag=True):
    """Pages that a tier has stored, or removed."""

    medium: Medium
    is_stored: bool
    keys: list[Key]


class Told(msgspec.Struct, frozen=True):
    """What has happened since the last message, in order; the totals of each tier, and its bytes per second."""

    happened: list[Answer | Change]
    counts: dict[str, TierCounts]
    rates: dict[str, float]
