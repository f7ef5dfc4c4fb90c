"""FP4 weights in words: the values of e2m1 codes. Nothing here needs jax.

Codes lie in words as INT4 numbers do (`pallas_kernels.int4`): 32 words hold 256 columns, and bits 4 j to 4 j + 3 of
word w are column 32 j + w. Words are uint32, those of INT4 int32. 32 neighboring columns have one scale, a power of
two.
"""

import numpy as np

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The value of each code: bit 3 is the sign."""
