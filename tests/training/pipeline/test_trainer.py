"""Training over a pipeline: a step equals one device's, and a run stops, resumes and changes its mesh."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from training import loop
from training.config import TrainingConfig
from training.loop import Checkpoints, read_log
from training.pipeline.memory import memory_of
from training.pipeline.ranks import rank_meshes
from training.pipeline.schedules import PipelineSchedule, RankSize, build
from training.pipeline.trainer import PipelineTrainer
from training.step import TrainState, initial_state, train_step

TOKENS = np.random.default_rng(1).integers(10, 300, (4, 32)).astype(np.int32)


PAIRS, HALVES = RankSize(data=2), RankSize(experts=2)


@pytest.fixture(scope="module")
def trainer(toy_config: TrainingConfig) -> PipelineTrainer:
    """Two ranks of two devices: a dense layer, and one with experts and the MTP module, which needs the embedding."""
    return PipelineTrainer(toy_config, build("1F1B", 2, 2), rank_meshes(jax.devices()[2:], 2, PAIRS))


def leaves(tree: Any) -> dict[str, np.ndarray]:
    paths = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
    return {jax.tree_util.keystr(path): leaf for path, leaf in paths}


def assert_same_bits(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, leaves(got), leaves(wanted))


def test_a_step_equals_that_of_one_device(tmp_path: Path, toy_config: TrainingConfig, trainer: PipelineTrainer) -> None:
    """Meanwhile a thread writes the previous state, whose arrays the step overwrites."""
    state = initial_state(toy_config)
    before = jax.device_get(state)
    placed = trainer.place(state)
    with Checkpoints(tmp_path, toy_config) as checkpoints:
        checkpoints.save(0, trainer.saved_state(placed))
        placed, metrics = trainer.step(placed, TOKENS)
        checkpoints.wait()
        # On the mesh that wrote it, on one device, and on two that split the experts of all layers.
        folded = PipelineTrainer(toy_config, build("DualPipeV", 1, 2), rank_meshes(jax.devices(), 1, HALVES))
        for other in (trainer, loop.OneDevice(toy_config), folded):
            step, saved = checkpoints.restore(other.shapes())
            assert_same_bits(other.on_one_device(other.restore_state(saved, step)), before)
    alone, wanted = train_step(initial_state(toy_config), TOKENS, config=toy_config)
    assert metrics.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)
    assert_close_states(trainer.on_one_device(placed), alone)


def assert_close_states(got: TrainState, wanted: TrainState) -> None:
    """Compares two states after the first step."""
    assert int(got.step) == int(wanted.step) == 1
    # The moments follow the gradients; AdamW makes a whole step of the smallest difference from 0.
    moments, wanted_moments = leaves(got.optimizer), leaves(wanted.optimizer)
    assert moments.keys() == wanted_moments.keys()
    for name, leaf in wanted_moments.items():
        assert np.linalg.norm(moments[name] - leaf) <= 4e-6 * np.linalg.norm(leaf), name
    biases = {name: leaf for name, leaf in leaves(wanted.params).items() if name.endswith("router_bias")}
    assert ".moe.moe.router_bias" in biases
    for name, moved in biases.items():
        assert np.abs(moved).max() > 0
        np.testing.assert_array_equal(leaves(got.params)[name], moved)


def test_parts_are_on_their_owners_and_join_to_the_same_bits(
    toy_config: TrainingConfig, trainer: PipelineTrainer
) -> None:
    state = initial_state(toy_config)
    wanted = jax.device_get(state)
    placed = trainer.place(state)
    planned = memory_of(toy_config, trainer.schedule, 2, PAIRS)
    for part, moments, first, plan in zip(placed.params, placed.moments, (2, 4), planned, strict=True):
        own = jax.tree.leaves((part, moments))
        assert {device.id for leaf in own for device in leaf.devices()} == {first, first + 1}
        assert sum(leaf.addressable_shards[0].data.nbytes for leaf in own if leaf.ndim) == plan.optimizer
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves((wanted.params, wanted.optimizer)))
    assert sum(plan.optimizer for plan in planned) < 0.52 * whole, "a device keeps half of what its team shares"
    assert_same_bits(trainer.on_one_device(placed), wanted)


@pytest.mark.usefixtures("library")
def test_a_run_resumes_exactly_and_on_one_device(
    tmp_path: Path, toy_config: TrainingConfig, trainer: PipelineTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, resume: bool = False, trainer: Any = trainer) -> TrainState:
        console = Console(quiet=True)
        return loop.train(toy_config, tmp_path / name, resume=resume, console=console, trainer=trainer)

    straight = run("straight")
    step = trainer.step

    def stop_in_the_second(state: Any, tokens: Any) -> Any:
        if state.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(state, tokens)

    shutil.copytree(tmp_path / "straight" / "data", tmp_path / "stopped" / "data")
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "step", stop_in_the_second)
        assert int(run("stopped").step) == 2
    shutil.copytree(tmp_path / "stopped", tmp_path / "moved")
    assert_same_bits(run("stopped", resume=True), straight)
    alone = run("moved", resume=True, trainer=None)
    assert int(alone.step) == 4
    losses = [
        [row["loss"] for row in read_log(tmp_path / name / "log.jsonl") if row["kind"] == "validation"]
        for name in ("straight", "moved")
    ]
    np.testing.assert_allclose(*losses, rtol=1e-3)
    assert losses[0][0] == losses[1][0]


def test_what_does_not_fit_is_refused(toy_config: TrainingConfig) -> None:
    def over(ranks: int, size: RankSize, schedule: PipelineSchedule) -> None:
        PipelineTrainer(toy_config, schedule, rank_meshes(jax.devices(), ranks, size))

    with pytest.raises(ValueError, match="3 micro-batches do not divide the batch of 4 rows"):
        over(2, RankSize(), build("1F1B", 2, 3))
    with pytest.raises(ValueError, match=r"1F1B over 2 equal ranks got meshes of \[1\] devices"):
        over(1, RankSize(), build("1F1B", 2, 2))
    with pytest.raises(ValueError, match="2 layers do not fill 4 pipeline stages"):
        over(4, RankSize(), build("1F1B", 4, 4))
    with pytest.raises(ValueError, match="the 4 devices of a rank must divide the 2 rows of a micro-batch"):
        over(2, RankSize(data=4), build("1F1B", 2, 2))
    with pytest.raises(ValueError, match="2 ranks of 8 devices need 16 devices in each process, but one has 8"):
        over(2, RankSize(2, 4), build("1F1B", 2, 2))
