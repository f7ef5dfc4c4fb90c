"""The pre-stacked form: what it holds, that it survives kills, and that damage is found."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.checkpoint import CheckpointError, convert, fill, load_params
from dsv3.checkpoint.boxes import blocks, full_box, num_blocks
from dsv3.checkpoint.convert import convert_to_hf, convert_to_stacked
from dsv3.checkpoint.safetensors_file import read_header
from dsv3.config.hugging_face import load_config
from tests.dsv3.checkpoint import hf
from tests.dsv3.checkpoint.test_load import VARIANTS, configs
from tests.dsv3.checkpoint.test_save import tensors_of
from tests.dsv3.checkpoint.trees import assert_same_bits, by_path


def load(directory, cfg, **options):
    options = {"dtype": None, "progress": False, **options}
    return by_path(cfg, load_params(directory, cfg, **options))


@pytest.fixture
def source(tmp_path):
    return hf.write(tmp_path / "in", hf.random_tensors(hf.config()))


@pytest.fixture
def stacked(tmp_path, source):
    convert_to_stacked(source, tmp_path / "out", hf.config())
    return tmp_path / "out"


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple), limit=st.integers(4, 300))
@settings(deadline=None)
def test_blocks_partition_an_array_in_the_order_of_its_bytes(shape, limit):
    order = np.arange(np.prod(shape)).reshape(shape)
    numbered = list(blocks(shape, 4, full_box(shape), limit))
    assert [number for number, _ in numbered] == list(range(num_blocks(shape, 4, limit)))
    np.testing.assert_array_equal(np.concatenate([order[box].reshape(-1) for _, box in numbered]), order.reshape(-1))
    assert all(order[box].size * 4 <= limit for _, box in numbered)


@pytest.mark.parametrize("name", VARIANTS)
def test_it_loads_as_the_original_does(tmp_path, name):
    cfg = VARIANTS[name]
    hf.write(tmp_path / "in", hf.random_tensors(cfg))
    convert_to_stacked(tmp_path / "in", tmp_path / "out", cfg)
    assert load_config(tmp_path / "out") == cfg
    for dtype in (None, np.float32):
        assert_same_bits(load(tmp_path / "out", cfg, dtype=dtype), load(tmp_path / "in", cfg, dtype=dtype))


def test_one_with_a_float32_router_still_loads_and_converts_back(tmp_path):
    """Conversions once made every router float32; the values of such a one still fit the original's type."""
    cfg = hf.config()
    tensors = hf.random_tensors(cfg)
    widened = {name: t.astype(np.float32) if name.endswith("mlp.gate.weight") else t for name, t in tensors.items()}
    hf.write(tmp_path / "in", widened)
    convert_to_stacked(tmp_path / "in", tmp_path / "out", cfg)
    loaded = load(tmp_path / "out", cfg)
    assert loaded["embed"].dtype == hf.BF16 and loaded["moe.moe.router"].dtype == np.float32
    hf.write(tmp_path / "original", tensors)
    original = load(tmp_path / "original", cfg)
    assert original["moe.moe.router"].dtype == hf.BF16
    np.testing.assert_array_equal(loaded["moe.moe.router"], original["moe.moe.router"].astype(np.float32))
    convert_to_hf(tmp_path / "out", tmp_path / "back", cfg)
    assert_same_bits(tensors_of(tmp_path / "back"), tensors)


@pytest.mark.parametrize("stored", ["keep", "dequantize"])
@pytest.mark.parametrize("wanted", ["keep", "dequantize"])
def test_fp8_may_be_kept_or_dequantised_on_either_way(tmp_path, stored, wanted):
    cfg = hf.fp8_config()
    hf.write(tmp_path / "in", hf.random_tensors(cfg))
    convert_to_stacked(tmp_path / "in", tmp_path / "out", cfg, fp8=stored)
    kept = stored == wanted == "keep"
    now = load_config(tmp_path / "out")
    assert now == (cfg if stored == "keep" else dataclasses.replace(cfg, fp8=None))
    want = load(tmp_path / "in", cfg, fp8="keep" if kept else "dequantize")
    assert_same_bits(load(tmp_path / "out", now, fp8=wanted), want)


@given(cfg=configs(), block=st.integers(40, 300), window=st.integers(1, 8), data=st.data())
@settings(deadline=None, max_examples=8)
def test_any_block_and_window_size_converts_there_and_back(tmp_path_factory, cfg, block, window, data):
    tmp_path = tmp_path_factory.mktemp("convert")
    tensors = hf.random_tensors(cfg)
    hf.write(tmp_path / "in", tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "BLOCK_BYTES", block)
        patch.setattr(convert, "WINDOW_BYTES", block * window)
        convert_to_stacked(tmp_path / "in", tmp_path / "out", cfg)
    convert_to_hf(tmp_path / "out", tmp_path / "back", cfg, shard_bytes=data.draw(st.integers(2000, 99999)))
    assert_same_bits(tensors_of(tmp_path / "back"), tensors)


