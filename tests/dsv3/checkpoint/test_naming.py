"""Other families' forms of a checkpoint: experts in one tensor, scales of whole tensors, parts that are not loaded."""

import dataclasses
import logging
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dsv3.checkpoint import CheckpointError, load_params
from dsv3.checkpoint.hugging_face import to_deepseek_names
from dsv3.checkpoint.safetensors_file import Tensor, read_directory
from dsv3.model.params import Fp8Weight
from tests.dsv3.checkpoint import hf

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16


def value(tensor: Tensor) -> np.ndarray:
    """What a window of a file holds."""
    raw = tensor.path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
    return np.frombuffer(raw, tensor.dtype).reshape(tensor.shape)


def form(directory: Path, tensors: dict[str, np.ndarray]) -> dict[str, Tensor]:
    save_file(tensors, directory / "model.safetensors")
    return to_deepseek_names(directory, read_directory(directory))


def test_experts_in_one_tensor_become_windows_of_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    gate_up, down = (rng.normal(size=shape).astype(BF16) for shape in ((3, 10, 4), (3, 4, 5)))
    stem = "model.layers.2.mlp.experts"
    found = form(tmp_path, {f"{stem}.gate_up_proj": gate_up, f"{stem}.down_proj": down})
    assert len(found) == 9
    for e in range(3):
        np.testing.assert_array_equal(value(found[f"{stem}.{e}.gate_proj.weight"]), gate_up[e, :5])
        np.testing.assert_array_equal(value(found[f"{stem}.{e}.up_proj.weight"]), gate_up[e, 5:])
        np.testing.assert_array_equal(value(found[f"{stem}.{e}.down_proj.weight"]), down[e])


@pytest.mark.parametrize("shape", [(), (0, 4, 4), (2**12 + 1, 1), (5,), (3, 0, 2), (2, 3)])
def test_experts_of_odd_shapes_are_left_to_the_plan(tmp_path: Path, shape: tuple[int, ...]) -> None:
    found = form(tmp_path, {"model.layers.2.mlp.experts.gate_up_proj": np.zeros(shape, np.uint8)})
    assert len(found) <= 2 * 5


def test_a_scale_of_a_whole_tensor_stands_for_its_blocks(tmp_path: Path) -> None:
    stem = "model.layers.2.mlp.experts"
    tensors = {
        f"{stem}.gate_up_proj": np.ones((2, 260, 130), E4M3),
        f"{stem}.gate_up_proj_scale_inv": np.asarray([[[0.5]], [[0.25]]], BF16),
        f"{stem}.gate_up_proj_activation_scale": np.ones(2, np.float32),
        "model.layers.0.mlp.down_proj.weight": np.ones((300, 10), E4M3),
        "model.layers.0.mlp.down_proj.weight_scale_inv": np.asarray(2.0, np.float32),
        "model.layers.0.mlp.down_proj.activation_scale": np.asarray(2.0, np.float32),
        "model.layers.0.mlp.down_proj.input_scale": np.asarray(2.0, np.float32),
    }
    found = form(tmp_path, tensors)
    scale = found["model.layers.0.mlp.down_proj.weight_scale_inv"]
    assert (scale.shape, scale.repeated) == ((3, 1), True)
    for name in ("gate_proj", "up_proj"):
        scale = found[f"{stem}.1.{name}.weight_scale_inv"]
        assert (scale.shape, scale.repeated) == ((2, 2), True)
        assert value(dataclasses.replace(scale, shape=())) == 0.25
    assert not [name for name in found if "activation" in name or "input" in name]


def test_other_media_are_left_out_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ones = np.ones(2, np.float32)
    tensors = {"language_model.model.norm.weight": ones, "vision_tower.a": ones, "mm_projector.b": ones}
    with caplog.at_level(logging.INFO):
        assert set(form(tmp_path, tensors)) == {"model.norm.weight"}
    assert "2 tensors of other media" in caplog.text


def test_two_tensors_of_one_name_are_rejected(tmp_path: Path) -> None:
    ones = np.ones(2, np.float32)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight, of .*norm\.weight"):
        form(tmp_path, {"norm.weight": ones, "model.norm.weight": ones})


@pytest.mark.parametrize("fp8", ["keep", "dequantize"])
def test_a_checkpoint_with_whole_scales_loads_like_one_with_blocks(tmp_path: Path, fp8: str) -> None:
    """The same weights twice: with a grid of equal scales, and with one bfloat16 scale for each tensor."""
    cfg = hf.fp8_config()
    whole = hf.random_tensors(cfg)
    grids = dict(whole)
    for name in [name for name in whole if name.endswith("_scale_inv")]:
        first = whole[name].flat[0].astype(BF16)
        grids[name], whole[name] = np.full_like(whole[name], first), np.asarray(first)
    assert any(grid.size > 1 for name, grid in grids.items() if name.endswith("_scale_inv"))
    one, other = (
        load_params(hf.write(tmp_path / title, tensors), cfg, dtype="float32", fp8=fp8, progress=False)
        for title, tensors in (("grids", grids), ("whole", whole))
    )
    assert isinstance(other.moe.attention.o, Fp8Weight) == (fp8 == "keep")
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_whole_scale_that_is_no_number_is_rejected(tmp_path: Path) -> None:
    cfg = hf.fp8_config()
    tensors = hf.random_tensors(cfg)
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    tensors[name] = np.asarray(np.nan, BF16)
    with pytest.raises(CheckpointError, match="not a positive finite number"):
        load_params(hf.write(tmp_path, tensors), cfg, dtype="float32", progress=False)
