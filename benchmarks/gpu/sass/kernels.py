"""The kernels whose main loops `machine_code.py` reads: programs at production shapes, and what they wait for.

A protocol names the mbarriers on the usual path of a loop in program order. A change of a kernel that adds or removes
one must be made here too; the model refuses a loop that does not fit.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from benchmarks.gpu.children import program_of
from benchmarks.gpu.sass.model import Link, Load, Protocol, Role, assumed
from pallas_kernels.backend import Backend
from pallas_kernels.checks import Case, products
from pallas_kernels.checks import experts as expert_cases
from pallas_kernels.checks.attention import LATENT, WIDTH, Decode
from pallas_kernels.checks.prefill import Prefill
from pallas_kernels.gemm.dispatch import kernel_of_plan
from pallas_kernels.gemm.narrow import NarrowKernel, SplitKernel
from pallas_kernels.gemm.plan import TilePlan, plan_contiguous, plan_dense
from pallas_kernels.gemm.schedule import Dense
from pallas_kernels.grouped import choose_tile_m
from pallas_kernels.mla import mla_prefill_spans, mla_prefill_topk
from pallas_kernels.mla.layout import PAGE_SIZE
from pallas_kernels.mosaic import NUM_SMS
from pallas_kernels.multiprocessors import traced

E4M3 = jnp.float8_e4m3fn
FAST, SHARED = "700, no limit", "700, 40"
MEMORY = "900, 19.9"
PRODUCT_PASS = "128 of K"
"""What a pass through a product's loop does."""
_ROPE_ASKED = "rotated keys are asked for"
_PAGE_ROW = 2 * WIDTH
_FP8_ROW = 656


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel at one shape.

    Attributes:
      name: what the tables call it.
      symbol: how its name in ptxas' report begins.
      program: makes the function to compile and the shapes of its arguments.
      protocol: of its main loops.
      passes: what one pass through the loop does.
      memory_bytes: of a pass that come from the GPU's memory, not the L2 cache, per block; 0 where that is not known.
      other: the loop of others that it is compared with (`others.json`), or None.
      links: under which the model runs it.
    """

    name: str
    symbol: str
    program: Callable[[], tuple[Callable, tuple]]
    protocol: Protocol
    passes: str
    memory_bytes: float = 0
    other: str | None = None
    links: tuple[str, ...] = (FAST, SHARED)


def link(name: str, *, round_robin: bool) -> Link:
    """Returns the link by its name in the tables: latency in cycles, bytes per cycle."""
    latency, rate = {
        FAST: (assumed("TMA latency"), float("inf")),
        SHARED: (assumed("TMA latency"), assumed("L2 to multiprocessor")),
        MEMORY: (assumed("latency of memory"), memory_rate()),
    }[name]
    return Link(latency, rate, round_robin)


def memory_rate() -> float:
    """Returns the bytes per cycle that a multiprocessor gets from an H200's memory, shared by all that kernels take."""
    return assumed("memory of an H200") * NUM_SMS / traced().taken


def kernels() -> Iterator[Kernel]:
    """Lists attention first, then products."""
    for heads, fp8 in ((128, False), (16, False), (128, True), (16, True)):
        yield decode(heads, fp8=fp8)
    yield prefill()
    yield prefill_spans()
    yield prefill_topk()
    for m, n, k, other in (
        (4096, 4096, 7168, "DeepGEMM dense 256x128"),
        (4096, 2112, 7168, "DeepGEMM dense 128x192"),
        (128, 4096, 7168, None),
        (64, 7168, 16384, "DeepGEMM dense 64x64"),
    ):
        yield dense(m, n, k, other)
    yield contiguous(8, 4096, 4096, 7168, "DeepGEMM contiguous 128x192")
    yield contiguous(8, 4096, 4096, 7168, "DeepGEMM contiguous 128x192, two groups", one_group=False)
    yield experts(32, 20, 4096, 7168, "DeepGEMM masked 64x128")


