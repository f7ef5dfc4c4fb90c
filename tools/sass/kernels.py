"""The kernels whose main loops are read: programs at production shapes, and what they wait for.

A protocol names the mbarriers on the usual path of a loop in program order. A change of a kernel that adds or removes
one must be made here too; the model refuses a loop that does not fit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend
from pallas_kernels.checks import Case, products
from pallas_kernels.checks import experts as expert_cases
from pallas_kernels.checks.attention import LATENT, WIDTH, Decode
from pallas_kernels.checks.compressed import ENTRIES, attend_case
from pallas_kernels.checks.prefill import Prefill
from pallas_kernels.gemm.dispatch import kernel_of_plan
from pallas_kernels.gemm.fp4 import fp4_kernel
from pallas_kernels.gemm.narrow import NarrowKernel, SplitKernel
from pallas_kernels.gemm.plan import WIDE_TILE_M, TilePlan, plan_contiguous, plan_dense
from pallas_kernels.gemm.schedule import Dense
from pallas_kernels.grouped import choose_tile_m
from pallas_kernels.mla.layout import LISTED_BYTES, PAGE_SIZE
from tools.doctor.fast import scheduled
from tools.sass.counts import assumed
from tools.sass.model import Load, Protocol, Role, TmaLink

E4M3 = jnp.float8_e4m3fn
LINKS = {
    "700, no limit": TmaLink(assumed("TMA latency"), math.inf),
    "700, 40": TmaLink(assumed("TMA latency"), assumed("L2 to multiprocessor")),
    "900, 19.9": TmaLink(assumed("latency of memory"), assumed("memory of an H200")),
}
"""By their names in the tables."""
FAST, SHARED, MEMORY = LINKS
PRODUCT_PASS = "128 of K"
"""What a pass through a product's loop does."""
_ROPE_ASKED = "rotated keys are asked for"
_PAGE_ROW = 2 * WIDTH
_FP8_ROW = 656


@dataclasses.dataclass(frozen=True)
class SassKernel:
    """One kernel at one shape.

    Attributes:
      name: what the tables call it.
      symbol: how its name in ptxas' report begins.
      case: whose call is compiled.
      protocol: of its main loops.
      passes: what one pass through the loop does.
      memory_bytes: of a pass that come from the GPU's memory, not the L2 cache, per block; 0 where that is not known.
      other: the loop of others that it is compared with (`others.json`), or None.
      links: under which the model runs it.
    """

    name: str
    symbol: str
    case: Case
    protocol: Protocol
    passes: str
    memory_bytes: float = 0
    other: str | None = None
    links: tuple[str, ...] = (FAST, SHARED)


