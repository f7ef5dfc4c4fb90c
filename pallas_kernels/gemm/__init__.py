"""Matrix products on Hopper: three Mosaic GPU kernels, three walks over tiles, and the choice of tiles.

`fp8`, `dense` and `grouped` hold the public operations; this package is what they run on sm_90.
"""
