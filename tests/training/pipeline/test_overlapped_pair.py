"""XLA's schedule of an overlapped forward/backward pair, compiled for eight H200s.

The stage is one MoE layer in the middle of a pipeline, at a width of 256, in bfloat16; eight devices split 16 experts.
Counted are matrix products, and loops over the tiles of experts.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from configs.tiny import MODEL, TRAINING
from pallas_kernels import aot
from sharding.collectives import Overlap, compiler_options, resolve_overlap
from sharding.mesh import shardings
from tools.plan import hlo
from tools.plan.hlo import LABELS, is_matrix_work
from training.pipeline.programs import MAX_IN_FLIGHT, trace, weight_shapes
from training.pipeline.ranks import SPLIT
from training.pipeline.schedules import RankSize
from training.pipeline.stages import Stage

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(resolve_overlap("cuda") is not Overlap.HOOKS, reason="jax 0.11 has no collectives in halves"),
]
DEVICES, ROWS, LENGTH = 8, 8, 128
STAGE = Stage(1, 2, 3, first=False, last=False)
CONFIG = dataclasses.replace(
    TRAINING,
    sequence_length=LENGTH,
    sequence_balance_weight=0.001,
    model=dataclasses.replace(
        MODEL,
        hidden_size=256,
        q_lora_rank=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        n_group=2,
        topk_group=1,
    ),
)
DIRECTIONS = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Beside:
    """A transfer, and how many pieces of matrix work of each direction and part of a layer are scheduled beside it."""

    kind: str
    direction: str
    work: Mapping[tuple[str, str], int]

    @property
    def directions(self) -> set[str]:
        """Directions whose matrix work stands beside it."""
        return {direction for direction, _ in self.work}


def compile_pair() -> hlo.Module:
    """Compiles the pair of a forward and a backward of the stage."""
    mesh = aot.gpu_mesh({"node": 1, "gpu": DEVICES, "tensor": 1, "context": 1})
    program = trace(CONFIG, STAGE, ROWS, RankSize(1, DEVICES))
    weights = weight_shapes(CONFIG, STAGE)
    x = jax.ShapeDtypeStruct((ROWS * LENGTH, CONFIG.model.hidden_size), jnp.bfloat16)
    dy, _, saved = jax.eval_shape(program.forward_program(), weights, x, ())
    total = jax.eval_shape(program.zeros_program(), weights)

    def put(tree: Any, where: Any) -> Any:
        return jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), tree, where)

    def rows(tree: Any) -> Any:
        return put(tree, jax.tree.map(lambda _: NamedSharding(mesh, SPLIT), tree))

    held = put(weights, shardings(program.weight_partitions, mesh))
    pair = jax.jit(program.pair_program(program, Overlap.HOOKS), donate_argnums=4)
    lowered = pair.lower(held, rows(x), (), held, rows(total), rows(saved), rows(dy))
    return hlo.parse(aot.compile_to_read(lowered, compiler_options("cuda", in_flight=MAX_IN_FLIGHT)).as_text())


def transfers(module: hlo.Module) -> list[Beside]:
    """Returns the transfers in the order in which they are done. Raises ValueError where one is not."""
    lines, started, found = module[module.entry].instructions, dict[str, int](), []
    for number, line in enumerate(lines):
        if line.opcode.endswith("-start"):
            started[line.name] = number
        elif line.opcode.endswith("-done"):
            first = started.pop(line.operands[0])
            work = [i for i in lines[first + 1 : number] if _multiplies(module, i)]
            counts = collections.Counter((_direction(i), _part(i)) for i in work)
            found.append(Beside(line.opcode.removesuffix("-done"), _direction(lines[first]), counts))
    if started:
        raise ValueError(f"never done: {', '.join(started)}")
    return found


def _multiplies(module: hlo.Module, instruction: hlo.Instruction) -> bool:
    inside = (i for name in instruction.called for i in module[name].instructions)
    is_loop = instruction.opcode == "while" and any(is_matrix_work(module, i) for i in inside)
    return is_loop or is_matrix_work(module, instruction)


def _direction(instruction: hlo.Instruction) -> str:
    return next(scope for scope in instruction.scopes if scope in DIRECTIONS)


def _part(instruction: hlo.Instruction) -> str:
    return next((word for word in reversed(re.findall(r"\w+", instruction.op_name)) if word in LABELS), "other")


def test_each_transfer_overlaps_matrix_work_of_the_other_direction() -> None:
    """A layer dispatches rows and their choice of experts, and combines sums; so does its backward with gradients."""
    combine_b, dispatch_f = ("all-to-all", "backward", {"forward"}), ("all-to-all", "forward", {"backward"})
    found = [(beside.kind, beside.direction, beside.directions) for beside in transfers(compile_pair())]
    found = [each for each in found if each[0] == "all-to-all"]  # XLA may start the maximum of rounds early, too
    assert found == [combine_b, *[dispatch_f] * 2, *[combine_b] * 2, dispatch_f]
