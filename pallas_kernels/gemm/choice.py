"""The products of the backends that have kernels for a GPU, under the same names: `dense`, `contiguous`, `heads`."""

from pallas_kernels.backend import Backend
from pallas_kernels.gemm import dispatch, triton_dispatch

KERNELS = {Backend.MOSAIC: dispatch, Backend.TRITON: triton_dispatch}
