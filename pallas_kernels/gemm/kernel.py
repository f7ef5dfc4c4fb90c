"""The base of the kernels: a ring of shared-memory stages, its producer, and the sums over K.

A block has two consumer warpgroups and one producer that keeps the ring full by TMA. FP8 partial sums of 128 of K are
scaled and added in float32 registers, because the tensor core's accumulator keeps only some 14 bits (section 3.3.2 of
the DeepSeek-V3 report). Meanwhile the other warpgroup multiplies. Operands without scales accumulate over all of K in
the tensor core.
"""

import abc
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import bodies
from pallas_kernels.float8 import BLOCK, E4M3
from pallas_kernels.gemm.schedule import Tile, TileSchedule
from pallas_kernels.mosaic import SMEM_BYTES, plgpu, swizzle_transforms, whole_tile

WG_ROWS = 64
"""Rows of a warpgroup's matrix product."""
TMA_ALIGNMENT = 128
"""Shared-memory addresses of TMA copies are multiples of this; neither Mosaic nor its interpreter checks this."""
_STAGE_BYTES_K = 128
"""Bytes of K in a stage: the widest swizzle, and one scale block of FP8."""
_MAX_STAGES = 12
MISC_BYTES = 4096
"""Shared memory reserved for barriers and alignment."""
_SHORT_NAMES = {E4M3: "fp8", jnp.dtype(jnp.bfloat16): "bf16", jnp.dtype(jnp.float16): "f16"}


@dataclasses.dataclass(frozen=True)
class Refs:
    """A kernel's operands in global memory and its buffers in shared memory."""

    x: Any
    w: Any
    out: Any
    schedule: tuple
    x_s: Any
    w_s: Any
    o_s: Any
    full: Any
    empty: Any
    second: Any = None
    x_scale: Any = None
    w_scale: Any = None
    w_powers: Any = None
    x_scale_s: Any = None
    w_scale_s: Any = None
    w_powers_s: Any = None


