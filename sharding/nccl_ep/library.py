"""NVIDIA's libraries and our handlers over them: found, built, opened, groups created, and called from programs.

`nccl-extensions` brings `libnccl_ep` and the sources of its kernels, which it compiles at run time with nvcc. Ours is
C++ beside this file, built for this machine at first use as the CPU's kernels are, and links neither.
"""

import concurrent.futures
import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from pallas_kernels.native.build import NoLibraryError, build_library

PLATFORMS = ("gpu", "cuda")
HANDLERS = ("Dispatch", "Combine", "Complete")
TIMEOUT_SECONDS = 100.0
"""How long a rank waits for another in a call; kernels of the first call are compiled within it."""
CALL_SECONDS = 250.0
"""How long a program waits on the host for a call with high throughput, in which the library waits without a limit.

It includes compiling kernels, and is less than the servers' watchdog has (300 s), so that the error says what waits.
"""

_SOURCES = [Path(__file__).with_name(name) for name in ("groups.cc", "handlers.cc")]
_HEADERS = [Path(__file__).with_name(name) for name in ("abi.h", "groups.h")]
_DISTRIBUTION = "nccl-extensions"
_ID_BYTES = 128
_COUNT_BYTES, _LAYOUT_BYTES, _ALIGNMENT = 4, 8, 256
_orders: dict[int, tuple[jax.Device, ...]] = {}  # devices of the communicator of so many ranks


class NcclEpError(ValueError):
    """NCCL EP cannot be used here: the devices are no GPUs, a library is missing or refused, or a group failed."""


class Installed(NamedTuple):
    """Paths of the two libraries, and the variables by which NCCL EP finds headers and compiler of its kernels."""

    nccl: Path
    nccl_ep: Path
    environment: dict[str, str]


class GroupKey(NamedTuple):
    """A group of `ranks`: tokens of each, ids per token, experts of all, most bytes of a row, and the micro-batch.

    With high throughput, `chunk` is how many tokens of a rank one call of the library takes, and `received` the most
    rows that a rank receives of the chunks of all; both are 0 with low latency. Keys that differ in tokens and
    micro-batch then share a group (`shared`).
    """

    ranks: int
    tokens: int
    top_k: int
    experts: int
    row_bytes: int
    slot: int
    chunk: int = 0
    received: int = 0

    @property
    def chunks(self) -> int:
        """Calls for the tokens of a rank, with high throughput."""
        return -(-self.tokens // self.chunk)

    @property
    def shared(self) -> "GroupKey":
        """What the keys of one group have in common."""
        return self._replace(tokens=0, slot=0) if self.chunk else self


def check_platform(platform: str) -> None:
    """Raises `NcclEpError` unless the devices are NVIDIA GPUs."""
    if platform not in PLATFORMS:
        raise NcclEpError(f"expert_transport nccl_ep needs NVIDIA GPUs, not {platform}: use expert_transport auto")


def installed() -> Installed:
    """Returns the installed libraries. Raises `NcclEpError`, which names the extra to install."""
    try:
        extensions = importlib.metadata.distribution(_DISTRIBUTION)
        major = 13 if any(importlib.metadata.distributions(name="jax-cuda13-plugin")) else 12
        nccl = importlib.metadata.distribution(f"nvidia-nccl-cu{major}")
    except importlib.metadata.PackageNotFoundError as error:
        raise NcclEpError(
            f"expert_transport nccl_ep needs the package {error.name}: install dsv3[nccl_ep], "
            "or use another expert_transport"
        ) from None
    nccl_home, home = Path(str(nccl.locate_file("nvidia/nccl"))), Path(str(extensions.locate_file("nccl/ep")))
    compiler = Path(str(nccl.locate_file(f"nvidia/cu{major}/bin/nvcc")))
    environment = {"NCCL_EP_HOME": str(home), "NCCL_HOME": str(nccl_home)}
    if compiler.exists():
        environment["NCCL_EP_JIT_NVCC"] = str(compiler)
    return Installed(nccl_home / "lib/libnccl.so.2", home / f"lib/cu{major}/libnccl_ep.so", environment)


@functools.cache
def targets() -> dict[str, str]:
    """Builds and registers the handlers, for CPUs and GPUs; returns their names for `ffi_call`.

    Names have a digest of the sources, because stored programs refer to handlers by name. Raises `NcclEpError` if the
    handlers cannot be built.
    """
    library, sources = _handlers(), b"".join(path.read_bytes() for path in _SOURCES + _HEADERS)
    key = hashlib.sha256(sources).hexdigest()[:8]
    names = {handler: f"dsv3_nccl_ep_{handler}_{key}" for handler in HANDLERS}
    for handler, name in names.items():
        for platform, suffix in (("cpu", "OnCpu"), ("CUDA", "OnGpu")):
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, handler + suffix)), platform)
    return names


