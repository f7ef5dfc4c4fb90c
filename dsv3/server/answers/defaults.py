"""Sampling defaults a model brings along: the part of `generation_config.json` that vLLM honours too."""

from pathlib import Path
from typing import Any

from dsv3.files import read_json
from dsv3.sampling_params import SamplingParams

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(model_dir: Path) -> dict[str, Any]:
    """Returns what requests that do not say otherwise are sampled with; empty without the file.

    `do_sample` false means greedy. Raises ValueError, naming the file, for values that cannot be used.
    """
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        found = read_json(path)
        defaults = {name: found[name] for name in _NAMES if found.get(name) is not None}
        if found.get("do_sample") is False:
            defaults = {"temperature": 0.0}
        SamplingParams(**defaults)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from None
    return defaults
