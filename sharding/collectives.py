"""Asynchronous collectives, in two halves, start and finish, with other work between them.

DeepEP calls this a hook: the first call sends, the second receives. By default XLA schedules the start of a collective
next to its done, and overlaps nothing. `resolve_overlap` decides by platform and version:

- On a GPU from jax 0.12 on, `jax._src.lax.parallel.all_to_all_start` returns a future, and with program order enforced
  the compiled schedule is the written one. This function and `all_gather_start` have no public name yet (`jax.lax` has
  only `psum_scatter_start`, and `ragged_all_to_all` has no asynchronous form).
- On a GPU with jax 0.11 the future fails in Shardy ("propagation doesn't support tuples"). Collectives stay
  synchronous, in program order, which still keeps XLA from copying the page pool.
- On a CPU futures together with enforced order crash the process. Collectives stay plain and no order is enforced.
"""

import dataclasses
import enum
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.experimental.overlap import program_order

_NCCL_CHANNELS = ("xla_gpu_nccl_collective_max_nchannels", "xla_gpu_nccl_p2p_max_nchannels")
_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
_LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_MAX_IN_FLIGHT = 4  # a dispatch and a combine of each of two micro-batches

_log = logging.getLogger(__name__)


class Overlap(enum.Enum):
    """Whether a compiled program keeps the written order of collectives and compute."""

    HOOKS = "collectives start early and finish late, in program order"
    ORDER = "collectives are synchronous, in program order"
    NONE = "collectives are synchronous, in the order XLA finds"


def resolve_overlap(platform: str, wanted: bool = True) -> Overlap:
    """Returns the overlap that `platform` ("gpu", "cuda", "cpu") supports with the installed jax, at most `wanted`."""
    if platform not in ("gpu", "cuda"):
        return Overlap.NONE
    return Overlap.HOOKS if wanted and jax.__version_info__ >= (0, 12, 0) else Overlap.ORDER


def check_ragged(platform: str) -> None:
    """Raises ValueError if XLA has no `ragged_all_to_all` on `platform`."""
    if platform not in ("gpu", "cuda", "tpu"):
        raise ValueError(
            f"the ragged transport needs lax.ragged_all_to_all, which XLA does not support on {platform}: "
            "use expert_transport=auto"
        )


def in_program_order(f: Callable, overlap: Overlap) -> Callable:
    """Returns `f` with collectives and compute scheduled in the written order, unless `overlap` is NONE."""
    return f if overlap is Overlap.NONE else program_order(f, enforce=True)


def launch_in_order(platform: str) -> None:
    """Sets NCCL to start collectives of several communicators in launch order; call it before the first collective.

    Otherwise those of one process that drives several GPUs can deadlock. It changes nothing on a CPU, or if the
    environment variable is already set.
    """
    if resolve_overlap(platform) is Overlap.NONE:
        return
    found = os.environ.setdefault(_LAUNCH_ORDER, "1")
    _log.info("NCCL: %s=%s", _LAUNCH_ORDER, found)


def compiler_options(
    platform: str, channels: int = 0, overlaps: bool = True, in_flight: int = _MAX_IN_FLIGHT
) -> dict[str, int] | None:
    """Returns the XLA options for a program with several asynchronous collectives `in_flight`.

    By default XLA allows one, and rejects a program with more ("kExceedsOverlapLimit"). Those in a
    loop count beside it. `channels` bounds the multiprocessors of each NCCL communicator (its `maxCTAs`); 0 leaves that
    to NCCL. A program that never `overlaps` needs no options.
    """
    if resolve_overlap(platform, overlaps) is not Overlap.HOOKS:
        return None
    limits = dict.fromkeys(_NCCL_CHANNELS, channels) if channels else {}
    return {_LIMIT: in_flight, **limits}


def limits_of(options: Mapping[str, Any] | None) -> tuple[int, int]:
    """Returns the collectives that these XLA options allow in flight, and channels per communicator (0: unbounded)."""
    given = options or {}
    return given.get(_LIMIT, 1), max(given.get(name, 0) for name in _NCCL_CHANNELS)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective in flight; `done` returns the result, as a method of jax's future does.

    `like` is the shape and dtype of packed values, which only the sender knows.
    """

    done: Callable[[], Any]
    like: Any = None

    def finish(self) -> Any:
        """Waits for the collective and returns its result, an array; a library's calls may have several."""
        return self.done()


def finished(result: Any) -> Transfer:
    """Returns the transfer of a synchronous collective."""
    return Transfer(lambda: result)


def start_all_to_all(x: jax.Array, axes: tuple[str, ...], overlap: Overlap) -> Transfer:
    """Sends block j of the leading axis of `x` to peer j along mesh axes `axes`; block j of the result is peer j's."""
    if overlap is not Overlap.HOOKS:
        return finished(lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True))
    from jax._src.lax.parallel import all_to_all_start

    return Transfer(all_to_all_start(x, axes, 0, 0, tiled=True).done)


def start_all_gather(x: jax.Array, axes: tuple[str, ...], overlap: Overlap) -> Transfer:
    """Sends `x` to all peers along mesh axes `axes`; finish returns those of all, joined along the leading axis."""
    if overlap is not Overlap.HOOKS:
        return finished(lax.all_gather(x, axes, axis=0, tiled=True))
    from jax._src.lax.parallel import all_gather_start

    return Transfer(all_gather_start(x, axes, axis=0, tiled=True).done)


def start_reduce_scatter(x: jax.Array, axes: tuple[str, ...], overlap: Overlap) -> Transfer:
    """Sums block j of the leading axis of `x` over all peers along `axes`, for peer j; finish returns this device's."""
    if overlap is not Overlap.HOOKS:
        return finished(lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True))
    return Transfer(lax.psum_scatter_start(x, axes, scatter_dimension=0, tiled=True).done)
