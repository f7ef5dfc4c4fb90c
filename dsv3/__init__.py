"""A serving runtime for the DeepSeek-V3 model family in JAX.

What it exports is imported on first use, so that importing the package stays cheap.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv3.llm import LLM, Completion, RequestOutput
    from dsv3.sampling_params import SamplingParams, StructuredOutputsParams
    from dsv3.table_map import map

__version__ = "0.1.0"

_PARAMETERS = "dsv3.sampling_params"
_MODULES = {"SamplingParams": _PARAMETERS, "StructuredOutputsParams": _PARAMETERS, "map": "dsv3.table_map"}
__all__ = ["LLM", "Completion", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "map"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(_MODULES.get(name, "dsv3.llm")), name)
    raise AttributeError(f"module 'dsv3' has no attribute {name!r}")
