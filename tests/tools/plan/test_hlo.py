"""Reading compiled programs: instructions, loops, and the bytes of their collectives."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import aot
from tools.plan import hlo
from tools.plan.hlo import collectives
from tools.plan.launch_order import launch_order

TEXT = """HloModule jit_step, is_scheduled=true, num_partitions=16

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %start = ((f32[8,4]{1,0}), f32[8,4]{1,0}) all-to-all-start(%x), MESH, metadata={op_name="micro_batch_1/dispatch/a"}
  %product = bf16[8,4]{1,0} custom-call(%x), KERNEL, metadata={op_name="f/experts/g"}, backend_config={"((": "f(%x)"}
  %done = f32[8,4]{1,0} all-to-all-done(%start)
  ROOT %out = (s32[], f32[8,4]{1,0}) tuple(%i, %done)
}

%rounds (p.1: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  %y = f32[8,4]{1,0} get-tuple-element(%p.1), index=1
  ROOT %sum = f32[8,4]{1,0} all-reduce(%y), replica_groups={}, to_apply=%add
}

%cond (p.2: (s32[], f32[8,4])) -> pred[] {
  ROOT %p.2 = (s32[], f32[8,4]{1,0}) parameter(0)
}

ENTRY %main (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %loop = (s32[], f32[8,4]{1,0}) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"58"}}
  %open = (s32[], f32[8,4]{1,0}) while(%t2), condition=%cond, body=%rounds
  ROOT %r = f32[8,4]{1,0} get-tuple-element(%open), index=1
}
"""
TEXT = TEXT.replace("MESH", "replica_groups=mesh['node'=2,'gpu'=8] {'gpu'}")
TEXT = TEXT.replace("KERNEL", 'custom_call_target="mosaic_gpu_v2"')


def test_a_start_is_paired_with_its_done_and_the_work_between() -> None:
    first, second = collectives(hlo.parse(TEXT), devices_per_node=8)
    assert (first.kind, first.role, first.micro_batch, first.times) == ("all-to-all", "dispatch", 1, 58)
    assert (first.node_bytes, first.cross_bytes) == (128 * 7 // 8, 0)
    assert first.between == ("experts",)
    assert first.step_bytes == 58 * 112
    assert (second.kind, second.step_bytes) == ("all-reduce", 2 * 128 * 15 // 16)


def test_kernels_are_counted_in_all_iterations() -> None:
    """A product and a transfer in each of 58, by stage; what is done starts nothing."""
    assert hlo.kernels(hlo.parse(TEXT)) == {"dispatch": 58, "experts": 58, "other": 1}


def test_the_host_waits_at_loops_of_unknown_trip_count() -> None:
    assert hlo.parse(TEXT).host_waits == ("open",)
    assert hlo.parse(TEXT.replace("while(%t2)", "conditional(%t2)")).host_waits == ("open",)
    counted = TEXT.replace("body=%rounds", 'body=%rounds, backend_config={"known_trip_count":{"n":"3"}}')
    assert hlo.parse(counted).host_waits == ()


def test_an_all_to_all_without_work_is_exposed() -> None:
    lines = [line for line in TEXT.splitlines() if "mosaic" not in line]
    exposed = collectives(hlo.parse("\n".join(lines)), devices_per_node=8)[0]
    assert not exposed.is_hidden


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("replica_groups=mesh['node'=2,'gpu'=4,'tensor'=2] {'node'}", tuple((n, n + 8) for n in range(8))),
        ("replica_groups=mesh['node'=2,'gpu'=4,'tensor'=2] {'gpu','tensor'}", (tuple(range(8)), tuple(range(8, 16)))),
        ("replica_groups=mesh['node'=1,'gpu'=2,'tensor'=2] {'gpu'}", ((0, 2), (1, 3))),
        ("replica_groups={{0,3},{1,2}}, dimensions={0}", ((0, 3), (1, 2))),
        ("replica_groups=[2,8]<=[16]", (tuple(range(8)), tuple(range(8, 16)))),
        ("replica_groups=[8,2]<=[2,8]T(1,0)", tuple((n, n + 8) for n in range(8))),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("replica_groups={}", (tuple(range(16)),)),
    ],
)
def test_forms_of_replica_groups(groups, expected) -> None:
    instruction = hlo.Instruction("c", "f32[8]", "all-reduce", (), groups, "")
    assert hlo.replica_groups(instruction, 16) == expected


def test_an_unknown_form_is_an_error() -> None:
    with pytest.raises(hlo.HloError, match="replica groups"):
        hlo.replica_groups(hlo.Instruction("c", "f32[8]", "all-reduce", (), "replica_groups=else", ""), 16)
    with pytest.raises(hlo.HloError, match="not a scheduled"):
        hlo.parse("HloModule x, entry_computation_layout={}\n")
    with pytest.raises(hlo.HloError, match="replica_count=2"):
        hlo.parse(TEXT.replace("num_partitions", "replica_count=2, num_partitions"))
    with pytest.raises(hlo.HloError, match="has no all-to-all-done"):
        collectives(hlo.parse(TEXT.replace("all-to-all-done", "all-gather-done")), 8)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("bf16[720,7168]{1,0}", 720 * 7168 * 2),
        ("f8e4m3fn[3,4]", 12),
        ("pred[7]", 7),
        ("s4[3]", 2),
        ("s32[]", 4),
        ("((s32[8,4]{1,0}), /*index=1*/f32[2]{0})", 136),
        ("(token[], f32[1])", 4),
    ],
)
def test_bytes_of_shapes(shape, expected) -> None:
    assert hlo.shape_bytes(shape) == expected


@pytest.fixture(scope="module")
def compiled() -> hlo.Module:
    """A loop of three iterations on 2 nodes of 4 GPUs: an all-to-all over nodes, then a sum and a gather."""
    mesh = aot.gpu_mesh({"node": 2, "gpu": 4}, per_host=4)

    def body(x):
        def one(x, _):
            with jax.named_scope("combine"):
                x = lax.all_to_all(x, "node", 0, 0, tiled=True)
            return x * 2, None

        x, _ = lax.scan(one, x, None, length=3)
        return lax.psum(x, ("node", "gpu")), lax.all_gather(x, "gpu", axis=0, tiled=True)

    spec = PartitionSpec(("node", "gpu"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=(PartitionSpec(), spec), check_vma=False)
    x = jax.ShapeDtypeStruct((8 * 64, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    return hlo.parse(aot.compile_for(jax.jit(mapped), x, mesh=mesh).as_text())


@pytest.mark.aot
def test_collectives_of_a_compiled_program(compiled) -> None:
    local = 64 * 1024 * 2
    found = collectives(compiled, devices_per_node=4)
    sent = {(c.kind, c.role): (c.group_size, c.node_bytes * c.times, c.cross_bytes * c.times) for c in found}
    assert sent["all-to-all", "combine"] == (2, 0, 3 * local // 2)
    assert sent["all-gather", "other"] == (4, 3 * local, 0)
    size, inside, between = sent["all-reduce", "other"]
    assert (size, inside + between) == (8, 2 * local * 7 // 8)
    assert between == round((inside + between) * 4 / 7)


@pytest.mark.aot
def test_one_collective_is_in_flight_by_default(compiled) -> None:
    """Three groups of devices, so three communicators, one after the other."""
    order = launch_order(compiled)
    assert (order.in_flight, order.communicators, order.faults) == (1, 1, ())
    assert {(launch.kind, launch.trips, len(launch.groups)) for launch in order.launches} == {
        ("all-to-all", (3,), 4),
        ("all-gather", (), 2),
        ("all-reduce", (), 1),
    }
