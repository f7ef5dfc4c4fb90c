"""Two processes train together: their step equals one device's, and one device resumes from their checkpoint."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.dsv3.engine.cluster.local import free_port
from tests.training.pipeline.test_run import random_params
from tests.training.pipeline.test_trainer import TOKENS, assert_close_states
from training.config import TrainingConfig
from training.loop import Checkpoints, OneDevice
from training.step import TrainState, initial_state, train_step

# One of two processes of two devices each: a step over two ranks, each with a device in each process.
PROCESS = """
import json, pathlib, pickle, sys
import jax, numpy
coordinator, process, directory = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, 2, int(process))
from training.loop import Checkpoints
from training.pipeline.ranks import rank_meshes
from training.pipeline.schedules import build
from training.pipeline.schedules import RankSize
from training.pipeline.trainer import PipelineTrainer
from sharding import processes

config, tokens, state = pickle.loads(sys.stdin.buffer.read())
meshes = rank_meshes(jax.devices(), 2, RankSize(data=2))
trainer = PipelineTrainer(config, build("1F1B", 2, 2), meshes)
state, metrics = trainer.step(trainer.place(state), tokens)
with Checkpoints(pathlib.Path(directory), config) as checkpoints:
    checkpoints.save(1, trainer.saved_state(state))
embedding = numpy.linalg.norm(processes.whole(state.params[0].ends.embed))
stops = [processes.any_of(process == "1"), processes.any_of(False)]
results = {"step": state.step, "stops": stops, "embedding": float(embedding)}
print(json.dumps({name: float(value) for name, value in metrics.items()} | results))
"""


def first_state(config: TrainingConfig) -> TrainState:
    """Returns a state before the first step, in numpy: jax would compile a generator for each shape."""
    shapes = jax.eval_shape(lambda: initial_state(config))
    empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    return dataclasses.replace(empty, params=random_params(config.model, config.init_std))


def two_processes(config: TrainingConfig, state: TrainState, directory: Path) -> list[dict]:
    """Returns the output of each process; they begin with `state`."""
    settings = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", PROCESS, f"127.0.0.1:{free_port()}"]
    started = [
        subprocess.Popen(
            [*command, str(i), str(directory)],
            env={**os.environ, "PYTHONPATH": os.getcwd(), **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for i in range(2)
    ]
    try:
        for process in started:
            assert process.stdin is not None
            process.stdin.write(pickle.dumps((config, TOKENS, state)))
            process.stdin.close()
            process.stdin = None
        return [json.loads(process.communicate(timeout=540)[0].splitlines()[-1]) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_two_processes_make_the_step_of_one_device(tmp_path: Path, toy_config: TrainingConfig) -> None:
    """Without MTP module, shared expert and the query's latent, which `test_trainer.py` covers, to compile less."""
    smaller: dict[str, Any] = {"num_nextn_predict_layers": 0, "n_group": 1, "q_lora_rank": None, "n_shared_experts": 0}
    toy_config = dataclasses.replace(toy_config, model=dataclasses.replace(toy_config.model, **smaller))
    state = first_state(toy_config)
    results = two_processes(toy_config, state, tmp_path / "checkpoints")
    assert results[0] == results[1]
    assert results[0]["step"] == 1
    assert results[0]["stops"] == [True, False]
    alone, wanted = train_step(state, TOKENS, config=toy_config)
    for name, value in wanted.items():
        np.testing.assert_allclose(results[0][name], value, rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(results[0]["embedding"], np.linalg.norm(alone.params.embed), rtol=1e-4)
    one = OneDevice(toy_config)
    with Checkpoints(tmp_path / "checkpoints", toy_config) as checkpoints:
        step, saved = checkpoints.restore(one.shapes())
    assert step == 1
    assert_close_states(one.restore_state(saved, step), jax.device_get(alone))
