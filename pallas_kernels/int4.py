"""The packing of INT4 weights into words, in checkpoints and here. Nothing here needs jax.

A value is an unsigned four-bit number minus 8. 32 neighboring columns of a row are a *scale group* with one scale.

In a checkpoint (compressed-tensors, "pack-quantized") a word holds eight neighboring columns, the first in the lowest
bits. Here 32 words hold 256 columns, and bits 4 j to 4 j + 3 of word w are column 32 j + w. So the same four bits of
all 32 words are one scale group, and the tensor core can take them from registers without exchanges between threads.
"""

import numpy as np

OFFSET = 8
"""Subtracted from the four bits."""
GROUP = 32
"""Columns that share a scale."""
VALUES_PER_WORD = 8
RUN = GROUP * VALUES_PER_WORD
"""Columns of 32 words. K is a multiple of it."""

_SWAPS = ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F))


def interleave(words: np.ndarray) -> np.ndarray:
    """Returns the words of a checkpoint, int32 `[..., K / 8]`, in the order used here, in the same shape.

    Nibble i of word 4 j + q of a run is column 32 j + 8 q + i, which becomes nibble j of word 8 q + i. So for each q
    eight words are a square of 8 x 8 values, which is transposed: by three rounds of swaps between words, then by
    reordering words.

    Raises ValueError where K is no multiple of 256.
    """
    if words.dtype != np.int32 or words.shape[-1] % GROUP:
        raise ValueError(f"INT4 weights are int32 words, 32 at a time; got {words.dtype}{list(words.shape)}")
    squares = words.view(np.uint32).reshape(-1, VALUES_PER_WORD, GROUP // VALUES_PER_WORD).copy()  # [runs, j, q]
    for distance, mask in _SWAPS:
        _swap(squares, distance, np.uint32(mask))
    return np.ascontiguousarray(squares.swapaxes(1, 2)).reshape(words.shape).view(np.int32)


def _swap(squares: np.ndarray, distance: int, mask: np.uint32) -> None:
    """Swaps, in place, the upper values of each word with the lower ones of the word at `distance`."""
    pairs = squares.reshape(len(squares), -1, 2, distance, squares.shape[-1])
    first, second = pairs[:, :, 0], pairs[:, :, 1]
    bits = np.uint32(4 * distance)
    differing = ((first >> bits) ^ second) & mask
    second ^= differing
    first ^= differing << bits
