"""Command lines: spelling, mistakes, help, files of flags, and the console command."""

import importlib
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from absl import flags as absl_flags

import dsv3
from dsv3.config.declaration import GROUPS, option, options_of
from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.config.server_options import ServerOptions
from launch import __main__ as console
from launch import cli, flags


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
        (["--zzzz"], "unknown flag --zzzz; --help=all lists the flags"),
        (["--max-model-len=many"], "max_model_len"),
        (["--fp8=maybe"], "keep|dequantize"),
        (["stray"], "expected flags only, got 1 positional argument(s): stray"),
    ],
)
def test_errors_say_what_to_change(values, arguments, message):
    with pytest.raises(flags.UsageError) as error:
        flags.parse(["x", *arguments], "", values)
    assert message in str(error.value)


def test_help_lists_choices_once(values, monkeypatch):
    monkeypatch.setattr(flags, "flag_groups", {})  # as in a process without a server's flags
    text = flags.help_text("x", "IN", "Doc.", [values["fp8"]])
    assert "  --fp8=keep|dequantize\n        What to do with FP8. (default keep)\n" in text


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--help"], ""),
        (["-h"], ""),
        (["--help=max-model"], "max-model"),
        (["--api-key", "--help"], None),
        (["--api-key=--help"], None),
        (["--", "--help"], None),
        ([], None),
    ],
)
def test_help_is_only_recognized_as_a_flag(values, arguments, wanted):
    assert flags.find_flag(("help", "h"), arguments, values) == wanted


@pytest.fixture
def server():
    """The flags of `launch.serve`."""
    values = absl_flags.FlagValues()
    for options in (ServerOptions, EngineOptions, ClusterOptions):
        cli.define(options, values)
    return values


def explained(values, topic=""):
    text = flags.help_text("x", "", "Doc.", [values[name] for name in values], topic)
    return text, set(re.findall(r"^  --(?:\[no\])?(\w+)", text, re.MULTILINE)) - {"config", "help", "version"}


def test_help_explains_common_flags_and_names_the_others(server):
    text, shown = explained(server)
    assert {"model", "port", "host", "max_model_len", "dtype", "gpu_memory_utilization", "api_key_file"} <= shown
    assert not shown & {"coordinator", "eplb_interval", "ssl_keyfile"} and len(shown) < 15
    assert all(f"--{name}" in text or f"--[no]{name}" in text for name in server)
    assert text.index("  cache: ") < text.index("--kv_store ") < text.index("  hosts: ") < text.index("--coordinator ")
    assert len(text.splitlines()) < 110


def test_help_of_a_group_of_a_word_and_of_all(server):
    groups = {each.terms.group for cls in (ServerOptions, EngineOptions, ClusterOptions) for each in options_of(cls)}
    assert groups == set(GROUPS)
    found = [explained(server, group)[1] for group in GROUPS if group]
    assert sum(map(len, found)) == len(set().union(*found)) == len(list(server)) - len(explained(server)[1])
    assert explained(server, "hosts")[1] == {each.name for each in options_of(ClusterOptions)}
    assert explained(server, "num-seqs")[1] == explained(server, "--max_num_seqs")[1] == {"max_num_seqs"}
    assert explained(server, "all")[1] == set(server)
    with pytest.raises(flags.UsageError, match=r"--help=zzz: no flag .* the groups are model, .*; --help=all"):
        explained(server, "zzz")


def test_an_option_of_an_unknown_group_is_refused():
    with pytest.raises(ValueError, match="group 'cash' is not one of"):
        option(3, "Say.", group="cash")


