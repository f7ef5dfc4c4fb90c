"""Writes the result of a run as a Hugging Face directory, which the one loader reads like any other checkpoint."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from dsv3.checkpoint import save_hf
from training.config import TrainingConfig
from training.data import Data, held_out_batches
from training.loop import mean_metrics
from training.step import TrainState, compute_copy
from training.tokenizer import BOS_ID, EOS_ID, tokenizer_config


def export(directory: Path, state: TrainState, config: TrainingConfig, data: Path) -> None:
    """Writes config.json, model.safetensors (bfloat16, the router float32), tokenizer and generation settings.

    Raises FileExistsError if `directory` holds anything.
    """
    save_hf(directory, config.model, compute_copy(state.params, config.model, jnp.bfloat16))
    shutil.copyfile(data / "tokenizer.json", directory / "tokenizer.json")
    _write_json(directory / "tokenizer_config.json", tokenizer_config(config.model.max_position_embeddings))
    settings = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": True, "temperature": 0.6, "top_p": 0.95}
    _write_json(directory / "generation_config.json", settings)


def final_figures(state: TrainState, data: Data, config: TrainingConfig) -> dict[str, Any]:
    """Measures the losses over all held-out text (nats per token, bits per byte) and the MTP drafts accepted."""
    metrics = mean_metrics(state, held_out_batches(data, config), config)
    tokens_per_byte = len(data.held_out) / data.held_out_bytes
    return metrics | {"bits_per_byte": metrics["loss"] * tokens_per_byte / math.log(2)}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
