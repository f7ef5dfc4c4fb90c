"""jax's Mosaic GPU, loaded when a kernel first uses it: without a GPU a start is a fifth shorter."""

import functools
import importlib
from typing import TYPE_CHECKING, Any

from pallas_kernels.toolchain import prefer_own_ptxas


@functools.cache
def load_mosaic() -> Any:
    """Returns jax's module, whose import tells jaxlib where the library is that compiled kernels are linked with.

    So an executable with kernels can be loaded from a file only after it.
    """
    prefer_own_ptxas()
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


if TYPE_CHECKING:
    from jax.experimental.pallas import mosaic_gpu as plgpu
else:

    class _MosaicGpu:
        def __getattr__(self, name):
            return getattr(load_mosaic(), name)

    plgpu = _MosaicGpu()

__all__ = ["load_mosaic", "plgpu"]
