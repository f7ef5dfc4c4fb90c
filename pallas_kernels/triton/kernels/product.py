"""Matrix products in Triton: one kernel for dense and grouped ones, per head, plain or block-scaled e4m3."""

import triton
import triton.language as tl

from pallas_kernels.triton.kernels.e4m3 import widen


@triton.jit
def product(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, tile_group_ptr, first_group_ptr, rows, out_ptr,
    N: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, TILE_ROWS: tl.constexpr, TRANSPOSED: tl.constexpr,
    SPLITS: tl.constexpr, SCALED: tl.constexpr, BYTES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Multiplies a tile of x [rows, HEADS, K] with the weight of its group, w [groups, N, K] or transposed [_, K, N].

    The group is HEADS times `first_group`, plus the head, plus that of the tile where TILE_ROWS is above 0 (-1: nothing
    to do).
    SCALED operands are e4m3 with scales [K / 128, rows] and [groups, N / 128, K / 128]; with BYTES they are
    bytes, widened here. The result is [SPLITS, rows, HEADS, N], one per part of K.
    """
    split, head = tl.program_id(1), tl.program_id(2)
    tile_m, tile_n = _tile(tl.program_id(0), N, BLOCK_M, BLOCK_N, BAND)
    group = tl.load(first_group_ptr) * HEADS + head
    end = rows
    if TILE_ROWS > 0:
        # A kernel tile lies in one tile of the layout, or covers it if that has fewer rows than a product.
        per_tile: tl.constexpr = (TILE_ROWS + BLOCK_M - 1) // BLOCK_M
        tile = tile_m // per_tile
        of_tile = tl.load(tile_group_ptr + tile)
        if of_tile < 0:
            return
        group += of_tile
        m = tile * TILE_ROWS + tile_m % per_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        end = (tile + 1) * TILE_ROWS
    else:
        m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n, k = tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    in_m, in_n = m < end, n < N
    x_tile = x_ptr + (m.to(tl.int64) * HEADS + head)[:, None] * K
    w_row: tl.constexpr = 1 if TRANSPOSED else K
    w_column: tl.constexpr = N if TRANSPOSED else 1
    w_tile = w_ptr + group.to(tl.int64) * N * K + n[None, :] * w_row
    k_blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    share: tl.constexpr = (k_blocks + SPLITS - 1) // SPLITS
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in tl.range(split * share, tl.minimum((split + 1) * share, k_blocks)):
        at = block * BLOCK_K + k
        x_mask, w_mask = in_m[:, None], in_n[None, :]
        if K % BLOCK_K != 0:
            x_mask, w_mask = x_mask & (at < K)[None, :], w_mask & (at < K)[:, None]
        x = tl.load(x_tile + at[None, :], mask=x_mask, other=0.0)
        w = tl.load(w_tile + at[:, None] * w_column, mask=w_mask, other=0.0)
        if BYTES:
            x, w = widen(x), widen(w)
        if SCALED:
            # Scales multiply float32 sums of 128 of K: the tensor core's accumulator is less precise.
            x_scale = tl.load(x_scale_ptr + block * rows + m, mask=in_m, other=0.0)
            w_scale_row = group.to(tl.int64) * ((N + 127) // 128) + n // 128
            w_scale = tl.load(w_scale_ptr + w_scale_row * k_blocks + block, mask=in_n, other=0.0)
            total += tl.dot(x, w) * (x_scale[:, None] * w_scale[None, :])
        else:
            total = tl.dot(x, w, total)
    place = ((split * rows + m.to(tl.int64)) * HEADS + head)[:, None] * N + n[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def int4(
    x_ptr, w_ptr, w_scale_ptr, tile_group_ptr, first_group_ptr, rows, out_ptr,
    N: tl.constexpr, K: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BAND: tl.constexpr,
):  # fmt: skip
    """Multiplies a tile of x [rows, K] with words [groups, N, K / 8] of its group, and scales [groups, K / 32, N].

    Tiles and groups are those of `product`. The same four bits of 32 words are 32 columns. A weight is rounded once to
    x's type.
    """
    tile_m, tile_n = _tile(tl.program_id(0), N, BLOCK_M, BLOCK_N, BAND)
    per_tile: tl.constexpr = (TILE_ROWS + BLOCK_M - 1) // BLOCK_M
    tile = tile_m // per_tile
    of_tile = tl.load(tile_group_ptr + tile)
    if of_tile < 0:
        return
    group = (tl.load(first_group_ptr) + of_tile).to(tl.int64)
    m = tile * TILE_ROWS + tile_m % per_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n, word = tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, 32)
    in_m, in_n = m < (tile + 1) * TILE_ROWS, n < N
    x_tile = x_ptr + m.to(tl.int64)[:, None] * K + word[None, :]
    w_tile = w_ptr + (group * N + n)[None, :] * (K // 8) + word[:, None]
    scales = w_scale_ptr + group * (K // 32) * N + n
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for run in tl.range(0, K // 256):
        words = tl.load(w_tile + run * 32, mask=in_n[None, :], other=0)
        for part in tl.static_range(8):
            values = ((words >> (4 * part)) & 15).to(tl.float32) - 8
            scale = tl.load(scales + (run * 8 + part) * N, mask=in_n, other=0.0).to(tl.float32)
            x = tl.load(x_tile + run * 256 + part * 32, mask=in_m[:, None], other=0.0)
            total = tl.dot(x, (values * scale[None, :]).to(x.dtype), total)
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def fp4(
    x_ptr, x_scale_ptr, w_ptr, w_powers_ptr, w_scale_ptr, tile_group_ptr, first_group_ptr, rows, out_ptr,
    N: tl.constexpr, K: tl.constexpr, TILE_ROWS: tl.constexpr, BYTES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Multiplies a tile of e4m3 x [rows, K] with FP4 words of its group: `pallas_kernels.fp4`.

    Tiles, groups, scales and BYTES are those of `product`; words are [groups, N, K / 8], and powers
    [groups, K / 128, N].
    """
    tile_m, tile_n = _tile(tl.program_id(0), N, BLOCK_M, BLOCK_N, BAND)
    per_tile: tl.constexpr = (TILE_ROWS + BLOCK_M - 1) // BLOCK_M
    tile = tile_m // per_tile
    of_tile = tl.load(tile_group_ptr + tile)
    if of_tile < 0:
        return
    group = (tl.load(first_group_ptr) + of_tile).to(tl.int64)
    m = tile * TILE_ROWS + tile_m % per_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n, k, word = tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, 128), tl.arange(0, 16)
    in_m, in_n = m < (tile + 1) * TILE_ROWS, n < N
    x_tile = x_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
    w_tile = w_ptr + (group * N + n)[:, None] * (K // 8) + word[None, :]
    blocks: tl.constexpr = K // 128
    powers_tile = w_powers_ptr + group * blocks * N + n
    w_scale_tile = w_scale_ptr + (group * ((N + 127) // 128) + n // 128) * blocks
    shift = 8 * (2 * (word // 8) + word % 2)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in tl.range(0, blocks):
        x = tl.load(x_tile + block * 128, mask=in_m[:, None], other=0.0)
        words = tl.load(w_tile + block * 16, mask=in_n[:, None], other=0)
        powers = tl.load(powers_tile + block * N, mask=in_n, other=0)
        step = (powers[:, None] >> shift[None, :]) & 255
        first, second = _e4m3(words & 0x7777, words, step), _e4m3((words >> 16) & 0x7777, words << 4, step)
        w = _columns(first, second, BLOCK_N)
        if BYTES:
            x, w = widen(x), widen(w)
        else:
            w = w.to(x.dtype, bitcast=True)
        x_scale = tl.load(x_scale_ptr + block * rows + m, mask=in_m, other=0.0)
        w_scale = tl.load(w_scale_tile + block, mask=in_n, other=0.0)
        total += tl.dot(x, tl.trans(w)) * (x_scale[:, None] * w_scale[None, :])
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def _e4m3(magnitudes, sign, step):
    """Returns four e4m3 bytes in a word for four codes, whose magnitudes are its lowest 16 bits.

    A byte is 4 c + 8 of code c, 0 of code 0 and 8 of code 1, and the group's `step` where it is not 0.
    """
    codes = (magnitudes | (magnitudes << 8)) & 0x00FF00FF
    codes = (codes | (codes << 4)) & 0x07070707
    some, more = ((codes + 0x07070707) >> 3) & 0x01010101, ((codes + 0x06060606) >> 3) & 0x01010101
    return ((codes << 2) + some * (step + 4) + (more << 2)) | (sign & 0x80808080)


@triton.jit
def _columns(first, second, ROWS: tl.constexpr):
    """Returns bytes [ROWS, 128] in the order of columns, from words of the two halves of groups, [ROWS, 16]."""
    words = tl.join(first, second).reshape(ROWS, 2, 4, 2, 2)  # pairs of groups, four columns, group, half
    words = tl.permute(words, (0, 1, 3, 4, 2)).reshape(ROWS, 32)
    low = tl.join(words & 255, (words >> 16) & 255)
    high = tl.join((words >> 8) & 255, words >> 24)
    return tl.join(low, high).reshape(ROWS, 128).to(tl.uint8)  # bytes 0 and 1, then 2 and 3


@triton.jit
def _tile(number, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr):
    """Returns the tile of a program: BAND tiles of rows share a tile of columns in the cache."""
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = tl.num_programs(0) // tiles_n
    band = number // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    within = number % (BAND * tiles_n)
    return band * BAND + within % height, within // height
