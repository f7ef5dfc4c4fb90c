"""The option `fp8_products`: its effect on a step, and the models that it refuses."""

import dataclasses

import jax
import numpy as np
import pytest

from configs.deepseek_v3_training import TRAINING as DEEPSEEK_V3
from configs.tiny import TRAINING as TINY
from training.config import TrainingConfig
from training.step import evaluate, initial_state, train_step


def test_a_step_multiplies_e4m3_values_and_validation_does_not(toy_config: TrainingConfig) -> None:
    plain = dataclasses.replace(toy_config, model=dataclasses.replace(toy_config.model, qk_rope_head_dim=16))
    config = dataclasses.replace(plain, fp8_products=True)
    state = jax.eval_shape(lambda: initial_state(config))
    tokens = jax.ShapeDtypeStruct((4, 32), np.int32)
    assert "f8_e4m3fn" in str(train_step.trace(state, tokens, config=config).jaxpr)
    assert "f8_e4m3fn" not in str(train_step.trace(state, tokens, config=plain).jaxpr)
    assert "f8_e4m3fn" not in str(evaluate.trace(state.params, tokens, config=config).jaxpr)


def test_unsupported_widths_are_refused(toy_config: TrainingConfig) -> None:
    with pytest.raises(ValueError, match=r"multiples of 16, but q_lora_rank \+ kv_lora_rank \+ qk_rope_head_dim is 40"):
        dataclasses.replace(toy_config, fp8_products=True)
    model = dataclasses.replace(toy_config.model, q_lora_rank=None, intermediate_size=40, moe_intermediate_size=24)
    with pytest.raises(ValueError, match=r"moe_intermediate_size is 24.* intermediate_size is 40; change the model"):
        dataclasses.replace(toy_config, model=model, fp8_products=True)


@pytest.mark.parametrize("config", [TINY, DEEPSEEK_V3], ids=["tiny", "deepseek_v3_training"])
def test_shipped_configurations_support_the_option(config: TrainingConfig) -> None:
    assert dataclasses.replace(config, fp8_products=True).fp8_products
