"""Writing Hugging Face directories: what was loaded is written back to the bit, and the directory appears whole."""

import dataclasses
import json
import os

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from dsv3.checkpoint import CheckpointError, load_params, save_hf, writer
from dsv3.checkpoint.safetensors_file import read_directory
from dsv3.config.hugging_face import load_config
from dsv3.config.model import Fp8Config
from tests.dsv3.checkpoint import hf
from tests.dsv3.checkpoint.test_load import VARIANTS, configs
from tests.dsv3.checkpoint.trees import assert_same_bits, by_path, random_params


def tensors_of(directory) -> dict[str, np.ndarray]:
    """Every tensor of a directory, sliced out of the files by their headers."""
    return {
        name: np.fromfile(t.path, np.uint8, t.nbytes, offset=t.offset).view(t.dtype).reshape(t.shape)
        for name, t in read_directory(directory).items()
    }


def round_trip(tmp_path, cfg, tensors, **options):
    hf.write(tmp_path / "in", tensors)
    save_hf(tmp_path / "out", cfg, load_params(tmp_path / "in", cfg, dtype=hf.BF16, progress=False), **options)
    return tensors_of(tmp_path / "out")


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip_is_bit_exact(tmp_path, name):
    tensors = hf.random_tensors(VARIANTS[name])
    assert_same_bits(round_trip(tmp_path, VARIANTS[name], tensors), tensors)


@pytest.mark.parametrize(("scale_dtype", "scale_fmt"), [(np.float32, "float32"), (hf.E8M0, "ue8m0")])
def test_fp8_round_trip_is_bit_exact(tmp_path, scale_dtype, scale_fmt):
    """All tensors but kv_b_proj, which is dequantised on loading, come back; a second trip changes nothing."""
    cfg = hf.fp8_config(fp8=Fp8Config(scale_fmt=scale_fmt))
    tensors = hf.random_tensors(cfg, scale_dtype=scale_dtype)
    written = round_trip(tmp_path, cfg, tensors, scale_dtype=scale_dtype)
    assert any(a.dtype == hf.E4M3 for a in written.values())
    for name in [n for n in tensors if "kv_b_proj" in n]:
        if name.endswith("weight"):
            np.testing.assert_array_equal(written.pop(name), hf.real(tensors, name).astype(hf.BF16))
        del tensors[name]
    assert_same_bits({n: written[n] for n in tensors}, tensors)
    assert written.keys() == tensors.keys()
    again = load_params(tmp_path / "out", cfg, dtype=hf.BF16, progress=False)
    first = load_params(tmp_path / "in", cfg, dtype=hf.BF16, progress=False)
    assert_same_bits(by_path(cfg, again), by_path(cfg, first))


@given(cfg=configs(), shard_bytes=st.integers(200, 9000))
@settings(deadline=None, max_examples=10)
def test_any_configuration_and_shard_size_round_trips(tmp_path_factory, cfg, shard_bytes):
    tensors = hf.random_tensors(cfg)
    tmp_path = tmp_path_factory.mktemp("trip")
    assert_same_bits(round_trip(tmp_path, cfg, tensors, shard_bytes=shard_bytes), tensors)
    sizes = [t.nbytes for t in read_directory(tmp_path / "out").values()]
    data = [sum(t.nbytes for t in read_directory(tmp_path / "out").values() if t.path == p)
            for p in (tmp_path / "out").glob("*.safetensors")]  # fmt: skip
    assert max(data) <= max(shard_bytes, max(sizes))


def test_the_safetensors_package_reads_what_is_written(tmp_path):
    tensors = hf.random_tensors(hf.config())
    round_trip(tmp_path, hf.config(), tensors, shard_bytes=3000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "np") as shard:
            np.testing.assert_array_equal(shard.get_tensor(name), tensors[name], name)


def test_trained_parameters_survive(tmp_path):
    """A float32 router that bfloat16 cannot hold stays float32 in a fresh tree, and config.json describes it all."""
    cfg = hf.config()
    params = random_params(cfg, jnp.bfloat16)
    companions = [tmp_path / name for name in ("tokenizer.json", "encoding/encoding_dsv32.py")]
    (tmp_path / "encoding").mkdir()
    for path in companions:
        path.write_text("{}")
    save_hf(tmp_path / "out", cfg, params, companions=companions)
    names = {"config.json", "model.safetensors", "tokenizer.json", "encoding/encoding_dsv32.py"}
    out = tmp_path / "out"
    assert {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()} == names
    assert load_config(tmp_path / "out") == cfg
    written = tensors_of(tmp_path / "out")
    assert written["model.layers.2.mlp.gate.weight"].dtype == np.float32
    loaded = load_params(tmp_path / "out", cfg, dtype=jnp.bfloat16, progress=False)
    assert_same_bits(by_path(cfg, loaded), by_path(cfg, params))


