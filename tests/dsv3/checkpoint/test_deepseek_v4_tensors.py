"""The tensors of DeepSeek-V4: published checkpoints sum to the byte, and the golden ones have exactly these."""

import json
from collections import Counter
from typing import Any

import pytest

from dsv3.checkpoint.safetensors_file import NAMES, read_header
from dsv3.config.hugging_face import from_hf
from tests.dsv3.checkpoint.deepseek_v4_tensors import stored_tensors
from tests.dsv3.deepseek_v4 import FLASH, FLASH_0731, PRO, PRO_0813
from tests.dsv3.model.golden import DIRECTORY


@pytest.mark.parametrize(
    ("config", "nbytes", "count"),
    [
        (FLASH, 159_609_485_896, 69_187),
        (PRO, 864_704_792_696, 145_116),
        (FLASH_0731, 166_878_536_440, 72_317),
        (PRO_0813, 892_727_580_904, 149_782),
    ],
    ids=["Flash", "Pro", "Flash-0731", "Pro-0813"],
)
def test_published_totals(config: dict[str, Any], nbytes: int, count: int) -> None:
    tensors = list(stored_tensors(from_hf(config)))
    assert (sum(tensor.nbytes for tensor in tensors), len(tensors)) == (nbytes, count)
    assert len({tensor.name for tensor in tensors}) == count


def test_published_types_of_flash() -> None:
    found = Counter(NAMES[tensor.dtype] for tensor in stored_tensors(from_hf(FLASH)))
    assert found == {"BF16": 433, "F32": 417, "F8_E4M3": 375, "F8_E8M0": 34_167, "I64": 3, "I8": 33_792}


def test_base_checkpoints_have_float32_scales_and_no_fp4() -> None:
    found = Counter(NAMES[tensor.dtype] for tensor in stored_tensors(from_hf(FLASH | {"expert_dtype": "fp8"})))
    assert found == {"BF16": 433, "F32": 417 + 34_167, "F8_E4M3": 375 + 33_792, "I64": 3}


@pytest.mark.parametrize("member", ["deepseek_v4", "deepseek_v4_plain"])
def test_golden_checkpoints_have_exactly_these(member: str) -> None:
    cfg = from_hf(json.loads((DIRECTORY / member / "config.json").read_text()))
    header = read_header(DIRECTORY / member / "model.safetensors")
    assert {name: (t.dtype, t.shape) for name, t in header.items()} == {
        tensor.name: (tensor.dtype, tensor.shape) for tensor in stored_tensors(cfg)
    }
