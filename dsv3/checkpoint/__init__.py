"""Reads and writes checkpoints: Hugging Face directories and the pre-stacked form, from and to the parameter tree.

What it exports is imported on first use, so that processes without jax can name weights (`dsv3.checkpoint.identity`).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv3.checkpoint.convert import convert_to_hf, convert_to_stacked
    from dsv3.checkpoint.errors import CheckpointError
    from dsv3.checkpoint.load import load_params
    from dsv3.checkpoint.writer import save_hf

__all__ = ["CheckpointError", "convert_to_hf", "convert_to_stacked", "load_params", "save_hf"]

_MODULES = {
    "CheckpointError": "errors",
    "convert_to_hf": "convert",
    "convert_to_stacked": "convert",
    "load_params": "load",
    "save_hf": "writer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'dsv3.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dsv3.checkpoint.{_MODULES[name]}"), name)
