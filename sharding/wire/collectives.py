"""Collectives in two halves, start and finish, so that a program can put work between them.

DeepEP calls this a hook: the first call only sends, the second receives. XLA left alone puts the start of a collective
next to its done, and overlaps nothing. What is possible depends on platform and version. `resolve_overlap` decides:

- On a GPU from jax 0.12 on, `jax._src.lax.parallel.all_to_all_start` returns a future, and with program order enforced
  the compiled schedule is the written one. This function and `all_gather_start` have no public name yet (`jax.lax` has
  `psum_scatter_start` only, and `ragged_all_to_all` has no such form at all).
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
    """How far a compiled program keeps the written order of collectives and compute."""

    HOOKS = "collectives start early and finish late, in program order"
    ORDER = "collectives are synchronous, in program order"
    NONE = "collectives are synchronous, in the order XLA finds"


def resolve_overlap(platform: str, wanted: bool = True) -> Overlap:
    """Returns what `platform` ("gpu", "cuda", "cpu") can do with the installed jax, without overlap unless `wanted`."""
    if platform not in ("gpu", "cuda"):
        return Overlap.NONE
    return Overlap.HOOKS if wanted and jax.__version_info__ >= (0, 12, 0) else Overlap.ORDER


def check_ragged(platform: str) -> None:
    """Raises ValueError where XLA has no `ragged_all_to_all`."""
    if platform not in ("gpu", "cuda", "tpu"):
        raise ValueError(
            f"the ragged transport needs lax.ragged_all_to_all, which XLA does not have on a {platform}: "
            "use expert_transport=auto there"
        )


def in_program_order(f: Callable, overlap: Overlap) -> Callable:
    """Returns `f` with its collectives and compute scheduled in the order it is written, where `overlap` says so."""
    return f if overlap is Overlap.NONE else program_order(f, enforce=True)


def launch_in_order(platform: str) -> None:
    """Has NCCL start collectives of several communicators in the order in which they are launched.

    Those of one process that drives several GPUs could else wait for each other for ever. It changes nothing on a CPU,
    or where the environment says how it shall be; call it before the first collective.
    """
    if resolve_overlap(platform) is Overlap.NONE:
        return
    found = os.environ.setdefault(_LAUNCH_ORDER, "1")
    _log.info("NCCL: %s=%s", _LAUNCH_ORDER, found)


def compiler_options(platform: str, channels: int = 0, overlaps: bool = True) -> dict[str, int] | None:
    """Returns the options that XLA needs to compile a program with several collectives of two halves under way at once.

    XLA allows one unless it is told otherwise, and refuses to schedule a program written with more
    ("kExceedsOverlapLimit"). `channels` bounds the multiprocessors that each NCCL communicator takes (its `maxCTAs`);
    0 leaves that to NCCL. A program that is written for one collective at a time, as one that never `overlaps`, needs
    no options.
    """
    if resolve_overlap(platform, overlaps) is not Overlap.HOOKS:
        return None
    limits = dict.fromkeys(_NCCL_CHANNELS, channels) if channels else {}
    return {_LIMIT: _MAX_IN_FLIGHT, **limits}


def limits_of(options: Mapping[str, Any] | None) -> tuple[int, int]:
    """Returns how many collectives these options of XLA allow under way at once, and channels of each communicator.

    0 channels: nothing bounds them.
    """
    given = options or {}
    return given.get(_LIMIT, 1), max(given.get(name, 0) for name in _NCCL_CHANNELS)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective under way; `pending` is jax's future, or the result where collectives are synchronous.

    `like` says what the words are that it carries, where only their sender knows.
    """

    pending: Any
    is_future: bool
    like: Any = None

    def finish(self) -> jax.Array:
        """Waits for the collective and returns its result."""
        return self.pending.done() if self.is_future else self.pending


def start_all_to_all(x: jax.Array, axes: tuple[str, ...], overlap: Overlap) -> Transfer:
    """Sends block j of the leading axis of `x` to peer j along mesh axes `axes`; block j of the result is peer j's."""
    if overlap is not Overlap.HOOKS:
        return Transfer(lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True), False)
    from jax._src.lax.parallel import all_to_all_start

    return Transfer(all_to_all_start(x, axes, 0, 0, tiled=True), True)


def start_all_gather(x: jax.Array, axes: tuple[str, ...], overlap: Overlap) -> Transfer:
    """Sends `x` to all peers along mesh axes `axes`; finish gives those of all, joined along the leading axis."""
    if overlap is not Overlap.HOOKS:
        return Transfer(lax.all_gather(x, axes, axis=0, tiled=True), False)
    from jax._src.lax.parallel import all_gather_start

    return Transfer(all_gather_start(x, axes, axis=0, tiled=True), True)


def start_reduce_scatter(x: jax.Array, axes: tuple[str, ...], overlap: Overlap) -> Transfer:
    """Sums block j of the leading axis of `x` over all peers along `axes`, for peer j; finish gives this one's."""
    if overlap is not Overlap.HOOKS:
        return Transfer(lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True), False)
    return Transfer(lax.psum_scatter_start(x, axes, scatter_dimension=0, tiled=True), True)
