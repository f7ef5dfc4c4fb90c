"""Schedules run on several devices: gradients equal one device's, activations the published table."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from dsv3.config.model import ModelConfig
from dsv3.model.forward import forward
from dsv3.model.layers.experts import LOCAL_EXPERTS
from dsv3.model.params import Params, ParamSpec, declare
from tests.training.pipeline.test_schedules import activations, order
from training.config import TrainingConfig
from training.loss import balanced, objective, training_backend
from training.pipeline.programs import stage_programs
from training.pipeline.ranks import rank_meshes
from training.pipeline.run import PipelineRunner, StepResult
from training.pipeline.schedules import PipelineSchedule, RankSize, build, text
from training.pipeline.stages import cut, extract_stage, join, weights

ONE = RankSize()
ROWS = MICRO_BATCHES = 8
LENGTH = 8
STAGES = 4  # two at the ends and two between them; test_trainer.py and the devices of a rank below have two
CASES = [("1F1B", 4), ("ZB1P", 4), ("DualPipe", 4), ("DualPipeV", 2)]


@pytest.fixture(scope="module")
def config(toy_config: TrainingConfig) -> TrainingConfig:
    """Returns a model with a dense layer per stage, and experts in the last of four: few operations to compile."""
    smaller: dict[str, Any] = {"num_nextn_predict_layers": 0, "n_group": 1, "q_lora_rank": None, "n_shared_experts": 0}
    model = dataclasses.replace(toy_config.model, num_hidden_layers=4, first_k_dense_replace=3, **smaller)
    return dataclasses.replace(toy_config, model=model, batch_size=ROWS, sequence_length=LENGTH)


def random_params(model: ModelConfig, std: float = 0.3) -> Params:
    """Returns random parameters in numpy: jax would compile a generator for each shape."""
    rng = np.random.default_rng(0)

    def draw(spec: ParamSpec) -> np.ndarray:
        if spec.init == "normal":
            return rng.normal(scale=std, size=spec.shape).astype(np.float32)
        return np.full(spec.shape, spec.init == "ones", np.float32)

    return jax.tree.map(draw, declare(model))


@pytest.fixture(scope="module")
def params(config: TrainingConfig) -> Params:
    return random_params(config.model)


@pytest.fixture(scope="module")
def tokens(config: TrainingConfig) -> np.ndarray:
    """Returns rows of different lengths, so that micro-batches have different numbers of targets."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(10, config.model.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    tokens[1::2, 5:] = 2  # padding
    return tokens


@pytest.fixture(scope="module")
def whole(config: TrainingConfig, params: Params, tokens: np.ndarray) -> tuple[Params, dict[str, Any]]:
    """Returns gradient and report of the batch on one device."""

    def loss(params: Params) -> Any:
        experts = balanced(LOCAL_EXPERTS, config, ROWS)
        output = forward(params, config.model, tokens, backend=training_backend(), routed=experts)
        return objective(output, tokens, config.mtp_weight)

    return jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(params))


def execute(
    schedule: PipelineSchedule, config: TrainingConfig, params: Params, tokens: np.ndarray, size: RankSize = ONE
) -> StepResult:
    # All ranks share their devices, and so the compiled programs of a stage. What a rank does on devices of its own,
    # test_trainer.py has.
    meshes = rank_meshes(jax.devices(), 1, size) * schedule.ranks
    programs = stage_programs(config, schedule.stages, ROWS // schedule.micro_batches, size)
    runner = PipelineRunner(schedule, programs, meshes, 0)
    stages = cut(config.model, schedule.stages)
    held = [weights(extract_stage(params, config.model, stage), None, config, stage) for stage in stages]
    return runner.run(runner.place_weights(held), tokens)


def gradient(executed: StepResult, config: TrainingConfig, stages: int) -> Params:
    """Sums the ranks' gradients on the host."""
    sums: list[Any] = [None] * stages
    for (_, stage), part in jax.device_get(dict(executed.gradients)).items():
        sums[stage] = part if sums[stage] is None else jax.tree.map(np.add, sums[stage], part)
    return join(sums, config.model)


@pytest.mark.parametrize(("algorithm", "ranks"), CASES)
def test_gradients_equal_those_of_one_device(
    algorithm: str,
    ranks: int,
    config: TrainingConfig,
    params: Params,
    tokens: np.ndarray,
    whole: tuple[Params, dict[str, Any]],
) -> None:
    schedule = build(algorithm, ranks, MICRO_BATCHES)
    executed = execute(schedule, config, params, tokens)
    wanted, report = whole
    jax.tree.map(assert_close, gradient(executed, config, STAGES), wanted)
    losses, counts = (np.array([part[name] for part in executed.reports[-1]]) for name in ("loss", "expert_counts"))
    np.testing.assert_allclose(losses.sum(), report["loss"], rtol=1e-6)
    np.testing.assert_array_equal(counts.sum(axis=(0, 1)), report["expert_counts"])
    assert max(executed.in_flight) == activations(schedule) <= STAGES + 1
    launched = [[text(e.operation) for e in executed.events if e.rank == rank] for rank in range(ranks)]
    assert launched == order(algorithm, ranks, MICRO_BATCHES)


def test_gradients_over_the_devices_of_a_rank(
    config: TrainingConfig, params: Params, tokens: np.ndarray, whole: tuple[Params, dict[str, Any]]
) -> None:
    """Two teams of two devices: each device has a quarter of a micro-batch's rows, and half of the experts."""
    executed = execute(build("DualPipeV", 1, 2), config, params, tokens, RankSize(data=2, experts=2))
    assert any(len(event.operation) == 2 for event in executed.events), "a pair takes turns with its transfers"
    wanted, report = whole
    jax.tree.map(assert_close, gradient(executed, config, 2), wanted)
    counts = np.array([part["expert_counts"] for part in executed.reports[-1]])
    np.testing.assert_array_equal(counts.sum(axis=(0, 1)), report["expert_counts"])
    experts = executed.gradients[0, 1].layers[-1].moe
    assert {shard.data.shape[1] for shard in experts.down.addressable_shards} == {config.model.n_routed_experts // 2}


def assert_close(got: np.ndarray, wanted: np.ndarray) -> None:
    # Micro-batches add in another order than one batch: 0.7e-6 to 1.6e-6 per leaf, by the vectors of the processor.
    assert np.linalg.norm(got - wanted) <= 4e-6 * np.linalg.norm(wanted)
