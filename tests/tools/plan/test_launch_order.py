"""The order of collectives: changes of a program that could deadlock are found."""

import re

import pytest

from dsv3.engine.cluster.digest import collectives
from sharding.collectives import compiler_options, limits_of
from tools.plan import hlo
from tools.plan.launch_order import LaunchOrder, launch_order

TEXT = """HloModule jit_step, is_scheduled=true, num_partitions=4

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %all-to-all-start.1 = ((f32[8,4]{1,0}), f32[8,4]{1,0}) all-to-all-start(%x), replica_groups={{0,2},{1,3}}
  %all-to-all-start.2 = ((f32[8,4]{1,0}), f32[8,4]{1,0}) all-to-all-start(%x), replica_groups={{0,1},{2,3}}
  %all-to-all-done.2 = f32[8,4]{1,0} all-to-all-done(%all-to-all-start.2)
  %copy-start = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[]) copy-start(%all-to-all-done.2)
  %all-to-all-done.1 = f32[8,4]{1,0} all-to-all-done(%all-to-all-start.1)
  %copy-done = f32[8,4]{1,0} copy-done(%copy-start)
  ROOT %out = (s32[], f32[8,4]{1,0}) tuple(%i, %copy-done)
}

%cond (p.2: (s32[], f32[8,4])) -> pred[] {
  ROOT %p.2 = (s32[], f32[8,4]{1,0}) parameter(0)
}

%gathered (q: f32[8,4]) -> f32[32,4] {
  %q = f32[8,4]{1,0} parameter(0)
  ROOT %all-gather.1 = f32[32,4]{1,0} all-gather(%q), replica_groups=[1,4]<=[4], dimensions={0}
}

ENTRY %main (a: (s32[], f32[8,4])) -> f32[32,4] {
  %a = (s32[], f32[8,4]{1,0}) parameter(0)
  %loop = (s32[], f32[8,4]{1,0}) while(%a), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %r = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  %shift = f32[8,4]{1,0} collective-permute(%r), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %gather = ((f32[8,4]{1,0}), f32[32,4]{1,0}) async-start(%shift), calls=%gathered
  ROOT %done = f32[32,4]{1,0} async-done(%gather)
}
"""
START = re.compile(r"^ .*all-to-all-start\(.*\n", re.MULTILINE)
DONE = re.compile(r"^ .*all-to-all-done\(.*\n", re.MULTILINE)


def without_a_start(text: str) -> str:
    return START.sub("", text, count=1)


def without_a_done(text: str) -> str:
    return DONE.sub("", text, count=1)


def with_a_done_first(text: str) -> str:
    start, done = START.search(text), DONE.search(text)
    assert start and done
    return text.replace(done[0], "", 1).replace(start[0], done[0] + start[0], 1)


def with_a_done_twice(text: str) -> str:
    return DONE.sub(lambda found: found[0] + found[0].replace("done", "again", 1), text, count=1)


def with_starts_exchanged(text: str) -> str:
    """Exchanges the first two starts."""
    first, second = (found[0] for found in list(START.finditer(text))[:2])
    return text.replace(first, "FIRST", 1).replace(second, first, 1).replace("FIRST", second, 1)


def under_a_condition(text: str) -> str:
    return text.replace(" while(", " conditional(")


def in_a_loop_of_unknown_passes(text: str) -> str:
    return text.replace("known_trip_count", "")


def with_a_device_in_two_groups(text: str) -> str:
    return re.sub(r"(replica_groups=\{\{0,[\d,]*\},\{)\d+", r"\g<1>0", text, count=1)


def without_a_group(text: str) -> str:
    return re.sub(r"(replica_groups=\{\{0,[\d,]*\}),\{[\d,]*\}", r"\1", text, count=1)


BREAKING = [
    (without_a_start, "all-to-all-done.* waits for no collective in flight"),
    (without_a_done, "all-to-all-start.* has no done in"),
    (with_a_done_first, "all-to-all-done.* reads all-to-all-start.*, which comes later"),
    (with_a_done_twice, "all-to-all-again.* waits for no collective"),
    (under_a_condition, "all-to-all-start.* runs under the condition"),
    (in_a_loop_of_unknown_passes, "all-to-all-start.* runs in the loop .*, whose trip count depends on data"),
    (with_a_device_in_two_groups, "all-to-all-start.*: device 0 is in several of its groups"),
    (without_a_group, "all-to-all-start.*: device 1 is in none of its groups"),
]
"""Changes of the text of any program with asynchronous transfers and loops, and the fault of each."""


