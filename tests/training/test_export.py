"""The exported directory is what the general loader reads, and nothing is lost but the bits bfloat16 has not."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.checkpoint import load_params
from training import data as training_data
from training.config import TrainingConfig
from training.loop import export, final_figures
from training.step import compute_copy, initial_state


@pytest.mark.usefixtures("library")
def test_an_exported_model_is_loaded_to_the_bit(tmp_path: Path, toy_config: TrainingConfig) -> None:
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
