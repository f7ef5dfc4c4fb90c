"""Matrix products on Hopper: Mosaic GPU kernels, tile schedules, and the selection of tiles.

The public operations are in `fp8`, `dense` and `grouped`.
"""

from pallas_kernels.backend import Backend
from pallas_kernels.gemm import dispatch, triton_dispatch

KERNELS = {Backend.MOSAIC: dispatch, Backend.TRITON: triton_dispatch}
"""The products of each GPU backend, under the same names: `dense`, `contiguous`, `heads`."""
