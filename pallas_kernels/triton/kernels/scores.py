"""Index scores in Triton: what the indexer's heads make of each cached token, for sparse attention."""

import triton
import triton.language as tl

from pallas_kernels.triton.kernels.e4m3 import widen


@triton.jit
def scores(
    q_ptr, weights_ptr, keys_ptr, table_ptr, visible_ptr, first_page_ptr, out_ptr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr, PAGE_ITEMS: tl.constexpr,
    TABLE_WIDTH: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr, BLOCK_H: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Scores PAGES pages of a query's tokens: the sum over heads of weights [queries, HEADS] * relu(q . k).

    q [queries, HEADS * WIDTH] and the keys of a page are cut into chunks of CHUNK columns: those of all heads, or of
    all tokens, one after the other. A page has PAGE_ITEMS elements. FP8 ones are bytes, a float32 scale per token
    behind the keys; NATIVE says that tensor cores multiply e4m3. Scores beyond what a query sees may be anything.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads, columns, tokens = tl.arange(0, BLOCK_H), tl.arange(0, WIDTH), tl.arange(0, PAGE)
    real = heads < HEADS
    chunk, column = columns // CHUNK, columns % CHUNK
    q_places = (chunk * HEADS)[:, None] * CHUNK + heads[None, :] * CHUNK + column[:, None]
    q = tl.load(q_ptr + row * (HEADS * WIDTH) + q_places, mask=real[None, :], other=0)
    factors = tl.load(weights_ptr + row * HEADS + heads, mask=real, other=0.0)
    if FP8:
        q = _e4m3(q, NATIVE)
    places = (chunk * PAGE)[None, :] * CHUNK + tokens[:, None] * CHUNK + column[None, :]
    table, first_page = table_ptr + row * TABLE_WIDTH, tl.load(first_page_ptr)
    pages = (tl.load(visible_ptr + row) + PAGE - 1) // PAGE
    for index in tl.range(part * PAGES, tl.minimum((part + 1) * PAGES, pages)):
        page_ptr = keys_ptr + (first_page + tl.load(table + index)).to(tl.int64) * PAGE_ITEMS
        keys = tl.load(page_ptr + places)
        if FP8:
            keys = _e4m3(keys, NATIVE)
        products = tl.dot(keys, q)
        sums = tl.sum(tl.maximum(products, 0.0) * factors[None, :], 1)
        if FP8:
            scales = (page_ptr + PAGE * WIDTH).to(tl.pointer_type(tl.float32), bitcast=True)
            sums *= tl.load(scales + tokens)
        tl.store(out_ptr + (row * TABLE_WIDTH + index) * PAGE + tokens, sums)


@triton.jit
def _e4m3(raw, NATIVE: tl.constexpr):
    """Returns the values of e4m3 bytes in the type in which a tensor core multiplies them."""
    return raw.to(tl.float8e4nv, bitcast=True) if NATIVE else widen(raw)
