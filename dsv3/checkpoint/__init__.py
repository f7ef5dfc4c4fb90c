"""Reads and writes checkpoints: Hugging Face directories and the pre-stacked form, from and to the parameter tree."""

from dsv3.checkpoint.convert import convert_to_hf, convert_to_stacked
from dsv3.checkpoint.errors import CheckpointError
from dsv3.checkpoint.load import load_params
from dsv3.checkpoint.writer import save_hf

__all__ = ["CheckpointError", "convert_to_hf", "convert_to_stacked", "load_params", "save_hf"]
