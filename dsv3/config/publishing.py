"""Publication of KV events and step metrics: `--kv_events_config` (with vLLM's fields) and `--step_metrics_config`.

{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657", "topic": "kv"}
{"endpoint": "tcp://127.0.0.1:20380", "worker_id": "7587891"}
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from dsv3.config.declaration import refuse_unknown_fields

_ENDPOINT = re.compile(r"tcp://\S+:\d{1,5}|(ipc|inproc)://\S+")


@dataclasses.dataclass(frozen=True)
class KvEventsConfig:
    """Options of KV events.

    Rank `r` has its own sockets: the port of `endpoint` and `replay_endpoint` plus `r`. `buffer_steps` batches per rank
    are kept for replay; `hwm` bounds the queue of a slow subscriber, `max_queue_size` that of unsent batches.
    """

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def address(self, num_ranks: int) -> dict[str, Any]:
        """Returns the fields with which a router subscribes to all ranks."""
        fields = {name: getattr(self, name) for name in ("endpoint", "replay_endpoint", "topic")}
        return fields | {"num_ranks": num_ranks}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "KvEventsConfig":
        """Reads the fields; raises ValueError with the field, its value and the allowed values."""
        refuse_unknown_fields(given, [field.name for field in dataclasses.fields(cls)])
        for name, value in given.items():
            if problem := _problem(name, value):
                raise ValueError(f"{name}: {value!r} {problem}")
        config = cls(**{name: value for name, value in given.items() if value is not None})
        if config.endpoint == config.replay_endpoint:
            raise ValueError(f"replay_endpoint: {config.replay_endpoint!r} is endpoint, too; give it a port of its own")
        return config


def _problem(name: str, value: Any) -> str | None:
    if name == "enable_kv_cache_events":
        return None if isinstance(value, bool) else "is not true or false"
    if value is None and name in ("publisher", "replay_endpoint"):
        return None
    if name == "publisher":
        return None if value in ("zmq", "null") else "is not one of zmq, null"
    if name == "topic":
        return None if isinstance(value, str) else "is not a text"
    if name in ("endpoint", "replay_endpoint"):
        fits = isinstance(value, str) and _ENDPOINT.fullmatch(value)
        return None if fits else "is not like tcp://*:5557, ipc://PATH or inproc://NAME"
    is_count = isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31
    return None if is_count else "is not an integer from 1 on"


@dataclasses.dataclass(frozen=True)
class StepMetricsConfig:
    """Options of step metrics; rank `r` has its own socket: the port of `endpoint` plus `r`.

    `worker_id` is Dynamo's name of the instance. The default port is that of Dynamo's workers.
    """

    endpoint: str = "tcp://127.0.0.1:20380"
    worker_id: str = ""

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "StepMetricsConfig":
        """Reads the fields; raises ValueError with the field, its value and the allowed values."""
        refuse_unknown_fields(given, [field.name for field in dataclasses.fields(cls)])
        for name, value in given.items():
            if not isinstance(value, str):
                raise ValueError(f"{name}: {value!r} is not a text")
        config = cls(**given)
        if not _ENDPOINT.fullmatch(config.endpoint):
            raise ValueError(
                f"endpoint: {config.endpoint!r} is not like tcp://127.0.0.1:20380, ipc://PATH or inproc://NAME"
            )
        return config


def endpoint_of(endpoint: str, rank: int) -> str:
    """Returns a rank's endpoint: the port plus the rank, or the name with a suffix; as in vLLM."""
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    start, _, port = endpoint.rpartition(":")
    return f"{start}:{int(port) + rank}"
