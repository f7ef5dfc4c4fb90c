"""Matrix products on Hopper: Mosaic GPU kernels, walks over tiles, and the selection of tiles.

`fp8`, `dense` and `grouped` hold the public operations; this package is what they run on sm_90.
"""

from pallas_kernels.backend import Backend
from pallas_kernels.gemm import dispatch, triton_dispatch

KERNELS = {Backend.MOSAIC: dispatch, Backend.TRITON: triton_dispatch}
"""The products of each GPU backend, under the same names: `dense`, `contiguous`, `heads`."""
