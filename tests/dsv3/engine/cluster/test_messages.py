"""Commands as they travel: nothing is lost, and nothing but what is declared is taken."""

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsv3.engine.cluster import messages
from dsv3.engine.cluster.messages import Build, Digest, Failed, Hello, Step, Stop
from dsv3.engine.commands import BalanceCommand, DecodeCommand, MoveCommand, PrefillCommand, StepCommand
from dsv3.engine.config import EngineConfig
from dsv3.engine.state import AdjustRequest

ARRAYS = hnp.arrays(
    st.sampled_from(["int32", "bool", "float32", "int64", "uint8"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0),
)
ADJUSTMENTS = st.builds(AdjustRequest, *[ARRAYS] * len(dataclasses.fields(AdjustRequest)))
COMMANDS = st.builds(
    StepCommand,
    st.integers(0, 2**40),
    st.none() | st.builds(PrefillCommand, ARRAYS, ARRAYS, st.none() | st.integers(0, 2), st.booleans(), st.just([])),
    st.none() | st.builds(DecodeCommand, ARRAYS, st.integers(0, 2), st.booleans()),
    st.none() | st.builds(BalanceCommand, st.booleans(), st.lists(st.builds(MoveCommand, *[ARRAYS] * 4), max_size=2)),
)


def equal(a: Any, b: Any) -> bool:
    """The same tree of dataclasses, with the same arrays."""
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@settings(max_examples=50, deadline=None)
@given(COMMANDS, st.lists(ADJUSTMENTS, max_size=2))
def test_commands_arrive_as_they_were_sent(command: StepCommand, adjustments: list[AdjustRequest]) -> None:
    if command.prefill is not None:
        command = dataclasses.replace(command, prefill=dataclasses.replace(command.prefill, adjustments=adjustments))
    received = messages.decode_for_follower(messages.encode(Step(command)))
    assert isinstance(received, Step)
    assert equal(received.command, command)


def test_the_limits_and_small_messages_arrive() -> None:
    config = EngineConfig(max_model_len=100, num_pages=7, num_ranks=4, num_nodes=2, model_id="m")
    assert config.forward_programs  # buckets are kept once computed, and do not travel
    assert messages.decode_for_follower(messages.encode(Build(config))) == Build(config)
    for message in (Stop(None), Stop("because")):
        assert messages.decode_for_follower(messages.encode(message)) == message
    for message in (Hello({"a": "b"}, "host", 3), Digest(3, b"x" * 16), Failed("ValueError", "text")):
        assert messages.decode_for_leader(messages.encode(message)) == message


def test_messages_are_not_taken_in_the_wrong_direction() -> None:
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
    decode = {"batch": array, "variant": 0, "logprobs": False}
    command = {"number": 1, "prefill": None, "decode": decode, "balance": None}
    body = msgspec.msgpack.encode({"type": "Step", "command": command})
    with pytest.raises(msgspec.ValidationError):
        messages.decode_for_follower(body)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_garbage_is_an_error_and_nothing_else(body: bytes) -> None:
    for decode in (messages.decode_for_follower, messages.decode_for_leader):
        with pytest.raises(msgspec.MsgspecError):
            decode(body)


def test_what_is_no_part_of_a_command_is_not_encoded() -> None:
    with pytest.raises(NotImplementedError, match="object"):
        messages.encode(Step(StepCommand(1, None, DecodeCommand(object(), 0, False), None)))  # type: ignore[arg-type]