@functools.cache
def _handlers() -> ctypes.CDLL:
    try:
        path = build_library("nccl-ep", _SOURCES, _HEADERS)
    except NoLibraryError as error:
        raise NcclEpError(f"the handlers of NCCL EP cannot be built: {error}") from None
    library = ctypes.CDLL(str(path))
    for name, arguments in (
        ("open", [ctypes.c_char_p] * 2),
        ("unique_id", [ctypes.c_char_p]),
        ("connect", [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_bool]),
        ("late", [ctypes.POINTER(ctypes.c_int32), ctypes.c_int64]),
        ("create_group", [ctypes.c_int, ctypes.POINTER(ctypes.c_int64), *[ctypes.c_int64] * 2, ctypes.c_bool]),
    ):
        function = getattr(library, f"nccl_ep_{name}")
        function.argtypes, function.restype = arguments, ctypes.c_char_p
    return library


def open_library(found: Installed) -> None:
    """Opens the libraries. Raises `NcclEpError` for one that is missing or incomplete, or too old (abi.h)."""
    for name, value in found.environment.items():
        os.environ.setdefault(name, value)
    _call("open", str(found.nccl).encode(), str(found.nccl_ep).encode())


def prepare(mesh: Mesh) -> list[tuple[int, jax.Device]]:
    """Opens the installed library, before weights are read; returns rank and device of this process's devices.

    Raises `NcclEpError`, also for several GPUs in this process.
    """
    ranked = list(enumerate(mesh.devices.flat))
    own = [(rank, device) for rank, device in ranked if device.process_index == jax.process_index()]
    if ranked[0][1].platform != "cpu" and len(own) > 1:
        raise NcclEpError(
            f"expert_transport nccl_ep needs one process per GPU, but this one has {len(own)}: set "
            "--processes_per_node to the GPUs of a host, or start launch.serve, which does"
        )
    open_library(installed())
    return own


def create_groups(
    mesh: Mesh,
    keys: Sequence[GroupKey],
    timeout_seconds: float = TIMEOUT_SECONDS,
    call_seconds: float = CALL_SECONDS,
) -> None:
    """Creates the groups that do not exist over the devices of `mesh`, whose ranks are in its order.

    With low latency a rank that is silent for `timeout_seconds` is left out (`late_devices`). With high throughput a
    program fails whose call does not return within `call_seconds`, and so do all later ones on that group.

    All processes must call it with the same arguments; it waits for them. Groups over as many devices in another order
    are forgotten: no program may use them any more. Raises `NcclEpError`, as `prepare` does.
    """
    own = prepare(mesh)
    devices = tuple(mesh.devices.flat)
    on_gpu = devices[0].platform != "cpu"
    unique = None if _orders.get(len(devices)) == devices else _unique_id()
    if unique is not None and len(devices) in _orders:
        _handlers().nccl_ep_forget()
        _orders.clear()

    def create(rank: int, device: jax.Device) -> None:
        ordinal = device.local_hardware_id if on_gpu else device.id  # as the handlers count them
        if unique is not None:
            _call("connect", ordinal, unique, len(devices), rank, on_gpu)
        for key in sorted(keys):
            limits = int(timeout_seconds * 1e9), math.ceil(call_seconds)
            _call("create_group", ordinal, (ctypes.c_int64 * len(key))(*key), *limits, on_gpu)

    with concurrent.futures.ThreadPoolExecutor(len(own)) as threads:
        for made in [threads.submit(create, *each) for each in own]:
            made.result()
    _orders[len(devices)] = devices


def late_devices() -> list[jax.Device]:
    """Returns the devices whose rank was late in a call with low latency, and is left out of results since.

    It waits for no program. Groups recover only when they are created again, by processes that start again. Raises
    `NcclEpError` where the library does not say.
    """
    found: list[jax.Device] = []
    for count, devices in _orders.items():
        is_late = (ctypes.c_int32 * count)()
        _call("late", is_late, count)
        found += [device for device, late in zip(devices, is_late, strict=True) if late and device not in found]
    return found


def check_ranks() -> None:
    """Raises `NcclEpError`, which names devices and processes, if `late_devices` has some."""
    if late := late_devices():
        names = ", ".join(f"device {device.id} (process {device.process_index})" for device in late)
        raise NcclEpError(f"NCCL EP: {names} did not answer in time and is left out, so results lack its experts")


