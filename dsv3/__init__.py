"""A serving runtime for the DeepSeek-V3 model family in JAX.

What it exports is imported on first use, so that importing the package stays cheap.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv3.llm import LLM, Completion, RequestOutput
    from dsv3.sampling_params import SamplingParams, StructuredOutputsParams
    from dsv3.table_map import map

__version__ = "0.1.0"

__all__ = ["LLM", "Completion", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "map"]


def __getattr__(name: str) -> Any:
    if name == "SamplingParams":
        from dsv3.sampling_params import SamplingParams

        return SamplingParams
    if name == "map":
        from dsv3.table_map import map

        return map
    if name == "StructuredOutputsParams":
        from dsv3.sampling_params import StructuredOutputsParams

        return StructuredOutputsParams
    if name in __all__:
        from dsv3 import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'dsv3' has no attribute {name!r}")
