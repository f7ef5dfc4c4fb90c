"""The GPUs of this host, counted without jax."""

import ctypes


def visible_gpus() -> int:
    """Returns how many GPUs CUDA's driver shows this process, 0 without one; asking jax would allocate them all."""
    count = ctypes.c_int(0)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    return count.value if cuda.cuInit(0) == 0 == cuda.cuDeviceGetCount(ctypes.byref(count)) else 0
