"""Conversion keeps the bytes of tensors, or dequantizes them, for all sizes of blocks and files."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.checkpoint import convert_checkpoint, load_params, reader
from dsv3.checkpoint.layout import blocks, full_box
from dsv3.config.hugging_face import load_config
from tests.dsv3.checkpoint import hf
from tests.dsv3.checkpoint.test_load import configs
from tests.dsv3.checkpoint.test_save import tensors_of
from tests.dsv3.checkpoint.trees import assert_same_bits, by_path


def load(directory, cfg, **options):
    return by_path(cfg, load_params(directory, cfg, **{"dtype": None, "progress": False, **options}))


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple), limit=st.integers(4, 300))
@settings(deadline=None)
def test_blocks_partition_an_array_in_the_order_of_its_bytes(shape, limit):
    order = np.arange(np.prod(shape)).reshape(shape)
    numbered = list(blocks(shape, 4, full_box(shape), limit))
    assert [number for number, _ in numbered] == list(range(len(numbered)))
    np.testing.assert_array_equal(np.concatenate([order[box].reshape(-1) for _, box in numbered]), order.reshape(-1))
    assert all(order[box].size * 4 <= limit for _, box in numbered)


@given(cfg=configs(), block=st.integers(40, 300), data=st.data())
@settings(deadline=None, max_examples=8)
def test_any_block_and_file_size_writes_the_same_tensors(tmp_path_factory, cfg, block, data):
    tmp_path = tmp_path_factory.mktemp("convert")
    tensors = hf.random_tensors(cfg)
    hf.write(tmp_path / "in", tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "BLOCK_BYTES", block)
        convert_checkpoint(tmp_path / "in", tmp_path / "out", cfg, shard_bytes=data.draw(st.integers(2000, 99999)))
    assert_same_bits(tensors_of(tmp_path / "out"), tensors)


@pytest.mark.parametrize("fp8", ["keep", "dequantize"])
def test_fp8_is_kept_or_dequantized(tmp_path, fp8):
    cfg = hf.fp8_config()
    hf.write(tmp_path / "in", hf.random_tensors(cfg))
    convert_checkpoint(tmp_path / "in", tmp_path / "out", cfg, fp8=fp8)
    now = load_config(tmp_path / "out")
    assert (now.fp8 is None) == (fp8 == "dequantize")
    want = load(tmp_path / "in", cfg, fp8=fp8)
    assert_same_bits(load(tmp_path / "out", dataclasses.replace(cfg, fp8=now.fp8)), want)


def test_tokenizer_files_come_along_and_code_does_not(tmp_path):
    source = hf.write(tmp_path / "in", hf.random_tensors(hf.config()))
    (source / "tokenizer.json").write_text('{"a": 1}')
    (source / "modeling.py").write_text("raise SystemExit")
    convert_checkpoint(source, tmp_path / "out", hf.config())
    assert (tmp_path / "out/tokenizer.json").read_text() == '{"a": 1}'
    assert not (tmp_path / "out/modeling.py").exists()


def test_an_existing_target_is_left_alone(tmp_path):
    source = hf.write(tmp_path / "in", hf.random_tensors(hf.config()))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("x")
    with pytest.raises(FileExistsError, match="not empty"):
        convert_checkpoint(source, tmp_path / "out", hf.config())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_rounding_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="fp8 'quantize' is not possible for files"):
        convert_checkpoint(tmp_path, tmp_path / "out", hf.config(), fp8="quantize")
