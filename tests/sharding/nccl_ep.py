"""The stand-in for NVIDIA's libraries, built from the C++ beside this file, and groups over CPU devices by it."""

import ctypes
import functools
import pathlib
from collections.abc import Sequence

import pytest
from jax.sharding import Mesh

from pallas_kernels.native.build import NoLibraryError, build_library
from sharding.nccl_ep import library
from sharding.nccl_ep.library import GroupKey, Installed

_HEADER = pathlib.Path(library.__file__).with_name("abi.h")


@functools.cache
def stand_in() -> pathlib.Path:
    """The built library. Skips a test on a machine without a C++ compiler."""
    try:
        return build_library("nccl-ep-stand-in", [pathlib.Path(__file__).with_name("nccl_ep_stand_in.cc")], [_HEADER])
    except NoLibraryError as error:
        pytest.skip(str(error))


def use_stand_in(patch: pytest.MonkeyPatch) -> None:
    """Makes the stand-in the installed library, and CPUs devices that it takes."""
    patch.setattr(library, "installed", lambda: Installed(stand_in(), stand_in(), {}))
    patch.setattr(library, "PLATFORMS", ("cpu",))


def create_groups(mesh: Mesh, keys: Sequence[GroupKey]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        use_stand_in(patch)
        library.create_groups(mesh, keys, timeout_seconds=60, call_seconds=60)


def number(name: str) -> ctypes.c_int:
    """A variable of the stand-in."""
    return ctypes.c_int.in_dll(ctypes.CDLL(str(stand_in())), name)
