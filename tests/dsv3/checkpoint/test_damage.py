"""Damaged and foreign checkpoints: each is one `CheckpointError` that names the file and the tensor."""

import dataclasses
import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.checkpoint import CheckpointError, load_params, reader
from dsv3.checkpoint.safetensors_file import read_header
from tests.dsv3.checkpoint import hf

DOWN = "model.layers.3.mlp.experts.2.down_proj.weight"
Q_A = "model.layers.0.self_attn.q_a_proj.weight"


def load(directory, cfg, **options):
    return load_params(directory, cfg, **{"dtype": np.float32, "progress": False, **options})


def load_error(directory, cfg=None, **options) -> str:
    with pytest.raises(CheckpointError) as error:
        load(directory, cfg or hf.config(), **options)
    return str(error.value)


def written(tmp_path, change, cfg=None, shards=1):
    """A checkpoint whose tensors `change` has altered."""
    tensors = hf.random_tensors(cfg or hf.config())
    change(tensors)
    return hf.write(tmp_path / "in", tensors, shards)


@pytest.fixture
def sharded(tmp_path):
    return hf.write(tmp_path / "in", hf.random_tensors(hf.config()), shards=3)


def shard_of(directory, name):
    return directory / json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"][name]


def edit_index(directory, change):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def edit_header(path, change):
    """Rewrites a safetensors file with an altered header."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def test_missing_and_unexpected_tensors_are_reported_together_and_shortened(tmp_path):
    def change(tensors):
        for e in range(4):
            del tensors[f"model.layers.3.mlp.experts.{e}.up_proj.weight"]
        del tensors["model.norm.weight"], tensors["model.layers.4.shared_head.head.weight"]
        tensors["model.layers.0.mlp.gate.weight"] = np.zeros((4, 24), np.float32)

    message = load_error(written(tmp_path, change))
    assert "missing tensors (6): model.layers.3.mlp.experts.0.up_proj.weight; " in message
    assert "and 2 more" in message
    assert "unexpected tensors (1): model.layers.0.mlp.gate.weight in model.safetensors" in message
    assert len(message) < 1000


def test_known_buffers_are_ignored(tmp_path):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
        tensors["model.rotary_emb.inv_freq"] = np.ones(2, np.float32)

    load(written(tmp_path, change), hf.config())


def test_shapes_are_checked(tmp_path):
    message = load_error(written(tmp_path, lambda t: t.update({DOWN: np.zeros((24, 11), np.float32)})))
    assert f"wrong shapes (1): {DOWN} in model.safetensors is [24, 11], expected [24, 12]" in message
    assert "expected [41, 24]" in load_error(tmp_path / "in", hf.config(vocab_size=41))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float64, ml_dtypes.float8_e5m2])
def test_dtypes_are_checked(tmp_path, dtype):
    message = load_error(written(tmp_path, lambda t: t.update({DOWN: np.zeros((24, 12), dtype)})))
    assert f"wrong dtypes (1): {DOWN} in model.safetensors is " in message and "expected BF16/F16/F32" in message


def test_fp8_needs_matrices_scales_and_a_configuration(tmp_path):
    cfg = hf.fp8_config()
    name = Q_A
    path = written(tmp_path, lambda t: t.pop(name + "_scale_inv"), cfg)
    assert f"missing tensors (1): {name}_scale_inv" in load_error(path, cfg)
    path = written(tmp_path, lambda t: t.update({"model.norm.weight": np.zeros(200, hf.E4M3)}), cfg)
    assert "wrong dtypes (1): model.norm.weight in model.safetensors is F8_E4M3" in load_error(path, cfg)
    path = written(tmp_path, lambda t: None, cfg)
    assert "FP8 tensors although the configuration has no quantization_config" in load_error(
        path, dataclasses.replace(cfg, fp8=None)
    )


def test_a_scale_without_an_fp8_tensor_is_unexpected(tmp_path):
    extra = DOWN + "_scale_inv"
    message = load_error(written(tmp_path, lambda t: t.update({extra: np.ones((1, 1), np.float32)})))
    assert f"unexpected tensors (1): {extra}" in message


def test_scale_shape_and_dtype_are_checked(tmp_path):
    cfg, name = hf.fp8_config(), Q_A + "_scale_inv"
    path = written(tmp_path, lambda t: t.update({name: np.ones((2, 2), np.float32)}), cfg)
    assert f"{name} in model.safetensors is [2, 2], expected [1, 2]" in load_error(path, cfg)
    path = written(tmp_path, lambda t: t.update({name: np.ones((1, 2), np.float16)}), cfg)
    assert f"{name} in model.safetensors is F16, expected F32/F8_E8M0" in load_error(path, cfg)


@pytest.mark.parametrize("fp8", ["keep", "dequantize"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0, -1.0])
def test_scales_must_be_positive_and_finite(tmp_path, fp8, value):
    cfg, name = hf.fp8_config(), Q_A + "_scale_inv"
    message = load_error(written(tmp_path, lambda t: t[name].__setitem__((0, 1), value), cfg), cfg, fp8=fp8)
    assert f"model.safetensors: tensor {name}: a block scale is {value}" in message


def test_a_nan_in_a_one_byte_scale_is_found(tmp_path):
    cfg, name = hf.fp8_config(), Q_A + "_scale_inv"
    scale = np.ones((1, 2), hf.E8M0)
    scale.view(np.uint8)[0, 1] = 0xFF
    message = load_error(written(tmp_path, lambda t: t.update({name: scale}), cfg), cfg)
    assert f"tensor {name}: a block scale is nan" in message


def test_mtp_modules_of_the_config_are_required(tmp_path):
    def change(tensors):
        for name in [n for n in tensors if n.startswith("model.layers.4.")]:
            del tensors[name]

    message = load_error(written(tmp_path, change))
    assert "set num_nextn_predict_layers to what it has (1): layer 4" in message and "missing tensors" not in message


def test_a_layer_too_many_is_unexpected_unless_it_is_an_mtp_module(tmp_path):
    tensors = hf.random_tensors(hf.config(num_hidden_layers=5, num_nextn_predict_layers=0))
    message = load_error(hf.write(tmp_path, tensors), hf.config(num_nextn_predict_layers=0))
    assert "unexpected tensors (" in message and "model.layers.4." in message


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_mtp_copies_must_repeat_the_main_tensors(tmp_path, name):
    def change(tensors):
        tensors[f"model.layers.4.{name}.weight"] = tensors[f"model.layers.4.{name}.weight"].copy()
        tensors[f"model.layers.4.{name}.weight"][-1, -1] += 1

    main = "model.embed_tokens.weight" if name == "embed_tokens" else "lm_head.weight"
    message = load_error(written(tmp_path, change))
    assert f"tensor model.layers.4.{name}.weight: differs from {main}" in message


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    cfg = hf.config(tie_word_embeddings=True)
    load(written(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}), cfg), cfg)
    path = written(tmp_path, lambda t: t.update({"lm_head.weight": -t["model.embed_tokens.weight"]}), cfg)
    assert "tensor lm_head.weight: differs from model.embed_tokens.weight" in load_error(path, cfg)


def test_a_directory_without_safetensors(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "has neither" in (message := load_error(tmp_path)) and "pickled ones never" in message


def test_an_absent_shard(sharded):
    shard_of(sharded, DOWN).unlink()
    assert "shards named in the index but absent (1): " + shard_of(sharded, DOWN).name in load_error(sharded)


def test_a_truncated_shard(sharded):
    path = shard_of(sharded, DOWN)
    last = max(read_header(path).values(), key=lambda t: t.offset)
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path}: tensor {last.name}: ends at byte" in (message := load_error(sharded)) and "truncated" in message


@pytest.mark.parametrize("length", [0, 7, 8, 100])
def test_a_shard_cut_within_its_header(sharded, length):
    path = shard_of(sharded, DOWN)
    path.write_bytes(path.read_bytes()[:length])
    assert f"{path}: its first 8 bytes announce a header" in load_error(sharded)


def test_a_git_lfs_pointer_instead_of_a_shard(sharded):
    path = shard_of(sharded, DOWN)
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4302348800\n")
    assert load_error(sharded) == f"{path}: this file is a git-lfs pointer: run git lfs pull in its directory"


def test_a_file_that_shrinks_while_it_is_read(sharded, monkeypatch):
    path = shard_of(sharded, DOWN)
    opened = reader.CheckpointReader.open

    def shrinking(files, paths):
        opened(files, paths)
        path.write_bytes(path.read_bytes()[:-30])

    monkeypatch.setattr(reader.CheckpointReader, "open", shrinking)
    assert (
        f"{path}: tensor " in (message := load_error(sharded)) and "the file was truncated while it was read" in message
    )


def test_trailing_bytes(sharded):
    path = shard_of(sharded, DOWN)
    path.write_bytes(path.read_bytes() + b"??")
    assert f"{path}: 2 bytes follow the last tensor" in load_error(sharded)


@pytest.mark.parametrize(
    "file", ["../in/x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x.bin", "x\0.safetensors", "", 3, None]
)
def test_an_index_that_leads_outside(sharded, file):
    edit_index(sharded, lambda m: m.update({DOWN: file}))
    assert f"index.json: tensor {DOWN}: {file!r} is not the plain name" in load_error(sharded)


def test_an_index_that_disagrees_with_its_shards(sharded):
    other = next(p.name for p in sharded.glob("*.safetensors") if p != shard_of(sharded, DOWN))
    here = shard_of(sharded, DOWN).name
    edit_index(sharded, lambda m: m.update({DOWN: other}))
    message = load_error(sharded)
    assert f"the index places in a shard that lacks them (1): {DOWN} in {other}" in message
    assert f"in a shard where the index does not place them (1): {DOWN} in {here}" in message


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000])
def test_an_invalid_index(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json: " in load_error(sharded)


def swap_offsets(header):
    a, b = list(header)[-2:]
    header[a]["data_offsets"], header[b]["data_offsets"] = header[b]["data_offsets"], header[a]["data_offsets"]


def shift(header):
    for entry in header.values():
        entry["data_offsets"] = [n + 2 for n in entry["data_offsets"]]


def alter(**changes):
    return lambda header: header[DOWN].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (alter(dtype="F32"), f"tensor {DOWN}: data_offsets"),
        (alter(shape=[24, 13]), f"tensor {DOWN}: data_offsets"),
        (alter(shape=[2**62, 2**62]), f"tensor {DOWN}: data_offsets"),
        (alter(shape=[-24, -12]), "must list natural numbers"),
        (alter(shape=[24.0, 12]), "must list natural numbers"),
        (alter(shape=None), "must list natural numbers"),
        (alter(data_offsets=[0]), "must list natural numbers"),
        (alter(shape=[10**300] * 2000), "at most 8 of them"),
        (alter(shape=[10**300]), "below 2**63"),
        (alter(shape=[1] * 9), "at most 8 of them"),
        (alter(data_offsets=[True, 576]), "must list natural numbers"),
        (alter(data_offsets=[0, 576]), "overlaps the tensor before it"),
        (alter(dtype="F8_E4M3FNUZ"), "dtype 'F8_E4M3FNUZ' is not one of"),
        (alter(dtype=["F32"]), "is not one of"),
        (swap_offsets, "data_offsets"),
        (shift, "leaves a hole before it"),
        (lambda header: list(header), "is not a JSON object"),
        (lambda header: {DOWN: 3}, f"tensor {DOWN}: its header entry is not an object"),
    ],
)
def test_a_header_with_wrong_fields(sharded, change, message):
    path = shard_of(sharded, DOWN)
    edit_header(path, change)
    assert f"{path}: " in (error := load_error(sharded)) and message in error


@pytest.mark.parametrize("text", [b"{", b"\xff", b'{"a": 1, "a": 2}', b"[" * 100_000, b'{"a": ' + b"9" * 10_000 + b"}"])
def test_a_header_that_is_not_json(sharded, text):
    path = shard_of(sharded, DOWN)
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    assert f"{path}: " in load_error(sharded)


@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_no_damage_to_a_header_escapes_as_another_error(tmp_path_factory, data):
    """Overwrites any bytes of the header: the file loads or raises CheckpointError."""
    cfg = hf.config(num_hidden_layers=1, num_nextn_predict_layers=0, n_routed_experts=1)
    directory = tmp_path_factory.mktemp("fuzz")
    hf.write(directory, hf.random_tensors(cfg), shards=1)
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0]
    at = data.draw(st.integers(0, header - 1))
    junk = data.draw(st.binary(min_size=1, max_size=6) | st.sampled_from([b"0", b"9", b'"', b"}", b",", b"[]"]))
    content[at : at + len(junk)] = junk
    path.write_bytes(content)
    try:
        load(directory, cfg)
    except CheckpointError as error:
        assert str(directory) in str(error)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", None])
def test_a_pipe_is_rejected(sharded, name):
    path = shard_of(sharded, DOWN) if name is None else sharded / name
    path.unlink()
    os.mkfifo(path)
    assert str(path if name is None else sharded) in load_error(sharded)


def test_an_unreadable_file(sharded):
    path = shard_of(sharded, DOWN)
    path.unlink()
    path.mkdir()
    assert f"{path}: cannot be read: Is a directory" in load_error(sharded)
