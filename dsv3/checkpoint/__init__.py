"""Reads and writes checkpoints: Hugging Face directories, from and to the parameter tree.

Exports are imported on first use, so that processes without jax can compute `dsv3.checkpoint.identity`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv3.checkpoint.load import load_params
    from dsv3.checkpoint.safetensors_file import CheckpointError
    from dsv3.checkpoint.writer import convert_checkpoint, save_hf

__all__ = ["CheckpointError", "convert_checkpoint", "load_params", "save_hf"]

_MODULES = {
    "CheckpointError": "safetensors_file",
    "convert_checkpoint": "writer",
    "load_params": "load",
    "save_hf": "writer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'dsv3.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dsv3.checkpoint.{_MODULES[name]}"), name)
