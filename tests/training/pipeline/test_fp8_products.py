"""FP8 products in a pipeline: a split backward over devices with split experts equals the whole one."""

import dataclasses
from typing import Any

import jax
import numpy as np

from dsv3.model.forward import forward
from pallas_kernels.float8 import E4M3
from tests.training.pipeline.test_run import random_params
from training.config import TrainingConfig
from training.loss import objective, target_counts, training_backend
from training.pipeline.programs import stage_programs, weight_shapes
from training.pipeline.ranks import rank_meshes
from training.pipeline.run import PipelineRunner
from training.pipeline.schedules import PassKind, RankSize, build
from training.pipeline.stages import cut, extract_stage, join, weights

LENGTH = 128
"""Tokens of a row: a device's tokens fill whole tiles of a weight gradient, the same tiles as on one device."""
ROWS, MICRO_BATCHES, SIZE = 4, 2, RankSize(experts=2)


def test_gradients_of_split_backwards_equal_whole_ones(toy_config: TrainingConfig) -> None:
    """One device computes the micro-batches one after the other, as tiles are cut from a micro-batch's rows.

    With three of four experts per row, one round has room for all: tiles do not reach from one round into the next.
    """
    smaller: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    smaller["num_experts_per_tok"] = 3
    model = dataclasses.replace(toy_config.model, qk_rope_head_dim=16, n_group=1, **smaller)
    changes: dict[str, Any] = {"batch_size": ROWS, "sequence_length": LENGTH, "sequence_balance_weight": 0.0}
    config = dataclasses.replace(toy_config, model=model, fp8_products=True, **changes)
    params = random_params(model)
    tokens = np.random.default_rng(0).integers(10, model.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    counts = target_counts(tokens, 0)

    @jax.jit
    @jax.grad
    def whole(params: Any, tokens: Any) -> Any:
        output = forward(params, model, tokens, backend=training_backend(), fp8_products=True)
        return objective(output, tokens, config.mtp_weight, counts)[0]

    parts = [jax.device_get(whole(params, tokens[i : i + 2])) for i in (0, 2)]
    wanted = jax.tree.map(np.add, *parts)

    (stage,) = cut(model, 1)
    programs = stage_programs(config, 1, ROWS // MICRO_BATCHES, SIZE)
    runner = PipelineRunner(build("ZB1P", 1, MICRO_BATCHES), programs, rank_meshes(jax.devices(), 1, SIZE), 0)
    executed = runner.run(
        runner.place_weights([weights(extract_stage(params, model, stage), None, config, stage)]), tokens
    )
    done = [part.kind for event in executed.events for part in event.operation]
    assert done == [PassKind.FORWARD, PassKind.INPUT, PassKind.WEIGHT] * MICRO_BATCHES
    jax.tree.map(assert_close, join([jax.device_get(executed.gradients[0, 0])], model), wanted)

    rows = jax.ShapeDtypeStruct((2, LENGTH), np.int32)
    data = rows, jax.ShapeDtypeStruct((1,), np.float32)
    _, _, saved = jax.eval_shape(programs.stages[0].forward_program(), weight_shapes(config, stage), rows, data)
    kept = sorted(leaf.shape[2] for leaf in saved if leaf.dtype == E4M3)
    assert kept == [32], "a byte per value of what the experts receive; what the rest takes is quantized again"


def assert_close(got: np.ndarray, wanted: np.ndarray) -> None:
    assert np.linalg.norm(got - wanted) <= 1e-3 * np.linalg.norm(wanted)