def decode(heads: int, *, fp8: bool = False) -> Kernel:
    """Decode attention of 128 requests with 8,192 tokens."""
    case = Decode(heads, 1, 8192, fp8=fp8)

    def program():
        def attend(q, pages, table, lengths):
            return case.call(Backend.MOSAIC)(q, pages, table, lengths, schedule=case.schedule(lengths))

        return attend, case.shapes()

    few = heads < 128
    row = _FP8_ROW if fp8 else _PAGE_ROW
    return Kernel(
        name=f"decode, {heads} heads{', FP8 pages' if fp8 else ''}",
        symbol="mla_decode",
        program=program,
        protocol=_fp8_pages() if fp8 else _pages(blocks=1 if few else 2),
        passes="2 pages of 64 tokens, 64 rows",
        memory_bytes=2 * PAGE_SIZE * row / (1 if few else 2),  # two blocks of 64 rows share a page
        other=None if fp8 else "FlashMLA decode",
        links=(FAST, SHARED, *((MEMORY,) if few else ())),
    )


def _pages(blocks: int) -> Protocol:
    """Returns the protocol where `blocks` fetch a page together."""
    quarter, rope = PAGE_SIZE * LATENT // 2, PAGE_SIZE * (_PAGE_ROW - 2 * LATENT)
    by_others = 1 - 1 / blocks

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
        Load(f"part {part} of {stage}", f"{'left' if part < 2 else 'right'}_free_{stage}", size, size * by_others)
        for stage in "ab"
        for part, size in enumerate((quarter, quarter, quarter, quarter, rope))
    )
    return Protocol((left, right), loads, arrivals={"right_free_a": 2, "right_free_b": 2})


def _fp8_pages() -> Protocol:
    """The third warpgroup reads pages into registers and writes their values; rotated keys it has copied."""
    pages = _pages(blocks=1)
    rope = tuple(load for load in pages.loads if load.full.startswith("part 4"))
    asked = (
        dataclasses.replace(load, free=f"{_ROPE_ASKED} of {stage}", asked=True)
        for load, stage in zip(rope, "ab", strict=True)
    )
    free = tuple(f"{half}_free_{stage}" for stage in "ab" for half in ("left", "right"))
    parts = ("part 0", "part 1", _ROPE_ASKED, "part 2", "part 3")
    arrives = tuple(f"{part} of {stage}" for stage in "ab" for part in parts)
    feeding = Role(free, arrives, passed=free, fetches=True)
    return dataclasses.replace(pages, roles=(*pages.roles, feeding), loads=tuple(asked))


def prefill() -> Kernel:
    """Expanded attention of 8,192 tokens with 128 heads."""
    case, keys = Prefill.even(8192, 1), 128
    waits, arrives = ("key_full", "turn", "value_full", "turn"), ("turn", "key_free", "turn", "value_free")
    first, second = Role(waits, arrives), Role(waits, arrives, before=("turn",))
    loads = (Load("key_full", "key_free", keys * 2 * 192), Load("value_full", "value_free", keys * 2 * 128))
    return Kernel(
        name="prefill, 192 and 128",
        symbol="mla_prefill",
        program=lambda: (case.call(Backend.MOSAIC), case.shapes()),
        protocol=Protocol((first, second), loads, 2, {"turn": 2, "key_free": 2, "value_free": 2}),
        passes="128 keys, 128 tokens",
        other="FA3 prefill",
    )


def prefill_spans() -> Kernel:
    """Returns the same attention of 2,048 new tokens to 32,768 cached ones and themselves, of 16 heads at a time."""
    T, K, H, ints = 2048, 32768 + 2048, 16, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    shapes = array((T, H, 192)), array((K, H, 128)), array((K, H, 128)), ints((T,)), ints((T,))

    def attend(*arrays):
        *others, shared_key = arrays
        return mla_prefill_spans(*others, scale=0.1, shared_key=shared_key, backend=Backend.MOSAIC)

    return dataclasses.replace(
        prefill(),
        name="prefill to spans of keys, 192 and 128",
        program=lambda: (attend, (*shapes, array((K, 64)))),
    )