def test_tokenizer_files_come_along_both_ways(tmp_path, source):
    (source / "tokenizer.json").write_text('{"a": 1}')
    (source / "modeling.py").write_text("raise SystemExit")
    convert_to_stacked(source, tmp_path / "out", hf.config())
    convert_to_hf(tmp_path / "out", tmp_path / "back", hf.config())
    assert (tmp_path / "back/tokenizer.json").read_text() == '{"a": 1}'
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "stacked", "tokenizer.json"}


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs but what the interpreter unwinds."""


def convert_until(monkeypatch, source, target, leaves: int) -> None:
    """A conversion that dies in the middle of a file after `leaves` files."""
    write, left = convert._write_leaf, [leaves]

    def dying(files, leaf, path, advance):
        if not left[0]:
            path.write_bytes(b"half a file")
            raise Killed
        left[0] -= 1
        return write(files, leaf, path, advance)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(convert, "_write_leaf", dying)
        convert_to_stacked(source, target, hf.config())


@pytest.mark.parametrize("leaves", [0, 1, 7])
def test_a_killed_conversion_is_continued(tmp_path, monkeypatch, source, leaves):
    convert_until(monkeypatch, source, tmp_path / "out", leaves)
    assert not (tmp_path / "out").exists()
    finished = {p.name: p.stat().st_mtime_ns for p in (tmp_path / ".out.partial/stacked").iterdir()}
    convert_to_stacked(source, tmp_path / "out", hf.config())
    now = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out/stacked").iterdir()}
    assert sum(finished.get(name) == time for name, time in now.items()) == leaves
    assert_same_bits(load(tmp_path / "out", hf.config()), load(source, hf.config()))
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_another_source_starts_afresh(tmp_path, monkeypatch, source):
    convert_until(monkeypatch, source, tmp_path / "out", 5)
    shutil.rmtree(source)
    hf.write(source, hf.random_tensors(hf.config(), seed=1))
    convert_to_stacked(source, tmp_path / "out", hf.config())
    assert_same_bits(load(tmp_path / "out", hf.config()), load(source, hf.config()))


def test_a_damaged_journal_starts_afresh(tmp_path, monkeypatch, source):
    convert_until(monkeypatch, source, tmp_path / "out", 5)
    (tmp_path / ".out.partial/journal.json").write_text('{"fingerprint"')
    convert_to_stacked(source, tmp_path / "out", hf.config())
    assert_same_bits(load(tmp_path / "out", hf.config()), load(source, hf.config()))


def test_an_existing_target_is_left_alone(source, stacked):
    with pytest.raises(FileExistsError, match="not empty"):
        convert_to_stacked(source, stacked, hf.config())
    with pytest.raises(FileExistsError, match="not empty"):
        convert_to_hf(source, stacked, hf.config())


def test_every_flipped_byte_of_the_data_is_found(stacked):
    for path in sorted(stacked.glob("stacked/*.safetensors")):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{path.name}: tensor {path.stem}: block 0 has a wrong checksum"):
            load(stacked, hf.config())
        content[-1] ^= 1
        path.write_bytes(content)
    load(stacked, hf.config())


def edit(stacked, change) -> None:
    path = stacked / "stacked/manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=1), "manifest of version 2; convert the checkpoint again"),
        (lambda m: m.update(format="zip"), "is not a dsv3-stacked manifest"),
        (lambda m: m.update(block_bytes=0), "lacks block_bytes"),
        (lambda m: m.update(block_bytes=1), "array .*: no block of 1 bytes fits"),
        (lambda m: m.pop("arrays"), "lacks block_bytes or arrays"),
        (lambda m: m["arrays"].pop("embed"), r"missing parameters \(1\): embed"),
        (
            lambda m: m["arrays"]["embed"].update(file="../x.safetensors"),
            "array embed: '../x.safetensors' is not a plain",
        ),
        (lambda m: m["arrays"]["embed"].update(file="norm.safetensors"), r"file lacks \(1\): embed in norm"),
        (lambda m: m["arrays"]["embed"].update(file="gone.safetensors"), "gone.safetensors: cannot be read"),
        (lambda m: m["arrays"]["embed"].update(checksums=[]), "array embed: checksums must be 1 integers"),
        (lambda m: m["arrays"]["embed"].update(checksums="x"), "array embed: checksums must be"),
        (lambda m: m["arrays"].update(embed=3), "array embed: None is not a plain file name"),
    ],
)
def test_a_manifest_that_lies_is_refused(stacked, change, message):
    edit(stacked, change)
    with pytest.raises(CheckpointError, match=message):
        load(stacked, hf.config())


def test_a_manifest_that_is_not_json_is_refused(stacked):
    (stacked / "stacked/manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest\.json: is not valid JSON"):
        load(stacked, hf.config())


def test_parameters_of_another_model_are_refused(stacked):
    with pytest.raises(CheckpointError, match=r"embed in embed.safetensors is \[40, 24\], expected \[41, 24\]"):
        load(stacked, hf.config(vocab_size=41))
    with pytest.raises(CheckpointError, match=r"unexpected parameters \(\d+\): dense\.attention\.q_b"):
        load(stacked, hf.config(q_lora_rank=None))


def test_mtp_modules_are_skipped_on_request(stacked, source):
    cfg = dataclasses.replace(hf.config(), num_nextn_predict_layers=0)
    assert_same_bits(load(stacked, cfg), load(source, cfg))


def test_data_begin_on_a_page(stacked):
    files = sorted(stacked.glob("stacked/*.safetensors"))
    assert files and all(min(t.offset for t in read_header(file).values()) % 4096 == 0 for file in files)
