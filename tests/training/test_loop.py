"""A run: exact resume, SIGTERM, log, picture, and the exported model bit for bit."""

import dataclasses
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from dsv3.checkpoint import load_params
from dsv3.config.model import IndexerConfig
from training import data as training_data
from training import loop
from training.config import TrainingConfig
from training.loop import Checkpoints, export, final_figures, plot_losses, read_log
from training.step import TrainState, compute_copy, initial_state


def run(config: TrainingConfig, output: Path, *, resume: bool = False) -> TrainState:
    return loop.train(config, output, resume=resume, console=Console(quiet=True))


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends this process SIGTERM while step `step` runs."""
    original = loop.train_step

    def with_signal(state: TrainState, tokens: Any, *, config: TrainingConfig) -> Any:
        if int(state.step) + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(state, tokens, config=config)

    monkeypatch.setattr(loop, "train_step", with_signal)


@pytest.mark.usefixtures("library")
def test_a_stopped_and_resumed_run_equals_one_that_never_stopped(
    tmp_path: Path, toy_config: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = run(toy_config, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        stopped = run(toy_config, tmp_path / "stopped")
    assert int(stopped.step) == 2
    resumed = run(toy_config, tmp_path / "stopped", resume=True)
    assert int(resumed.step) == 4
    jax.tree.map(np.testing.assert_array_equal, resumed, straight)
    logs = [read_log(tmp_path / name / "log.jsonl") for name in ("straight", "stopped")]
    losses = [[row["loss"] for row in log if row["kind"] == "validation"] for log in logs]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


@pytest.mark.usefixtures("library")
def test_a_run_is_not_overwritten_and_needs_a_checkpoint_to_resume(tmp_path: Path, toy_config: TrainingConfig) -> None:
    with pytest.raises(FileNotFoundError, match="start without --resume"):
        run(toy_config, tmp_path / "run", resume=True)
    run(toy_config, tmp_path / "run")
    with pytest.raises(FileExistsError, match="--resume"):
        run(toy_config, tmp_path / "run")
    other = dataclasses.replace(toy_config, model=dataclasses.replace(toy_config.model, n_group=1))
    with pytest.raises(ValueError, match="n_group was 2, is 1"):
        run(other, tmp_path / "run", resume=True)


def test_a_checkpoint_of_a_model_with_an_indexer_is_restored(tmp_path: Path, toy_config: TrainingConfig) -> None:
    """The checkpoint has JSON, in which tuples inside of a setting are lists too."""
    indexer = IndexerConfig(2, 16, 8, shared_layers=(1,))
    with Checkpoints(tmp_path, with_indexer(toy_config, indexer)) as checkpoints:
        checkpoints.save(1, {"x": jnp.arange(2)})
        checkpoints.wait()
        step, found = checkpoints.restore({"x": jax.ShapeDtypeStruct((2,), jnp.int32)})
        assert step == 1 and found["x"].tolist() == [0, 1]
    other = dataclasses.replace(indexer, shared_layers=())
    with Checkpoints(tmp_path, with_indexer(toy_config, other)) as checkpoints, pytest.raises(ValueError, match="was"):
        checkpoints.restore({"x": jax.ShapeDtypeStruct((2,), jnp.int32)})


def with_indexer(config: TrainingConfig, indexer: IndexerConfig) -> TrainingConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, indexer=indexer))


def test_losses_are_drawn(tmp_path: Path) -> None:
    rows = ['{"kind": "train", "step": 10, "tokens": 640, "loss": 5.0, "mtp_loss": 5.5}'] * 3
    rows += ['{"kind": "validation", "step": 10, "tokens": 640, "loss": 5.2, "mtp_loss": 5.6}']
    (tmp_path / "log.jsonl").write_text("".join(row + "\n" for row in rows))
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"kind": "tr')  # what a kill leaves
    assert [row["kind"] for row in read_log(tmp_path / "log.jsonl")] == ["train"] * 3 + ["validation"]
    assert plot_losses(tmp_path / "log.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


# A run that saves after every step and says so before the next one.
ENDLESS = """
import pathlib, pickle, sys
from rich.console import Console
from training import loop

class Talking(loop.OneDevice):
    def step(self, state, tokens):
        print(int(state.step), flush=True)
        return super().step(state, tokens)

config, output = pickle.loads(sys.stdin.buffer.read())
loop.train(config, output, resume=False, console=Console(quiet=True), trainer=Talking(config))
"""


@pytest.mark.usefixtures("library")
def test_a_kill_loses_at_most_the_unfinished_checkpoint(tmp_path: Path, toy_config: TrainingConfig) -> None:
    config = dataclasses.replace(toy_config, checkpoint_every=1, eval_every=1000)
    training_data.prepare(tmp_path / "data", config)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(pickle.dumps((config, tmp_path)))
        process.stdin.close()
        begun = [int(line) for line in itertools.islice(process.stdout, 3)][-1]
        process.kill()
        begun = max([begun, *map(int, process.stdout)])
    one = loop.OneDevice(toy_config)
    with Checkpoints(tmp_path / "checkpoints", config) as checkpoints:
        step, saved = checkpoints.restore(one.shapes())
    assert begun - 1 <= step <= begun + 1
    state, metrics = one.step(one.restore_state(saved, step), np.zeros((4, 32), np.int32))
    assert int(state.step) == step + 1
    assert np.isfinite(metrics["loss"])


@pytest.mark.usefixtures("library")
def test_an_exported_model_is_loaded_bit_for_bit(tmp_path: Path, toy_config: TrainingConfig) -> None:
    data, state = training_data.prepare(tmp_path / "data", toy_config), initial_state(toy_config)
    export(tmp_path / "model", state, toy_config, tmp_path / "data")
    loaded = load_params(tmp_path / "model", toy_config.model, dtype=None, progress=False)
    jax.tree.map(np.testing.assert_array_equal, loaded, compute_copy(state.params, toy_config.model, jnp.bfloat16))
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert settings["add_bos_token"]
    assert settings["eos_token"]["content"] == data.tokenizer.id_to_token(toy_config.model.eos_token_ids[0])


@pytest.mark.usefixtures("library")
def test_bits_per_byte_follow_from_the_loss(tmp_path: Path, toy_config: TrainingConfig) -> None:
    data, state = training_data.prepare(tmp_path / "data", toy_config), initial_state(toy_config)
    figures = final_figures(state, data, toy_config)
    nats_in_all = figures["loss"] * len(data.held_out)
    np.testing.assert_allclose(figures["bits_per_byte"], nats_in_all / np.log(2) / data.held_out_bytes, rtol=1e-6)
