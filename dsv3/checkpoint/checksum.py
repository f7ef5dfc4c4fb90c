"""The checksum of a block: any wrong byte, lost page or swapped page changes it, and it runs as fast as memory.

CRC-32 alone would take processor time that a fast disk needs. `benchmarks/checkpoint_host.py` compares the two.
"""

import zlib

import numpy as np

ROW_BYTES = 4096


def checksum(data: np.ndarray) -> int:
    """Returns the 32-bit checksum of `data`, uint8 [n].

    The data form a table of 64-bit words with 4,096 bytes per row. CRC-32 covers the sums of its rows, the sums of its
    columns (both modulo 2**64) and the bytes after the last whole row. Damage inside one row changes a column sum.
    Rows that swap change the order of the row sums. Damage passes only if it cancels in rows and in columns, or if two
    CRC-32 values are equal by chance (2**-32).
    """
    whole = data.size - data.size % ROW_BYTES
    words = data[:whole].view("<u8").reshape(-1, ROW_BYTES // 8)
    columns, rows = (np.add.reduce(words, axis=axis) for axis in (0, 1))
    return zlib.crc32(data[whole:], zlib.crc32(rows, zlib.crc32(columns)))
