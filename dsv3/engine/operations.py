"""What an operator asks of a running engine: pause, other weights, sleep; and its state. Imports no jax."""

from typing import Annotated, Any, Literal

import msgspec

from dsv3.scheduler.request import FIRST_VERSION

PauseMode = Literal["wait", "keep", "abort", "retract"]
"""What happens to the requests that an engine has when it pauses.

They finish first, while later ones wait ("wait"); they stay where they are, and continue with their cache ("keep");
they end ("abort"); or they go back to the queue, and their tokens are computed again ("retract").
"""
SleepMode = Literal["wait", "abort", "retract"]
MAX_VERSION_CHARS = 256

Version = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_VERSION_CHARS)]


class PauseGeneration(msgspec.Struct, frozen=True, tag=True):
    """Launch no step until `ContinueGeneration`."""

    mode: PauseMode = "abort"


class ContinueGeneration(msgspec.Struct, frozen=True, tag=True):
    """Continue after `PauseGeneration`."""


class UpdateWeights(msgspec.Struct, frozen=True, tag=True):
    """Serve the weights of `source` from now on, under the name `version`; None: the number of the update.

    `source` is the path of a checkpoint directory; in the engine's own process also a tree or mapping of arrays.
    `mode` is for the requests of an engine that is not paused: it pauses for the update, and continues after it.
    """

    source: Any
    version: Version | None = None
    mode: PauseMode = "wait"


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Free the devices' memory: the cache, and the weights, which level 1 keeps in host memory and level 2 drops."""

    level: Literal[1, 2] = 1
    mode: SleepMode = "abort"


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Allocate the cache again, and copy back the weights that the host has."""


Operation = PauseGeneration | ContinueGeneration | UpdateWeights | Sleep | Wake


class OperationRefused(ValueError):
    """An operation that was not begun: nothing has changed; the message says why."""


class WeightsLost(RuntimeError):
    """An update has failed in the middle: the engine serves nothing until another one has succeeded."""


class OperatedState(msgspec.Struct, frozen=True, tag=True):
    """The state that operations change.

    `weights` is what prefix keys depend on, "" for the weights of the start. `missing` says why the weights are not
    complete, "" if they are. While the engine sleeps, `sleep_level` is not 0.
    """

    weight_version: str = FIRST_VERSION
    weights: str = ""
    is_paused: bool = False
    sleep_level: int = 0
    missing: str = ""

    @property
    def why_not_serving(self) -> str:
        """Why requests are refused; "" if they are not. A paused engine accepts them."""
        if self.sleep_level:
            return "the engine sleeps; wake it first"
        return self.missing