def program_of(case: Case, backend: Backend = Backend.MOSAIC) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the call of a case by the kernels of a backend, and the shapes of its arguments."""
    operands = jax.eval_shape(case.operands, jax.random.key(0))
    return functools.partial(case.call, backend=backend), (operands, jax.ShapeDtypeStruct((), jnp.int32))


def kernels() -> Iterator[SassKernel]:
    """Lists attention first, then products."""
    for heads, fp8 in ((128, False), (16, False), (128, True), (16, True)):
        yield decode(heads, fp8=fp8)
    for heads in (64, 128):
        yield listed_rows(heads)
    yield listed_rows(64, fp8=True)
    yield prefill()
    yield prefill_spans()
    yield prefill_topk()
    for m, n, k, other in (
        (4096, 4096, 7168, "DeepGEMM dense 256x128"),
        (4096, 2112, 7168, "DeepGEMM dense 128x192"),
        (128, 4096, 7168, None),
        (64, 7168, 16384, None),
    ):
        yield dense(m, n, k, other)
    yield contiguous(8, 4096, 4096, 7168, "DeepGEMM contiguous 128x192")
    yield contiguous(8, 4096, 4096, 7168, "DeepGEMM contiguous 128x192, two groups", one_group=False)
    yield experts(32, 20, 4096, 7168, "DeepGEMM masked 64x128")
    for rows in (6, 24, 128):
        yield fp4_experts(64, rows, 4096, 4096)


def decode(heads: int, *, fp8: bool = False) -> SassKernel:
    """Returns decode attention of 128 requests with 8,192 tokens."""
    few = heads < 128
    row = _FP8_ROW if fp8 else _PAGE_ROW
    return SassKernel(
        name=f"decode, {heads} heads{', FP8 pages' if fp8 else ''}",
        symbol="mla_decode",
        case=scheduled(Decode(heads, 1, 8192, fp8=fp8), Backend.MOSAIC),
        protocol=_fp8_pages() if fp8 else _pages(blocks=1 if few else 2),
        passes="2 pages of 64 tokens, 64 rows",
        memory_bytes=2 * PAGE_SIZE * row / (1 if few else 2),  # two blocks of 64 rows share a page
        other=None if fp8 else "FlashMLA decode",
        links=(FAST, SHARED, MEMORY) if few else (FAST, SHARED),
    )


def listed_rows(heads: int, *, fp8: bool = False) -> SassKernel:
    """Returns DeepSeek-V4's attention to its window and entries.

    The warpgroup that copies bfloat16 rows is modelled as TMA is: what it issues is not counted.
    """
    entries = next(entries for entries, of_heads in ENTRIES if of_heads == heads)
    pages = _pages(blocks=1)
    roles = (dataclasses.replace(role, waits=tuple(filter(_is_no_rope, role.waits))) for role in pages.roles)
    loads = tuple(load for load in pages.loads if _is_no_rope(load.full))
    protocol, row = dataclasses.replace(pages, roles=tuple(roles), loads=loads), 2 * LATENT
    if fp8:
        feeding = _dequantizing("part 0", "part 1", "part 2", "part 3")
        protocol, row = dataclasses.replace(protocol, roles=(*protocol.roles, feeding), loads=()), LISTED_BYTES
    return SassKernel(
        name=f"listed rows, {heads} heads{', FP8 rows' if fp8 else ''}",
        symbol="attend_lists",
        case=attend_case(entries, heads, fp8),
        protocol=protocol,
        passes="2 tiles of 64 rows, 64 heads",
        memory_bytes=2 * PAGE_SIZE * row / (heads / 64),  # blocks of one query share its rows
        links=(FAST, SHARED, MEMORY) if heads == 64 else (FAST, SHARED),
    )


def _is_no_rope(barrier: str) -> bool:
    return not barrier.startswith("part 4")


def _pages(blocks: int) -> Protocol:
    """Returns the protocol where `blocks` fetch a page together."""
    quarter, rope = PAGE_SIZE * LATENT // 2, PAGE_SIZE * (_PAGE_ROW - 2 * LATENT)

    def full(stage: str, *parts: int) -> tuple[str, ...]:
        return tuple(f"part {part} of {stage}" for part in parts)

    left = Role(
        waits=(*full("a", *range(5)), "weights_b", *full("b", 0, 1)),
        arrives=("weights_a", "left_free_a", "right_free_a", "left_free_b", "right_free_b"),
    )
    right = Role(
        waits=(*full("b", *range(5)), "weights_a", *full("a", 2, 3)),
        arrives=("weights_b", "right_free_a", "right_free_b"),
    )
    loads = tuple(
        Load(f"part {part} of {stage}", f"{'left' if part < 2 else 'right'}_free_{stage}", size, size / blocks)
        for stage in "ab"
        for part, size in enumerate((quarter, quarter, quarter, quarter, rope))
    )
    return Protocol((left, right), loads, arrivals={"right_free_a": 2, "right_free_b": 2})


def _fp8_pages() -> Protocol:
    """Returns the protocol where a third warpgroup dequantizes pages in registers, and has rotated keys copied."""
    pages = _pages(blocks=1)
    asked = tuple(
        dataclasses.replace(load, free=f"{_ROPE_ASKED} of {load.full[-1]}", asked=True)
        for load in pages.loads
        if load.full.startswith("part 4")
    )
    feeding = _dequantizing("part 0", "part 1", _ROPE_ASKED, "part 2", "part 3")
    return dataclasses.replace(pages, roles=(*pages.roles, feeding), loads=asked)


def _dequantizing(*parts: str) -> Role:
    """Returns the warpgroup that loads pages into registers and dequantizes them, part by part."""
    free = tuple(f"{half}_free_{stage}" for stage in "ab" for half in ("left", "right"))
    return Role(free, tuple(f"{part} of {stage}" for stage in "ab" for part in parts), fetches=True)


def prefill() -> SassKernel:
    """Returns expanded attention of 8,192 tokens with 128 heads."""
    keys = 128
    waits, arrives = ("key_full", "turn", "value_full", "turn"), ("turn", "key_free", "turn", "value_free")
    first, second = Role(waits, arrives), Role(waits, arrives, before=("turn",))
    sizes = {"key": keys * 2 * 192, "value": keys * 2 * 128}
    loads = tuple(Load(f"{part}_full", f"{part}_free", size, size) for part, size in sizes.items())
    return SassKernel(
        name="prefill, 192 and 128",
        symbol="mla_prefill",
        case=Prefill.even(8192, 1).case(),
        protocol=Protocol((first, second), loads, 2, {"turn": 2, "key_free": 2, "value_free": 2}),
        passes="128 keys, 128 tokens",
        other="FA3 prefill",
    )


def prefill_spans() -> SassKernel:
    """Returns the same attention of 2,048 new tokens to 32,768 cached ones and themselves, of 16 heads at a time."""
    case = Prefill.even(2048, 1, 32768, heads=16).spans_case()
    return dataclasses.replace(prefill(), name="prefill to spans of keys, 192 and 128", case=case)


def prefill_topk() -> SassKernel:
    """Returns the same attention of 4,096 tokens to 2,048 of 12,288, which bits name."""
    case = Prefill.even(4096, 1, 8192).topk_case(2048)
    name, symbol = "prefill to top-k keys, 192 and 128", "mla_prefill_topk"
    return dataclasses.replace(prefill(), name=name, symbol=symbol, case=case, other=None)


def dense(m: int, n: int, k: int, other: str | None = None) -> SassKernel:
    """Returns one product of FP8 values."""
    return _product(f"dense {m}", "dense", products.dense_case(m, n, k), plan_dense(m, n, k, 1), (n, k), other)


def contiguous(
    groups: int, rows: int, n: int, k: int, other: str | None = None, *, one_group: bool = True
) -> SassKernel:
    """Returns experts in prefill: the tiles of a cluster whose two row tiles have one group, or two."""
    case = expert_cases.contiguous_case(groups, rows, n, k, E4M3)
    aligned_rows = jax.eval_shape(case.operands, jax.random.key(0))["x"][0].shape[0]
    plan = dataclasses.replace(plan_contiguous(aligned_rows, WIDE_TILE_M, n, k, 1), shares_weights=one_group)
    schedule = "contiguouspairs" if plan.cluster > 1 else "contiguous"
    kernel = _product(f"contiguous {groups} of {rows}", schedule, case, plan, (n, k), other)
    return kernel if one_group else dataclasses.replace(kernel, name=f"{kernel.name}, two groups")


def experts(groups: int, rows: int, n: int, k: int, other: str | None = None) -> SassKernel:
    """Returns experts in decode."""
    case = expert_cases.decode_case(expert_cases.about(rows, groups), rows, n, k, E4M3, Backend.MOSAIC)
    tile_m = choose_tile_m(groups * rows, groups, backend=Backend.MOSAIC)
    plan = plan_contiguous(groups * rows, tile_m, n, k, 1)
    return _product(f"contiguous {groups} of {rows}", "contiguous", case, plan, (n, k), other)


def fp4_experts(groups: int, rows: int, n: int, k: int) -> SassKernel:
    """Returns FP4 experts, of the shape of DeepSeek-V4-Flash's first product."""
    case = expert_cases.decode_case(expert_cases.about(rows, groups), rows, n, k, expert_cases.FP4, Backend.MOSAIC)
    tile_m = choose_tile_m(groups * rows, groups, dtype=expert_cases.FP4, backend=Backend.MOSAIC)
    kernel = fp4_kernel((1, 8, n), jnp.bfloat16, tile_m, k)
    words = kernel.tile_n * (kernel.tile_k // 2 + 4)
    size = tile_m * (kernel.tile_k + 4) + words
    consumer = Role(("full",), ("empty",))
    return SassKernel(
        name=f"contiguous {groups} of {rows} x {n} x {k}: FP4, narrow {tile_m}x{kernel.tile_n}",
        symbol=kernel.name,
        case=case,
        protocol=Protocol((consumer, consumer), (Load("full", "empty", size, size),), kernel.depth, {"empty": 2}),
        passes=PRODUCT_PASS,
        memory_bytes=words,
        links=(FAST, SHARED, MEMORY),
    )


def _product(
    name: str, schedule: str, case: Case, plan: TilePlan, shape: tuple[int, int], other: str | None
) -> SassKernel:
    tile = f"{plan.tile_m}x{plan.tile_n}"
    splits = f", K in {plan.splits}" if plan.splits > 1 else ""
    shared = "weights" if plan.shares_weights else "activations"
    cluster = f", {shared} by multicast" if plan.cluster > 1 else ""
    kind = "tall" if plan.is_tall else "wide" if plan.wide else "split" if plan.splits > 1 else "narrow"
    return SassKernel(
        name=f"{name} x {shape[0]} x {shape[1]}: {kind} {tile}{splits}{cluster}",
        symbol=f"fp8_{schedule}_{kind}_{tile}",
        case=case,
        protocol=_ring(plan, *shape),
        passes=PRODUCT_PASS,
        other=other,
    )


def _ring(plan: TilePlan, n: int, k: int) -> Protocol:
    """Returns the protocol of a product's ring of stages; a pass is a step of 128 of K."""
    w, split = jax.ShapeDtypeStruct((1, n, k), E4M3), plan.splits > 1
    out = ((plan.splits, n, 8), jnp.float32) if split else ((1, 8, n), jnp.bfloat16)
    schedule = Dense(8, plan.tile_m, plan.splits)
    kernel = kernel_of_plan(plan, schedule, w, w, out, SplitKernel if split else NarrowKernel)
    x_bytes, w_bytes = plan.tile_m * (128 + 4), plan.tile_n * 128
    share = (x_bytes / plan.cluster_n + w_bytes / plan.cluster_m) / (x_bytes + w_bytes)
    halves = ("full", "second") if plan.is_tall else ("full",)
    # A tall kernel's second half of the activations comes by itself.
    later = (plan.tile_m // 2 * 128,) * (len(halves) - 1)
    sizes = (x_bytes + w_bytes - sum(later), *later)
    loads = tuple(Load(full, "empty", size, size * share) for full, size in zip(halves, sizes, strict=True))
    consumer = Role(halves, ("empty",))
    return Protocol((consumer, consumer), loads, kernel.depth, {"empty": 2})
