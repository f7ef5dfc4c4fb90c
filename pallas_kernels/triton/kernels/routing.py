"""The router in Triton: the experts of a token and their weights."""

import triton
import triton.language as tl


@triton.jit
def choose(
    logits_ptr, bias_ptr, layer_ptr, valid_ptr, ids_ptr, weights_ptr,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr, ROOT: tl.constexpr,
    NORMED: tl.constexpr, FACTOR: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes the TOPK experts with the highest scores and bias of a token, best first, and the weights from the scores.

    Scores are the logits' sigmoid, or the ROOT of their softplus. Of equal ones the first wins; NaN counts as infinite.
    """
    token, expert, slot = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    here = expert < EXPERTS
    x = tl.load(logits_ptr + token * EXPERTS + expert, mask=here, other=0.0)
    small = tl.exp(-tl.abs(x))
    if ROOT:
        above = 1.0 + small  # log1p of a small number: the error of the sum is divided out
        log = tl.where(above == 1.0, small, tl.log(above) * (small / tl.where(above == 1.0, 1.0, above - 1.0)))
        scores = tl.sqrt(tl.maximum(x, 0.0) + log)
        scores = tl.where(x == x, scores, x)
    else:
        scores = tl.where(x >= 0, 1.0, small) / (1.0 + small)
    ranked = scores
    if BIASED:
        ranked += tl.load(bias_ptr + (tl.load(layer_ptr).to(tl.int64) - FIRST) * EXPERTS + expert, mask=here, other=0.0)
    ranked = tl.where(here, tl.where(ranked == ranked, ranked, float("inf")), float("-inf"))
    taken = expert >= EXPERTS
    ids, weights = tl.zeros([BLOCK_K], tl.int32), tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(TOPK):
        best = tl.min(
            tl.where((ranked == tl.max(tl.where(taken, float("-inf"), ranked), 0)) & ~taken, expert, BLOCK), 0
        )
        weight = tl.sum(tl.where(expert == best, scores, 0.0), 0)
        ids, weights = tl.where(slot == k, best, ids), tl.where(slot == k, weight, weights)
        taken = taken | (expert == best)
    if NORMED:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    if MASKED:
        ids = tl.where(tl.load(valid_ptr + token) != 0, ids, -1)
    place = token * TOPK + slot
    tl.store(ids_ptr + place, ids, mask=slot < TOPK)
    tl.store(weights_ptr + place, weights * FACTOR, mask=slot < TOPK)