def read(text: str, *limits: int) -> LaunchOrder:
    return launch_order(hlo.parse(text), *limits)


def check_that_faults_are_found(text: str) -> None:
    """Checks that every change of `BREAKING` is a fault, and that exchanged starts give another order."""
    for change, fault in BREAKING:
        assert any(re.match(fault, found) for found in read(change(text), 4).faults), change.__name__
    one, other = read(text, 4), read(with_starts_exchanged(text), 4)
    assert one.faults == () and one.launches != other.launches
    check_that_processes_compare(text, one)


def check_that_processes_compare(text: str, order: LaunchOrder) -> None:
    """Checks that `collectives` of the runtime finds the same order, and that exchanged starts change it."""
    found = collectives(text)
    assert [one.split()[0].removesuffix("-start") for one in found] == [launch.kind for launch in order.launches]
    assert all(launch.op_name in one for one, launch in zip(found, order.launches, strict=True))
    assert sorted(collectives(with_starts_exchanged(text))) == sorted(found) != found


def test_all_devices_launch_these_collectives_in_one_order() -> None:
    """Two collectives are in flight in two communicators."""
    order = read(TEXT, 2, 12, 24)
    assert order.faults == ()
    check_that_processes_compare(TEXT, order)
    assert [(launch.kind, launch.trips) for launch in order.launches] == [
        ("all-to-all", (3,)),
        ("all-to-all", (3,)),
        ("collective-permute", ()),
        ("all-gather", ()),
    ]
    assert (order.in_flight, order.communicators, order.channels) == (2, 2, 24)


@pytest.mark.parametrize(("change", "fault"), BREAKING)
def test_possible_deadlocks_are_found(change, fault: str) -> None:
    changed = change(TEXT)
    assert changed != TEXT
    assert any(re.match(fault, found) for found in read(changed, 2).faults)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("{1,2},", "{1,1},", "shift: device 1 receives twice"),
        ("{1,2},", "{0,2},", "shift: device 0 sends twice"),
        ("collective-permute(%r)", "send(%r)", "shift: send is not supported"),
        (
            "  ROOT %p.2",
            "  %all-reduce = f32[] all-reduce(%p.2), replica_groups={}\n  ROOT %p.2",
            "all-reduce in cond: it is unknown",
        ),
        (
            "  ROOT %all-gather.1",
            "  %also = f32[] all-reduce(%q), replica_groups={}\n  ROOT %all-gather.1",
            "gather launches several",
        ),
    ],
)
def test_other_faults_are_found(old: str, new: str, fault: str) -> None:
    assert TEXT.count(old) == 1
    assert any(found.startswith(fault) for found in read(TEXT.replace(old, new), 2).faults)


def test_exchanged_starts_give_another_order() -> None:
    """Each text is valid alone; processes with different ones would deadlock."""
    one, other = read(TEXT, 2), read(with_starts_exchanged(TEXT), 2)
    assert one.faults == other.faults == ()
    assert one.launches != other.launches and sorted(one.launches, key=str) == sorted(other.launches, key=str)


def test_too_many_collectives_in_flight_are_found() -> None:
    assert read(TEXT, 2, 24, 0).faults == (), "where kernels leave nothing, nothing fits beside them"
    [fault] = read(TEXT, 2, 24, 24).faults
    assert fault.startswith("2 communicators in flight at once take 24 channels each, more than the 24 multiprocessors")
    one = limits_of(compiler_options("cuda", 24, overlaps=False))
    assert read(TEXT, *one).faults == ("2 collectives are in flight at once, more than 1",)
    same = TEXT.replace("{{0,1},{2,3}}", "{{0,2},{1,3}}")
    assert (read(same).in_flight, read(same, 2, 24, 24).faults) == (2, ()), "in one communicator they take turns"
