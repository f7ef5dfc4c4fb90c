"""What transformers' `save_pretrained` writes (`tests/golden/make_saved.py`) is read as the published model is."""

import dataclasses
import json
import math
import pathlib
import struct
from typing import Any

import pytest

from dsv3.checkpoint.load import plan_directory
from dsv3.checkpoint.safetensors_file import DTYPES
from dsv3.config.hugging_face import from_hf, load_config
from dsv3.config.hugging_face.deepseek import FAMILIES, WRAPPERS

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
SAVED = {path.stem: json.loads(path.read_text()) for path in sorted((GOLDEN / "saved").glob("*.json"))}
SMALLER = ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group")


def published(name: str) -> dict[str, Any]:
    """The configuration that the model was made of, with its quantization."""
    config = json.loads((GOLDEN / ("mistral4" if name == "mistral3" else name) / "config.json").read_text())
    saved = SAVED[name]["config"]
    if "text_config" in config and "text_config" not in saved:
        config = config["text_config"] | {"quantization_config": config["quantization_config"]}
    text, own = config.get("text_config", config), saved.get("text_config", saved)
    text |= {field: own[field] for field in SMALLER}
    return config


def write(directory: pathlib.Path, config: dict[str, Any], tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A checkpoint of zeros with these settings and tensors."""
    (directory / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def test_every_family_is_here() -> None:
    """But Mistral Large 3, which only Mistral's own form has."""
    assert {from_hf(published(name)).family for name in SAVED} == {*FAMILIES, *WRAPPERS} - {"mistral_large_3"}


@pytest.mark.parametrize("name", SAVED)
def test_settings_and_tensors_are_those_of_the_published_model(name: str, tmp_path: pathlib.Path) -> None:
    saved = SAVED[name]
    write(tmp_path, saved["config"], saved["tensors"])
    cfg = load_config(tmp_path)
    # The classes have no MTP module, and the one around Mistral's ties the head where the file does not say otherwise.
    expected = dataclasses.replace(
        from_hf(published(name)), num_nextn_predict_layers=0, fp8=None, tie_word_embeddings=name == "mistral3"
    )
    assert cfg == dataclasses.replace(expected, family="deepseek_v3" if name == "kimi_k2" else expected.family)
    plan = plan_directory(tmp_path, cfg, None, "keep")  # raises for a tensor that is missing, unknown or misshapen
    assert plan.leaves


@pytest.mark.parametrize("name", [name for name, saved in SAVED.items() if "quantization_config" in saved])
def test_settings_of_fp8_are_those_of_the_published_model(name: str) -> None:
    saved = SAVED[name]
    config = saved["config"] | {"quantization_config": saved["quantization_config"]}
    assert from_hf(config).fp8 == from_hf(published(name)).fp8 is not None
