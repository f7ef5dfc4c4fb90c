"""Commands on the wire: nothing is lost, and only declared types are accepted."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsv3.config.engine import EngineConfig
from dsv3.engine.cluster import messages
from dsv3.engine.cluster.messages import Build, Digest, FollowerFailed, Hello, Step, Stop
from dsv3.engine.job import Command, StepCommand
from dsv3.engine.jobs import JOB_KINDS
from dsv3.engine.jobs.decode import DecodeCommand
from dsv3.engine.jobs.experts import ExpertsCommand
from dsv3.engine.jobs.prefill import PrefillCommand
from dsv3.engine.jobs.sample import Adjustment, RowMasks, SampleCommand

ARRAYS = hnp.arrays(
    st.sampled_from(["int32", "bool", "float32", "int64", "uint8"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0),
)
ADJUSTED = ("tokens", "bias_ids", "bias", "forbidden_ids")
COUNTS = st.integers(0, 2**31 - 1)
ADJUSTMENTS = st.builds(Adjustment, rank=COUNTS, slot=COUNTS, prompt_length=COUNTS, **dict.fromkeys(ADJUSTED, ARRAYS))
SAMPLES = st.builds(
    SampleCommand,
    st.integers(0, 2),
    st.booleans(),
    st.lists(ADJUSTMENTS, max_size=2),
    COUNTS,
    st.none() | st.builds(RowMasks, ARRAYS, ARRAYS),
)
BATCHES = st.tuples(COUNTS, ARRAYS, ARRAYS, ARRAYS, st.booleans(), st.booleans())
JOBS = st.one_of(
    st.builds(lambda batch, last: ("prefill", PrefillCommand(*batch, sample=last)), BATCHES, st.none() | SAMPLES),
    st.builds(
        lambda rows, width, sample: ("decode", DecodeCommand(rows, width, sample=sample)),
        ARRAYS, st.integers(1, 8), st.none() | SAMPLES,
    ),
    st.tuples(st.sampled_from(["prefill", "decode"]), SAMPLES),
    st.builds(
        lambda read, moves: ("experts", ExpertsCommand(read, moves)),
        st.booleans(), st.lists(st.tuples(*[ARRAYS] * 4), max_size=2),
    ),
)  # fmt: skip
COMMANDS = st.builds(StepCommand, st.integers(0, 2**40), st.lists(JOBS).map(tuple))


def equal(a: Any, b: Any) -> bool:
    """The same tree of records, with the same arrays."""
    if isinstance(a, StepCommand):
        return (a.number, len(a.jobs)) == (b.number, len(b.jobs)) and all(map(equal, a.jobs, b.jobs))
    if isinstance(a, Command):
        return type(a) is type(b) and all(equal(getattr(a, n), getattr(b, n)) for n in a.__struct_fields__)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def travelled(command: StepCommand) -> StepCommand:
    """A command encoded for a follower and decoded."""
    received = messages.decode_for_follower(messages.encode(messages.step_of(command)))
    assert isinstance(received, Step)
    return messages.command_of(received, JOB_KINDS)


@settings(max_examples=50, deadline=None)
@given(COMMANDS)
def test_commands_arrive_as_they_were_sent(command: StepCommand) -> None:
    assert equal(travelled(command), command)


def test_a_job_of_an_unknown_kind_is_refused() -> None:
    step = Step(1, [("dance", msgspec.Raw(b"\x80"))])
    with pytest.raises(msgspec.ValidationError, match="dance"):
        messages.command_of(step, JOB_KINDS)


def test_the_limits_and_small_messages_arrive() -> None:
    config = EngineConfig(max_model_len=100, num_pages=7, num_ranks=4, num_processes=2, identity="f")
    assert config.forward_programs  # buckets are kept once computed, and do not travel
    assert messages.decode_for_follower(messages.encode(Build(config))) == Build(config)
    for message in (Stop(None), Stop("because")):
        assert messages.decode_for_follower(messages.encode(message)) == message
    for message in (Hello({"a": "b"}, "host", 3), Digest(3, b"x" * 16), FollowerFailed("ValueError", "text")):
        assert messages.decode_for_leader(messages.encode(message)) == message


def test_messages_in_the_wrong_direction_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        messages.decode_for_leader(messages.encode(Stop(None)))
    with pytest.raises(msgspec.ValidationError):
        messages.decode_for_follower(messages.encode(Hello({}, "host", 3)))


@pytest.mark.parametrize(
    "array",
    [
        ["object", [1], bytes(8)],
        ["int32", [2], bytes(4)],
        ["int32", [-1], b""],
        ["int32", [2**62, 2**62], b""],
        ["int32", [True], bytes(4)] and ["int32", ["1"], bytes(4)],
        ["int32", [1] * 9, bytes(4)],
        ["int32", [1], "text"],
        ["int32", [1]],
        [3, [1], bytes(4)],
        "text",
        7,
        None,
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(array: Any) -> None:
    job = msgspec.msgpack.encode({"type": 0, "rows": array, "width": 1})
    with pytest.raises(msgspec.ValidationError):
        messages.command_of(Step(1, [("decode", msgspec.Raw(job))]), JOB_KINDS)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_garbage_is_an_error_and_nothing_else(body: bytes) -> None:
    for decode in (messages.decode_for_follower, messages.decode_for_leader):
        with pytest.raises(msgspec.MsgspecError):
            decode(body)


def test_unsupported_types_are_not_encoded() -> None:
    with pytest.raises(NotImplementedError, match="object"):
        messages.step_of(StepCommand(1, (("decode", DecodeCommand(object(), 1)),)))  # type: ignore[arg-type]