def prefill_topk() -> Kernel:
    """Returns the same attention of 4,096 tokens to chosen ones of 12,288, which bits name."""
    T, K, H, ints = 4096, 12288, 128, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    shapes = array((T, H, 192)), array((K, H, 128)), array((K, H, 128)), ints((K // 32, T)), ints((T,)), ints((T,))

    def attend(*arrays):
        *others, shared_key = arrays
        return mla_prefill_topk(*others, scale=0.1, shared_key=shared_key, backend=Backend.MOSAIC)

    return dataclasses.replace(
        prefill(),
        name="prefill to top-k keys, 192 and 128",
        symbol="mla_prefill_topk",
        program=lambda: (attend, (*shapes, array((K, 64)))),
        other=None,
    )


def dense(m: int, n: int, k: int, other: str | None = None, plan: TilePlan | None = None) -> Kernel:
    """One product of FP8 values, under its default plan or another."""
    case = products.dense_case(m, n, k, plan)
    return _product(f"dense {m}", "dense", case, plan or plan_dense(m, n, k, 1, num_sms=traced().taken), (n, k), other)


def contiguous(groups: int, rows: int, n: int, k: int, other: str | None = None, *, one_group: bool = True) -> Kernel:
    """Experts in prefill: the tiles of a cluster whose two row tiles have one group, or two."""
    case = expert_cases.contiguous_case(groups, rows, n, k, E4M3)
    kernel = _grouped(f"contiguous {groups} of {rows}", case, 128, (n, k), other, one_group=one_group)
    return kernel if one_group else dataclasses.replace(kernel, name=f"{kernel.name}, two groups")


def experts(groups: int, rows: int, n: int, k: int, other: str | None = None) -> Kernel:
    """Experts in decode."""
    case = expert_cases.decode_case(expert_cases.about(rows, groups), rows, n, k, E4M3, Backend.MOSAIC)
    tile_m = choose_tile_m(groups * rows, groups, backend=Backend.MOSAIC)
    return _grouped(f"contiguous {groups} of {rows}", case, tile_m, (n, k), other)


def _grouped(
    name: str, case: Case, tile_m: int, shape: tuple[int, int], other: str | None, *, one_group: bool = True
) -> Kernel:
    aligned = jax.eval_shape(case.operands, jax.random.key(0))["x"][0].shape[0]
    plan = plan_contiguous(aligned, tile_m, *shape, 1, traced().taken)
    if plan.cluster == 1:
        return _product(name, "contiguous", case, plan, shape, other)
    return _product(name, "contiguouspairs", case, dataclasses.replace(plan, shares_weights=one_group), shape, other)


def _product(name: str, schedule: str, case: Case, plan: TilePlan, shape: tuple[int, int], other: str | None) -> Kernel:
    tile = f"{plan.tile_m}x{plan.tile_n}"
    splits = f", K in {plan.splits}" if plan.splits > 1 else ""
    shared = "weights" if plan.shares_weights else "activations"
    cluster = f", {shared} by multicast" if plan.cluster > 1 else ""
    kind = "tall" if plan.is_tall else "wide" if plan.wide else "split" if plan.splits > 1 else "narrow"
    return Kernel(
        name=f"{name} x {shape[0]} x {shape[1]}: {kind} {tile}{splits}{cluster}",
        symbol=f"fp8_{schedule}_{kind}_{tile}",
        program=functools.partial(program_of, case),
        protocol=ring(plan, *shape),
        passes=PRODUCT_PASS,
        other=other,
    )


def ring(plan: TilePlan, n: int, k: int) -> Protocol:
    """Returns the protocol of a product's ring of stages; a pass is a step of 128 of K."""
    w, split = jax.ShapeDtypeStruct((1, n, k), E4M3), plan.splits > 1
    out = ((plan.splits, n, 8), jnp.float32) if split else ((1, 8, n), jnp.bfloat16)
    schedule = Dense(8, plan.tile_m, plan.splits)
    kernel = kernel_of_plan(plan, schedule, w, w, out, SplitKernel if split else NarrowKernel)
    x_bytes, w_bytes = plan.tile_m * (128 + 4), plan.tile_n * 128
    by_others = x_bytes * (1 - 1 / plan.cluster_n) + w_bytes * (1 - 1 / plan.cluster_m)
    halves = ("full", "second") if plan.is_tall else ("full",)
    # A tall kernel's second half of the activations comes by itself.
    later = (plan.tile_m // 2 * 128,) * (len(halves) - 1)
    sizes = (x_bytes + w_bytes - sum(later), *later)
    loads = (Load(full, "empty", size, by_others * size / sum(sizes)) for full, size in zip(halves, sizes, strict=True))
    consumer = Role(halves, ("empty",))
    return Protocol((consumer, consumer), tuple(loads), kernel.depth, {"empty": 2})
