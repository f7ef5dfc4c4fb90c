"""Writing the rows of new tokens into the page pool in Triton, in place."""

import triton
import triton.language as tl


@triton.jit
def write(
    pages_ptr, rows_ptr, target_ptr, offset_ptr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, DROPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores row t of rows [T, WIDTH] to `pages[target[t], offset[t]]`, unless the target is DROPPED."""
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + token).to(tl.int64)
    if target == DROPPED:
        return
    column = tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + token * WIDTH + column, mask=column < WIDTH)
    place = target * PAGE + tl.load(offset_ptr + token)
    tl.store(pages_ptr + place * WIDTH + column, row, mask=column < WIDTH)