def configured(values, path, text, *arguments):
    path.write_text(text)
    flags.parse(["x", f"--config={path}", *arguments], "", values, flags.define_config(values))


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("yaml", "port: 9\nserved-model-name: [a, b]\naccess_log: true\nfp8:\nspeculative_config: {method: mtp}\n"),
        ("toml", 'port = 9\nserved-model-name = ["a", "b"]\naccess_log = true\n[speculative_config]\nmethod = "mtp"\n'),
        (
            "json",
            '{"port": 9, "served_model_name": "a,b", "access_log": true, "speculative_config": {"method": "mtp"}}',
        ),
    ],
)
def test_a_file_sets_flags_and_the_command_line_wins(server, tmp_path, suffix, text):
    configured(server, tmp_path / f"c.{suffix}", text, "--port=7", "--host=::1")
    options, engine = cli.read(ServerOptions, server), cli.read(EngineOptions, server)
    assert (options.port, options.host, options.served_model_name) == (7, "::1", ("a", "b"))
    assert options.access_log and engine.speculative_config == {"method": "mtp"} and engine.fp8 == "keep"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "prot: 9", "c.yaml: prot is not a flag; did you mean --port?"),
        ("c.yaml", "config: d.yaml", "c.yaml: config is not a flag"),
        ("c.yaml", "port: many", "c.yaml: port: "),
        ("c.yaml", "port: true", "c.yaml: port: True is not of type int"),
        ("c.yaml", "access_log: 3", "c.yaml: access_log: 3 is not true or false"),
        ("c.yaml", "api_key: 0123", "c.yaml: api_key: 83 is not of type string, for which it needs quotes"),
        ("c.yaml", "dtype: int3", "c.yaml: dtype: "),
        ("c.yaml", "served_model_name: [3]", "c.yaml: served_model_name: [3] is not a list of texts"),
        ("c.yaml", "api-key: a\napi_key: b", "c.yaml: names a flag twice"),
        ("c.yaml", "- port", "c.yaml: must map names of flags to values"),
        ("c.toml", "port = ", "c.toml: cannot be read: "),
        ("c.yaml", "a: [", "c.yaml: cannot be read: "),
        ("c.ini", "port=3", "c.ini: the file's name must end in .yaml, .yml, .toml, .json"),
    ],
)
def test_errors_in_a_file_name_it(server, tmp_path, name, text, message):
    with pytest.raises(flags.UsageError) as error:
        configured(server, tmp_path / name, text)
    assert message in str(error.value)


def test_a_missing_file_is_named(server, tmp_path):
    with pytest.raises(flags.UsageError, match=r"--config .*none\.yaml: cannot be read: "):
        config = flags.define_config(server)
        flags.parse(["x", f"--config={tmp_path / 'none.yaml'}"], "", server, config)


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


def test_run_from_a_shell(program, tmp_path):
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
    (tmp_path / "greet.toml").write_text("user-name = 'them'")
    done = program("here", "--config", tmp_path / "greet.toml")
    assert (done.returncode, done.stdout) == (3, "them here\n")
    done = program("here", "--config", tmp_path / "none.toml")
    assert (done.returncode, done.stdout) == (2, "") and "none.toml: cannot be read" in done.stderr
    done = program("--version")
    assert done.returncode == 0 and done.stdout.startswith(f"dsv3 {dsv3.__version__}, jax ")
    done = program("--help=greet")
    assert (done.returncode, done.stdout) == (2, "") and "--help=greet: no flag has this in its name" in done.stderr


def test_the_console_command_runs_the_others():
    project = tomllib.loads((Path(flags.__file__).parents[1] / "pyproject.toml").read_text())
    name, _, function = project["project"]["scripts"]["dsv3"].partition(":")
    assert getattr(importlib.import_module(name), function) is console.main
    assert "launch*" in project["tool"]["setuptools"]["packages"]["find"]["include"]
    runs = {path.stem for path in Path(flags.__file__).parent.glob("*.py") if "flags.run(main" in path.read_text()}
    assert set(console.COMMANDS) == runs - {"flags"}


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["simulate", "--help=shared"], 0, "  --shared=FLOAT\n"),
        (["simulate", "--modle=x"], 2, "dsv3 simulate: unknown flag --modle; did you mean --model?"),
        (["convrt"], 2, "dsv3: convrt is not a command; did you mean convert?"),
        ([], 0, "  serve      Serves a "),
        (["--version"], 0, f"dsv3 {dsv3.__version__}, jax "),
    ],
)
def test_the_console_command(tmp_path, arguments, status, words):
    script = tmp_path / "dsv3"  # as pip writes it
    script.write_text("from launch.__main__ import main\nmain()\n")
    done = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == status and words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