def test_config_says_what_the_tensors_are(tmp_path):
    cfg = hf.fp8_config()
    hf.write(tmp_path / "in", hf.random_tensors(cfg))
    save_hf(tmp_path / "kept", cfg, load_params(tmp_path / "in", cfg, dtype=hf.BF16, progress=False))
    plain = load_params(tmp_path / "in", cfg, dtype=hf.BF16, fp8="dequantize", progress=False)
    save_hf(tmp_path / "plain", cfg, plain)
    kept = json.loads((tmp_path / "kept/config.json").read_text())
    assert load_config(tmp_path / "kept") == cfg
    excluded = set(kept["quantization_config"]["modules_to_not_convert"])
    assert {
        "lm_head",
        "model.layers.0.self_attn.kv_b_proj",
        "model.layers.4.eh_proj",
        "model.layers.2.mlp.gate",
    } < excluded
    assert not any("o_proj" in name for name in excluded)
    assert load_config(tmp_path / "plain") == dataclasses.replace(cfg, fp8=None)


def test_fp8_parameters_need_an_fp8_configuration(tmp_path):
    cfg = hf.fp8_config()
    hf.write(tmp_path / "in", hf.random_tensors(cfg))
    params = load_params(tmp_path / "in", cfg, dtype=hf.BF16, progress=False)
    with pytest.raises(ValueError, match="fp8 is None"):
        save_hf(tmp_path / "out", dataclasses.replace(cfg, fp8=None), params)


def test_scales_that_one_byte_cannot_hold_are_rejected(tmp_path):
    cfg = hf.fp8_config()
    with pytest.raises(ValueError, match=r"weight_scale_inv: .* not all representable in float8_e8m0fnu"):
        round_trip(tmp_path, cfg, hf.random_tensors(cfg), scale_dtype=hf.E8M0)
    assert not (tmp_path / "out").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_parameters_of_another_model_are_rejected(tmp_path):
    params = random_params(hf.config(), jnp.float32)
    with pytest.raises(ValueError, match=r"embed is \(40, 24\), expected \(41, 24\)"):
        save_hf(tmp_path / "out", hf.config(vocab_size=41), params)


def test_a_directory_that_holds_something_is_left_alone(tmp_path):
    cfg = hf.config()
    params = random_params(cfg, jnp.float32)
    (tmp_path / "out").mkdir()
    save_hf(tmp_path / "out", cfg, params)
    before = (tmp_path / "out/model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="not empty"):
        save_hf(tmp_path / "out", cfg, params)
    assert (tmp_path / "out/model.safetensors").read_bytes() == before


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    cfg = hf.config()
    params = random_params(cfg, jnp.float32)
    monkeypatch.setattr(writer, "_value", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        save_hf(tmp_path / "out", cfg, params)
    assert os.listdir(tmp_path) == []


def test_leftovers_of_a_killed_write_are_not_read_and_do_not_disturb(tmp_path):
    cfg = hf.config()
    params = random_params(cfg, jnp.float32)
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/junk").write_text("x")
    with pytest.raises(CheckpointError):
        load_params(tmp_path / "out", cfg, dtype=jnp.float32, progress=False)
    save_hf(tmp_path / "out", cfg, params)
    assert os.listdir(tmp_path) == ["out"] and not (tmp_path / "out/junk").exists()


@pytest.fixture
def events(tmp_path, monkeypatch):
    """The names of what is synced, in order, and the renames between."""
    seen = []

    def sync(descriptor):
        paths = (tmp_path, *tmp_path.rglob("*"))
        seen.append(next(path.name for path in paths if os.path.samestat(path.stat(), os.fstat(descriptor))))

    def noted(name, real):
        return lambda a, b: (seen.append(name), real(a, b))

    monkeypatch.setattr(os, "fsync", sync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    return seen


def test_files_are_durable_before_the_directory_appears(tmp_path, events):
    """Every file is synced before the rename and the parent after it."""
    save_hf(tmp_path / "out", hf.config(), random_params(hf.config(), jnp.float32))
    assert {"config.json", "model.safetensors", ".out.partial"} <= set(events[: events.index("rename")])
    assert events[events.index("rename") + 1 :] == [tmp_path.name]