@dataclasses.dataclass(frozen=True)
class GemmKernel(abc.ABC):
    """x [Gx, M, K] times w [Gw, N, K]; the schedule pairs their groups.

    Attributes:
      tile_m: rows of x in a tile.
      tile_n: rows of w in a tile.
      stages: depth of the ring; None fills the shared memory.
      cluster: blocks of a cluster, 1 or 2. Two neighbors along N then fetch the activations once, by multicast.
      shares_weights: two neighbors along M instead, which fetch the weights once; a tile of the schedule then covers
        both.
      schedule: the order of the tiles.
      dtype: of the operands: e4m3 with scales, bfloat16 or float16 without.
      out_type: shape and dtype of the result.
      shape_n, shape_k: N and K.
    """

    tile_m: int
    tile_n: int
    stages: int | None
    cluster: int
    schedule: TileSchedule
    dtype: jnp.dtype
    out_type: jax.ShapeDtypeStruct
    shape_n: int
    shape_k: int
    shares_weights: bool = False

    def __post_init__(self):
        if self.scaled and self.tile_n > BLOCK + self.piece:
            raise ValueError(f"tile_n {self.tile_n} would meet three weight scales; at most 128 + gcd(tile_n, 128)")
        if not 2 <= self.depth <= self.max_depth():
            raise ValueError(f"{self.depth} stages for {self}; shared memory takes 2 to {self.max_depth()}")

    @property
    def name(self) -> str:
        kind, schedule = type(self).__name__.removesuffix("Kernel"), type(self.schedule).__name__
        return f"{_SHORT_NAMES[self.dtype]}_{schedule}_{kind}_{self.tile_m}x{self.tile_n}".lower()

    @property
    def scaled(self) -> bool:
        return self.dtype.itemsize == 1

    @property
    def scale_names(self) -> tuple[str, ...]:
        """The operands beside x and w, as fields of `Refs`."""
        return ("x_scale", "w_scale") if self.scaled else ()

    @property
    def tile_k(self) -> int:
        """K of a stage: the widest swizzle, or a narrower one whose tiles divide K."""
        return whole_tile(_STAGE_BYTES_K // self.dtype.itemsize, self.shape_k, self.dtype)

    @property
    def weight_dtype(self) -> jnp.dtype:
        return self.dtype

    @property
    def weight_k(self) -> int:
        """Elements of the weight that hold `tile_k` of K."""
        return self.tile_k

    @property
    def k_steps(self) -> int:
        return pl.cdiv(self.shape_k, self.tile_k)

    @property
    def columns(self) -> int:
        """Tiles along N of a whole cluster."""
        return pl.cdiv(self.shape_n, self.tile_n * (1 if self.shares_weights else self.cluster))

    @property
    def piece(self) -> int:
        """Columns that share a weight scale at any start of a tile."""
        return math.gcd(self.tile_n, BLOCK) if self.scaled else self.tile_n

    @property
    def depth(self) -> int:
        return min(_MAX_STAGES, self.max_depth()) if self.stages is None else self.stages

    def max_depth(self) -> int:
        out_bytes = self.tile_m * self.tile_n * jnp.dtype(self.out_type.dtype).itemsize
        stage_bytes = (self.tile_m + self.tile_n) * _STAGE_BYTES_K + max(TMA_ALIGNMENT, self.tile_m * 4)
        return (SMEM_BYTES - MISC_BYTES - out_bytes) // stage_bytes

    def __call__(self, x, w, scales: tuple, schedule_operands: tuple, num_sms: int) -> jax.Array:
        return _traced_once(self, num_sms, x, w, *scales, *schedule_operands)

    def trace(self, num_sms: int, *operands: jax.Array) -> jax.Array:
        """Traces the kernel on x, w, their scales and the schedule's operands."""

        def body(*args, **scratch) -> None:
            self.body(*args, **scratch)

        body.__name__ = self.name  # the name in profiles and ptxas reports
        return plgpu.kernel(
            bodies.traced(body),
            out_type=self.out_type,
            grid=(max(1, min(num_sms // self.cluster, self.schedule.most_tiles(self.columns))),),
            grid_names=("sm",),
            cluster=(self.cluster,),
            cluster_names=("cluster",),
            num_threads=3,
            thread_name="wg",
            scratch_types=self.scratch(),
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        )(*operands)

    def scratch(self) -> dict:
        swizzled = swizzle_transforms(self.dtype, self.tile_k)
        w_swizzled = swizzle_transforms(self.weight_dtype, self.weight_tile[1])
        barriers: dict[str, Any] = {"num_arrivals": 2, "num_barriers": self.depth}
        scratch = {
            "x_s": plgpu.SMEM((self.depth, self.tile_m, self.tile_k), self.dtype, transforms=swizzled),
            "w_s": plgpu.SMEM((self.depth, *self.weight_tile), self.weight_dtype, transforms=w_swizzled),
            "o_s": self.out_buffer(),
            "full": plgpu.Barrier(num_arrivals=3 if self.scale_names else 2, num_barriers=self.depth),
            "empty": plgpu.ClusterBarrier(collective_axes=("cluster",), **barriers)
            if self.cluster > 1
            else plgpu.Barrier(**barriers),
        }
        if self.scaled:
            # TMA writes to multiples of 128 bytes; 8 or 16 scales per stage would not be aligned.
            scratch["x_scale_s"] = plgpu.SMEM((self.depth, max(TMA_ALIGNMENT // 4, self.tile_m)), jnp.float32)
        return scratch

    def body(self, x, w, *rest, **scratch) -> None:
        count = len(self.scale_names)
        scales = dict(zip(self.scale_names, rest[:count], strict=True))
        *schedule_refs, out = rest[count:]
        refs = Refs(x, w, out, tuple(schedule_refs), **scales, **scratch)
        warpgroup = lax.axis_index("wg")

        @pl.when(warpgroup == 2)
        def _producer():
            plgpu.set_max_registers(40, action="decrease")
            self.produce(refs)

        @pl.when(warpgroup < 2)
        def _consumer():
            plgpu.set_max_registers(232, action="increase")
            self.consume(refs, warpgroup)

    def column(self, tile: Tile) -> jax.Array:
        """Returns the first row of w of a block's tile."""
        return tile.column * self.tile_n

    def own_tile(self, tile: Tile) -> Tile:
        """Returns this block's part of a cluster's tile, unless the schedule has assigned it."""
        if self.cluster == 1 or tile.shares_weights is not None:
            return tile
        block = lax.axis_index("cluster")
        if self.shares_weights:
            return tile._replace(row=tile.row + block * self.tile_m, shares_weights=True)
        return tile._replace(column=tile.column * self.cluster + block, shares_weights=False)

    @property
    def weight_tile(self) -> tuple[int, int]:
        """Shape of the weight's part of a stage."""
        return self.tile_n, self.weight_k

    def x_block(self, refs: Refs, tile: Tile, k):
        """Returns the activations of a stage in global memory."""
        return refs.x.at[tile.x_group, pl.ds(tile.row, self.tile_m), k]

    def w_block(self, refs: Refs, tile: Tile, k):
        """Returns the weights of a stage in global memory."""
        return refs.w.at[tile.w_group, pl.ds(self.column(tile), self.tile_n), k]

    def scale_block(self, step):
        """Returns the block of 128 of K of a step's scales, if the kernel is `scaled`."""
        steps = BLOCK // self.tile_k
        return step if steps == 1 else lax.div(step, jnp.int32(steps))

    def scale_blocks(self, refs: Refs, tile: Tile, step, stage) -> tuple:
        """Returns the scales of a stage in global memory, and their targets."""
        scale = refs.x_scale.at[tile.x_group, self.scale_block(step), pl.ds(tile.row, self.tile_m)]
        return scale, refs.x_scale_s.at[stage, pl.ds(0, self.tile_m)]

    def walk(self, refs: Refs, body) -> jax.Array:
        def of_block(tile: Tile, carry):
            return body(self.own_tile(tile), carry)

        return self.schedule.walk(refs.schedule, self.columns, self.k_steps, of_block)

    def stage(self, step: jax.Array) -> jax.Array:
        """Returns the stage of a step, counted over all of the block's tiles.

        A traced stage also saves registers: with static ones LLVM hoists some 70 descriptors out of the loop.
        """
        return lax.rem(step, jnp.int32(self.depth))

    def next_stage(self, stage: jax.Array) -> jax.Array:
        """Returns the stage after `stage`: a remainder by 5 or 6 takes 22 instructions in front of each product."""
        return jnp.where(stage == self.depth - 1, 0, stage + 1)

    def produce(self, refs: Refs) -> None:
        def load(tile: Tile, done):
            def step(i, _):
                stage = self.stage(done + i)

                @pl.when(done + i >= self.depth)
                def _wait_until_free():
                    plgpu.barrier_wait(refs.empty.at[stage])

                if not isinstance(tile.shares_weights, jax.Array):
                    self.load_stage(refs, tile, i, stage, shares_weights=bool(tile.shares_weights))
                    return
                for shares_weights in (True, False):
                    load_stage = functools.partial(self.load_stage, refs, tile, i, stage, shares_weights=shares_weights)
                    pl.when(tile.shares_weights == shares_weights)(load_stage)

            lax.fori_loop(0, tile.k_steps, step, None)
            return done + tile.k_steps

        def drain(stage, _):  # no arrival may be pending when a barrier ends
            plgpu.barrier_wait(refs.empty.at[stage])

        total = self.walk(refs, load)
        lax.fori_loop(0, jnp.minimum(total, self.depth), drain, None)

    def load_stage(self, refs: Refs, tile: Tile, i, stage, *, shares_weights: bool) -> None:
        """Starts the copies of a tile's step `i`, of one operand to all blocks of the cluster."""
        shared = "cluster" if self.cluster > 1 else None
        shared_x, shared_w = (None, shared) if shares_weights else (shared, None)
        k, full = pl.ds((tile.k_begin + i) * self.tile_k, self.tile_k), refs.full.at[stage]
        w_k = pl.ds((tile.k_begin + i) * self.weight_k, self.weight_k)
        plgpu.copy_gmem_to_smem(self.w_block(refs, tile, w_k), refs.w_s.at[stage], full, collective_axes=shared_w)
        self.load_x(refs, tile, k, stage, shared_x)
        if self.scale_names:
            scale, to = self.scale_blocks(refs, tile, tile.k_begin + i, stage)
            plgpu.copy_gmem_to_smem(scale, to, full, collective_axes=shared_x)

    def load_x(self, refs: Refs, tile: Tile, k, stage, shared: str | None) -> None:
        """Starts the copy of the activations of a stage."""
        x_block = self.x_block(refs, tile, k)
        plgpu.copy_gmem_to_smem(x_block, refs.x_s.at[stage], refs.full.at[stage], collective_axes=shared)

    def consume(self, refs: Refs, warpgroup) -> None:
        def compute(tile: Tile, done):
            sums = self.multiply(refs, warpgroup, tile, done)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.store(refs, warpgroup, tile, sums)
            return done + tile.k_steps

        self.walk(refs, compute)
        plgpu.wait_smem_to_gmem(0)

    def multiply(self, refs: Refs, warpgroup, tile: Tile, done) -> list[jax.Array]:
        """Sums over K; `done` counts the steps of the tiles before."""
        product = self.multiply_scaled if self.scaled else self.multiply_plain
        return product(refs, warpgroup, tile, done)

    def multiply_scaled(self, refs: Refs, warpgroup, tile: Tile, done) -> list[jax.Array]:
        """Sums over K the scaled partial products, in pieces along N that share a weight scale."""
        rows, columns = self.product_shape
        pieces = self.tile_n // self.piece
        column, last_block = self.column(tile), refs.w_scale.shape[1] - 1
        first = lax.div(column, jnp.int32(BLOCK))
        blocks = [jnp.minimum(first + i, last_block) for i in range(min(2, pieces))]
        in_first = [lax.div(column + j * self.piece, jnp.int32(BLOCK)) == first for j in range(pieces)]

        def scales_of(i):
            k = self.scale_block(jnp.minimum(tile.k_begin + i, self.k_steps - 1))
            return tuple(refs.w_scale[tile.w_group, block, k] for block in blocks)

        def step(i, carry):
            sums, w_scales, stage = carry
            plgpu.barrier_wait(refs.full.at[stage])
            x_scale, axis = self.load_x_scale(refs, stage, warpgroup)

            def multiply(acc):
                plgpu.wgmma(acc, *self.operands(refs, stage, warpgroup))
                # After starting the product: before it, the step would wait for this read, and for the fence that
                # orders the next copy after the reads of x_scale.
                following = scales_of(i + 1)
                plgpu.commit_smem()
                return acc[...], following

            product, following = pl.run_scoped(multiply, plgpu.ACC((rows, columns), jnp.float32))
            plgpu.barrier_arrive(refs.empty.at[stage])
            updated = []
            for j, total in enumerate(sums):
                w_scale = w_scales[0] if pieces == 1 else jnp.where(in_first[j], w_scales[0], w_scales[1])
                part = product if pieces == 1 else product[:, j * self.piece : (j + 1) * self.piece]
                scale = lax.broadcast_in_dim(jnp.multiply(x_scale, w_scale), part.shape, [axis])
                updated.append(total + part * scale)
            return updated, following, self.next_stage(stage)

        zero = jnp.zeros((rows, columns // pieces), jnp.float32)
        zeros = [plgpu.layout_cast(zero, plgpu.Layout.WGMMA) for _ in range(pieces)]
        return lax.fori_loop(0, tile.k_steps, step, (zeros, scales_of(0), self.stage(done)))[0]

    def multiply_plain(self, refs: Refs, warpgroup, tile: Tile, done) -> list[jax.Array]:
        """Sums over K in the tensor core's accumulator; a stage is released one product late."""

        def accumulate(acc):
            def step(i, carry):
                before, stage = carry
                plgpu.barrier_wait(refs.full.at[stage])
                plgpu.wgmma(acc, *self.operands(refs, stage, warpgroup))
                plgpu.wgmma_wait(1)

                @pl.when(i > 0)
                def _release():
                    plgpu.barrier_arrive(refs.empty.at[before])

                return stage, self.next_stage(stage)

            last, _ = lax.fori_loop(0, tile.k_steps, step, (jnp.int32(0), self.stage(done)))
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(refs.empty.at[last])
            return acc[...]

        return [pl.run_scoped(accumulate, plgpu.ACC(self.product_shape, jnp.float32))]

    @property
    @abc.abstractmethod
    def product_shape(self) -> tuple[int, int]:
        """Shape of one warpgroup's sums."""

    @abc.abstractmethod
    def operands(self, refs: Refs, stage, warpgroup) -> tuple:
        """Returns the left and right operand of a warpgroup's product in a stage."""

    @abc.abstractmethod
    def load_x_scale(self, refs: Refs, stage, warpgroup) -> tuple[jax.Array, int]:
        """Returns the activations' scales in registers, and their axis in the product."""

    @abc.abstractmethod
    def out_buffer(self):
        """Returns the shared memory that stages the sums for the store."""

    def out_transforms(self, columns: int) -> tuple:
        """Returns tiling and swizzle of `columns` of the sums whose tiles divide the result, as TMA requires."""
        dtype = jnp.dtype(self.out_type.dtype)
        return swizzle_transforms(dtype, whole_tile(columns, self.out_type.shape[-1], dtype))

    @abc.abstractmethod
    def store(self, refs: Refs, warpgroup, tile: Tile, sums: list[jax.Array]) -> None:
        """Writes the sums of a tile to global memory."""


@functools.partial(jax.jit, static_argnums=(0, 1))
def _traced_once(kernel: GemmKernel, num_sms: int, *operands: jax.Array) -> jax.Array:
    """Shares a trace and a lowering of 0.2 s between equal products of a program: 50 of 130 in an overlapped step."""
    return kernel.trace(num_sms, *operands)
