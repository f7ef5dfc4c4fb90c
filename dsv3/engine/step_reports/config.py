"""Where step metrics go: `--step_metrics_config`; imports neither jax nor zmq.

{"endpoint": "tcp://127.0.0.1:20380", "worker_id": "7587891"}
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

_ENDPOINT = re.compile(r"tcp://\S+:\d{1,5}|(ipc|inproc)://\S+")


@dataclasses.dataclass(frozen=True)
class StepMetricsConfig:
    """Rank `r` has a socket of its own: the port of `endpoint` plus `r`. `worker_id` is Dynamo's name of the instance.

    The default port is that of Dynamo's workers.
    """

    endpoint: str = "tcp://127.0.0.1:20380"
    worker_id: str = ""

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "StepMetricsConfig":
        """Reads the fields; raises ValueError with the field, its value and what may be."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"{name}: there is no such field; there are {', '.join(known)}")
            if not isinstance(value, str):
                raise ValueError(f"{name}: {value!r} is not a text")
        config = cls(**given)
        if not _ENDPOINT.fullmatch(config.endpoint):
            raise ValueError(
                f"endpoint: {config.endpoint!r} is not like tcp://127.0.0.1:20380, ipc://PATH or inproc://NAME"
            )
        return config
