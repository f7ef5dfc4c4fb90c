"""`python -m launch.convert` on the command line."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from dsv3.checkpoint import load_params
from dsv3.config.hugging_face import load_config, to_hf
from launch import convert
from tests.dsv3.checkpoint import hf
from tests.dsv3.checkpoint.test_save import tensors_of
from tests.dsv3.checkpoint.trees import assert_same_bits, by_path


@pytest.fixture
def run(capsys):
    """Runs the command in this process; gives its status, output and errors."""

    def run(*arguments):
        from absl import flags

        with pytest.raises(SystemExit) as done:
            convert.flags.run(convert.main, argv=["convert", *map(str, arguments)])
        for name in convert.flags.own_flags(convert, flags.FLAGS):
            name.unparse()
        return done.value.code, *capsys.readouterr()

    return run


def write(directory, cfg):
    hf.write(directory, hf.random_tensors(cfg))
    (directory / "config.json").write_text(json.dumps(to_hf(cfg)))
    return directory


def test_a_checkpoint_is_converted(tmp_path, run):
    cfg = hf.config()
    source = write(tmp_path / "in", cfg)
    status, out, err = run("--model", source, "--output", tmp_path / "out", "--shard-gb=0.001")
    assert (status, out) == (0, f"wrote {tmp_path / 'out'}\n")
    assert "saving: " in err and "/s" in err
    assert_same_bits(tensors_of(tmp_path / "out"), tensors_of(source))
    assert load_config(tmp_path / "out") == cfg


def test_fp8_is_dequantized_by_option(tmp_path, run):
    cfg = hf.fp8_config()
    source = write(tmp_path / "in", cfg)
    options = ["--fp8=dequantize", "--dtype=float32"]
    assert run("--model", source, "--output", tmp_path / "out", *options)[0] == 0
    plain = load_config(tmp_path / "out")
    assert plain == dataclasses.replace(cfg, fp8=None)
    want = load_params(source, cfg, dtype="float32", fp8="dequantize", progress=False)
    got = load_params(tmp_path / "out", plain, dtype=None, progress=False)
    assert_same_bits(by_path(cfg, got), by_path(cfg, want))


def test_errors_are_one_line(tmp_path, run):
    source = write(tmp_path / "in", hf.config())
    (source / "model-00002-of-00003.safetensors").unlink()
    status, out, err = run("--model", source, "--output", tmp_path / "out")
    assert (status, out) == (1, "") and "absent (1): model-00002-of-00003.safetensors" in err
    status, _, err = run("--model", tmp_path / "nowhere", "--output", tmp_path / "out")
    assert status == 1 and "no config.json" in err
    status, _, err = run("--model", source)
    assert status == 2 and "--model and --output are needed" in err
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("x")
    status, _, err = run("--model", write(tmp_path / "in2", hf.config()), "--output", tmp_path / "out")
    assert status == 1 and "exists and is not empty" in err


def test_a_killed_run_starts_again(tmp_path):
    """Kills the run at its first write; the next run leaves no unfinished files."""
    cfg = hf.config(vocab_size=60_000, hidden_size=96)
    source = write(tmp_path / "in", cfg)
    command = [sys.executable, "-m", "launch.convert", "--model", source, "--output", tmp_path / "out"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None and not any(tmp_path.glob(".out.partial/*")):
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "out").exists()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert_same_bits(tensors_of(tmp_path / "out"), tensors_of(source))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
