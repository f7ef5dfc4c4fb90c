"""Command lines: spelling, mistakes and help."""

import subprocess
import sys
import textwrap

import pytest
from absl import flags as absl_flags

from launch import flags


@pytest.fixture
def values():
    values = absl_flags.FlagValues()
    absl_flags.DEFINE_string("api_key", None, "Key.", flag_values=values)
    absl_flags.DEFINE_integer("max_model_len", 4096, "Longest request.", flag_values=values)
    absl_flags.DEFINE_boolean("keep_alive", False, "Stay.", flag_values=values)
    absl_flags.DEFINE_enum("fp8", "keep", ["keep", "dequantize"], "What to do with FP8.", flag_values=values)
    return values


@pytest.mark.parametrize(
    "spelling", ["--max-model-len=7", "--max_model_len=7", "--max-model_len 7", "-max-model-len=7"]
)
def test_dashes_stand_for_underscores(values, spelling):
    assert flags.parse(["x", *spelling.split()], "", values) == []
    assert values.max_model_len == 7


def test_values_keep_their_dashes(values):
    flags.parse(["x", "--api-key", "--a-b-c", "--nokeep-alive"], "", values)
    assert values.api_key == "--a-b-c"
    assert values.keep_alive is False
    flags.parse(["x", "--api-key=a-b=c-d"], "", values)
    assert values.api_key == "a-b=c-d"


def test_flags_may_follow_positional_arguments(values):
    assert flags.parse(["x", "in-file", "--max-model-len", "3", "out-file"], "INPUT OUTPUT", values) == [
        "in-file",
        "out-file",
    ]
    assert values.max_model_len == 3


def test_negative_numbers_and_double_dash_are_left_alone(values):
    assert flags.parse(["x", "--max-model-len", "-5", "--", "--a-b"], "INPUT", values) == ["--a-b"]
    assert values.max_model_len == -5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-model-length=3"], "unknown flag --max_model_length; did you mean --max_model_len?"),
        (["--zzzz"], "unknown flag --zzzz; --help lists the flags"),
        (["--max-model-len=many"], "max_model_len"),
        (["--fp8=maybe"], "keep|dequantize"),
        (["stray"], "expected flags only, got 1 positional argument(s): stray"),
    ],
)
def test_mistakes_say_what_to_change(values, arguments, message):
    with pytest.raises(flags.UsageError) as error:
        flags.parse(["x", *arguments], "", values)
    assert message in str(error.value)


def test_help_says_choices_once(values):
    text = flags.help_text("x", "IN", "Doc.", [values["fp8"]])
    assert text.splitlines()[-2:] == ["  --fp8=keep|dequantize", "        What to do with FP8. (default keep)"]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [(["--help"], True), (["-h"], True), (["--api-key", "--help"], False), (["--", "--help"], False), ([], False)],
)
def test_help_is_asked_for_only_in_the_place_of_a_flag(values, arguments, wanted):
    assert flags.wants_help(arguments, values) is wanted


PROGRAM = '''
    """Greets."""
    from absl import flags as f
    from launch import flags
    NAME = f.DEFINE_string("user_name", "you", "Whom to greet.")
    LOUD = f.DEFINE_boolean("loud", False, "Shout.")
    def main(place):
        print(NAME.value, place)
        return 3
    if __name__ == "__main__":
        flags.run(main, "PLACE")
'''


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "greet.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return lambda *a: subprocess.run(
        [sys.executable, path, *a], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )


def test_run_from_a_shell(program):
    done = program("here", "--user-name=me")
    assert (done.returncode, done.stdout) == (3, "me here\n")
    done = program("--help")
    assert done.returncode == 0
    assert (
        "Greets." in done.stdout
        and "--user_name=STRING" in done.stdout
        and "Whom to greet. (default you)" in done.stdout
    )
    assert "--[no]loud" in done.stdout and "logtostderr" not in done.stdout
    done = program("here", "--user-nam=me")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean --user_name?" in done.stderr and "Traceback" not in done.stderr