def _unique_id() -> bytes:
    """Returns the name of a new communicator, made by the first process."""
    unique = ctypes.create_string_buffer(_ID_BYTES)
    if jax.process_index() == 0:
        _call("unique_id", unique)
    if jax.process_count() > 1:
        shared = multihost_utils.broadcast_one_to_all(np.frombuffer(unique.raw, np.uint8))
        return np.asarray(shared, np.uint8).tobytes()
    return unique.raw


def _call(name: str, *arguments: object) -> None:
    failed = getattr(_handlers(), f"nccl_ep_{name}")(*arguments)
    if failed is not None:
        raise NcclEpError(f"NCCL EP: {failed.decode()}")


@dataclasses.dataclass(frozen=True)
class Calls:
    """NCCL EP's calls as jax functions, inside `shard_map`, on the group `key`, that of one micro-batch.

    Shapes: t tokens of this rank, at most T of any, K ids per token. Received rows are on lines `[R, T, ...]`, those of
    R ranks, with low latency, and `[C, N, ...]`, those of C chunks, with high throughput. A whole call returns finished
    arrays. With `halves` the call is started, its results are buffers that are still empty, and `complete` returns them
    filled; until then other arrays that it reads must live.
    """

    key: GroupKey
    halves: bool = False

    @property
    def lines(self) -> tuple[int, int]:
        """The leading sizes of received rows."""
        key = self.key
        return (key.chunks, key.received) if key.chunk else (key.ranks, key.tokens)

    @property
    def origins(self) -> jax.ShapeDtypeStruct:
        """The library's notes where rows came from, bytes (`ncclEpHandleMemSize`); with high throughput totals `[C]`.

        A total is the rows that a chunk brings. Where it exceeds N, those in excess are lost.
        """
        key = self.key
        if key.chunk:
            return jax.ShapeDtypeStruct((key.chunks,), jnp.int32)
        notes = _COUNT_BYTES * key.ranks * (1 + (key.top_k + 1) * key.tokens), _LAYOUT_BYTES * key.experts
        return jax.ShapeDtypeStruct((sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in notes),), jnp.uint8)

    def dispatch(self, ids: jax.Array, weights: jax.Array, payload: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Sends each token once to every rank that owns one of its experts.

        ids `[t, K]` int32, -1 for none; weights `[t, K]` float32; payload: tokens `[t, W]`, and scales `[t, S]` if they
        have some. Returns, on lines, ids, -1 for those of other ranks; weights; origins; and the payload, `W` and `S`
        wide. With low latency a line without a row has ids of -1. With high throughput ids are int64, two int32
        `[C, N, K, 2]`, in the order of experts, and rows are on the first lines of a chunk, as many as `origins` says.
        """
        got = self._received(ids)
        got = jax.ShapeDtypeStruct((*got.shape, 2), got.dtype) if self.key.chunk else got
        results = [got, self._received(weights), self.origins, *map(self._received, payload)]
        return tuple(self._call("Dispatch", results, (ids, weights, *payload), send_only=self.halves))

    def combine(self, sums: jax.Array, origins: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
        """Sends the sums `[..., D]` on each line back to its token and adds those of a token.

        Adds in float32; with low latency in the order of its ids, otherwise in the order of ranks, first in a node and
        then, rounded, between nodes. Returns `[t, D]` in the dtype of the sums, alone in a tuple.
        """
        shape = jax.ShapeDtypeStruct((ids.shape[0], sums.shape[2]), sums.dtype)
        return tuple(self._call("Combine", [shape], (sums, origins, ids), send_only=self.halves))

    def complete(self, started: tuple[jax.Array, ...], *kept: jax.Array) -> tuple[jax.Array, ...]:
        """Waits for the call that `started` are the results of; `kept` are arrays that it still reads."""
        aliases = {i: i for i in range(len(started))}
        return tuple(self._call("Complete", list(map(_shape, started)), (*started, *kept), aliases))

    def _received(self, array: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*self.lines, array.shape[1]), array.dtype)

    def _call(
        self,
        handler: str,
        results: Sequence[jax.ShapeDtypeStruct],
        operands: Sequence[jax.Array],
        aliases: dict[int, int] | None = None,
        **attributes: bool,
    ) -> Sequence[jax.Array]:
        # Without side effects for XLA: results order the calls of a group, and XLA repeats no custom call.
        call = jax.ffi.ffi_call(targets()[handler], results, input_output_aliases=aliases)
        return call(*operands, group=np.array(self.key, np.int64), **attributes)


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
