"""Loading Hugging Face directories: every leaf against a plain numpy oracle."""

import dataclasses
import gc
import logging
import re
import threading

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv3.checkpoint import CheckpointError, layout, load_params, reader
from dsv3.checkpoint.source import ALIGNMENT, Source
from dsv3.config.options import EngineOptions
from dsv3.engine.build import bundled_model, load_components
from dsv3.model.params import Fp8Weight, declare
from pallas_kernels.fp8 import quantize_128x128
from tests.dsv3.checkpoint import hf
from tests.dsv3.checkpoint.trees import assert_same_bits, by_path

VARIANTS = {
    "v3": hf.config(),
    "v2_lite": hf.config(
        q_lora_rank=None,
        topk_method="greedy",
        scoring_func="softmax",
        norm_topk_prob=False,
        n_shared_experts=2,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
    ),
    "tied": hf.config(tie_word_embeddings=True, n_shared_experts=0, num_nextn_predict_layers=2),
    "all_dense": hf.config(first_k_dense_replace=4, num_nextn_predict_layers=0),
    "all_moe": hf.config(first_k_dense_replace=0, num_nextn_predict_layers=0),
}


def load(directory, cfg, **options):
    options = {"dtype": np.float32, "progress": False, **options}
    return by_path(cfg, load_params(directory, cfg, **options))


def wanted(cfg, tensors, dtype):
    values = hf.expected(cfg, tensors)
    gates = {tensor.dtype for name, tensor in tensors.items() if name.endswith("mlp.gate.weight")}
    dtypes = {"router": dtype if gates == {np.dtype(dtype)} else np.float32, "router_bias": np.float32}
    return {path: a.astype(dtypes.get(path.rpartition(".")[2], dtype)) for path, a in values.items()}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [np.float32, hf.BF16, np.float16])
def test_every_leaf_holds_its_tensors(tmp_path, name, dtype):
    cfg = VARIANTS[name]
    tensors = hf.random_tensors(cfg)
    hf.write(tmp_path, tensors, shards=1 if name == "tied" else 3)
    assert_same_bits(load(tmp_path, cfg, dtype=dtype), wanted(cfg, tensors, dtype))


@pytest.mark.parametrize(
    ("gates", "dtype", "kept"),
    [
        ((hf.BF16, hf.BF16), hf.BF16, hf.BF16),
        ((np.float32, np.float32), hf.BF16, np.float32),
        ((hf.BF16, np.float32), hf.BF16, np.float32),
        ((hf.BF16, hf.BF16), np.float32, np.float32),
        ((hf.BF16, hf.BF16), np.float16, np.float32),
    ],
)
def test_the_router_is_never_rounded(tmp_path, gates, dtype, kept):
    """It has the model's type only where all of its layers are stored so; a module's router goes by its own."""
    cfg = hf.config()
    tensors = hf.random_tensors(cfg, dtype=np.float32)
    for layer, stored in zip((2, 3), gates, strict=True):
        name = f"model.layers.{layer}.mlp.gate.weight"
        tensors[name] = tensors[name].astype(stored)
    hf.write(tmp_path, tensors)
    loaded = load(tmp_path, cfg, dtype=dtype)
    assert loaded["moe.moe.router"].dtype == kept
    for row, layer in zip(loaded["moe.moe.router"], (2, 3), strict=True):
        wide = tensors[f"model.layers.{layer}.mlp.gate.weight"].astype(np.float32)
        np.testing.assert_array_equal(row.astype(np.float32), wide)
    assert loaded["mtp.layers.moe.router"].dtype == loaded["moe.moe.router_bias"].dtype == np.float32


@pytest.mark.parametrize("scale_dtype", [np.float32, hf.E8M0])
@pytest.mark.parametrize("dtype", [np.float32, hf.BF16])
def test_fp8_is_dequantised_over_partial_blocks(tmp_path, dtype, scale_dtype):
    cfg = hf.fp8_config()
    tensors = hf.random_tensors(cfg, scale_dtype=scale_dtype)
    hf.write(tmp_path, tensors)
    assert_same_bits(load(tmp_path, cfg, dtype=dtype, fp8="dequantize"), wanted(cfg, tensors, dtype))


def test_published_partial_block_shape(tmp_path):
    """kv_a_proj_with_mqa of DeepSeek-V3: 576 x 7168 with 5 x 56 scales."""
    cfg = hf.fp8_config(
        hidden_size=7168, kv_lora_rank=512, qk_rope_head_dim=64, vocab_size=2, num_hidden_layers=1, n_routed_experts=1,
        first_k_dense_replace=1, num_nextn_predict_layers=0, intermediate_size=128,
    )  # fmt: skip
    tensors = hf.random_tensors(cfg)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert tensors[name].shape == (576, 7168) and tensors[name + "_scale_inv"].shape == (5, 56)
    hf.write(tmp_path, tensors)
    qkv_a = load(tmp_path, cfg, fp8="dequantize")["dense.attention.qkv_a"]
    np.testing.assert_array_equal(qkv_a[0, 128:], hf.real(tensors, name))


@pytest.mark.parametrize("scale_dtype", [np.float32, hf.E8M0])
def test_fp8_stays_fp8(tmp_path, scale_dtype):
    """Quantisable leaves keep the bytes of their tensors; the others, kv_b_proj's among them, are dequantised."""
    cfg = hf.fp8_config()
    tensors = hf.random_tensors(cfg, scale_dtype=scale_dtype)
    hf.write(tmp_path, tensors)
    kept = load(tmp_path, cfg, dtype=hf.BF16)
    multiplied = wanted(cfg, tensors, hf.BF16)
    for path, spec in layout.leaves(cfg).items():
        if not spec.quantizable or path == "mtp.proj":
            np.testing.assert_array_equal(kept[path], multiplied[path], err_msg=path)
            continue
        data, scale = kept[f"{path}.data"], kept[f"{path}.scale"]
        assert data.dtype == hf.E4M3 and scale.dtype == np.float32
        spread = scale.repeat(128, axis=-2).repeat(128, axis=-1)[..., : data.shape[-2], : data.shape[-1]]
        np.testing.assert_array_equal((data.astype(np.float32) * spread).astype(hf.BF16), multiplied[path], path)
    assert {"dense.attention.k_up", "moe.attention.v_up"} < kept.keys()


def test_fused_pair_that_splits_a_block_cannot_stay_fp8(tmp_path):
    cfg = hf.fp8_config(moe_intermediate_size=100)
    tensors = hf.random_tensors(cfg)
    hf.write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"moe\.moe\.gate_up: .*up_proj.*row 100") as error:
        load(tmp_path, cfg)
    assert "fp8='dequantize'" in str(error.value)
    assert_same_bits(load(tmp_path, cfg, fp8="dequantize"), wanted(cfg, tensors, np.float32))


def test_a_mixture_of_fp8_and_other_experts_cannot_stay_fp8(tmp_path):
    cfg = hf.fp8_config()
    tensors = hf.random_tensors(cfg)
    name = "model.layers.2.mlp.experts.1.down_proj.weight"
    tensors[name] = hf.real(tensors, name).astype(hf.BF16)
    del tensors[name + "_scale_inv"]
    hf.write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"moe\.moe\.down: .* is FP8 but .*experts\.1\.down_proj\.weight is not"):
        load(tmp_path, cfg)
    assert_same_bits(load(tmp_path, cfg, fp8="dequantize"), wanted(cfg, tensors, np.float32))


@st.composite
def configs(draw):
    layers = draw(st.integers(1, 3))
    return hf.config(
        hidden_size=draw(st.integers(1, 9)),
        num_hidden_layers=layers,
        num_attention_heads=draw(st.integers(1, 3)),
        kv_lora_rank=draw(st.integers(1, 5)),
        qk_nope_head_dim=draw(st.integers(1, 4)),
        v_head_dim=draw(st.integers(1, 4)),
        q_lora_rank=draw(st.none() | st.integers(1, 5)),
        first_k_dense_replace=draw(st.integers(0, layers)),
        n_routed_experts=draw(st.integers(1, 4)),
        n_shared_experts=draw(st.integers(0, 2)),
        num_nextn_predict_layers=draw(st.integers(0, 2)),
        topk_method=draw(st.sampled_from(["greedy", "noaux_tc"])),
        tie_word_embeddings=draw(st.booleans()),
    )


@given(cfg=configs())
@settings(deadline=None, max_examples=50)
def test_slices_tile_every_leaf_once(cfg):
    """The table covers each leaf without gap or overlap, and names exactly the tensors of the checkpoint."""
    names = {d.name for d in layout.duplicates(cfg) if d.required}
    for path, spec in layout.leaves(cfg).items():
        covered = np.zeros(spec.shape, int)
        for tensor_slice in layout.slices(cfg)[path]:
            covered[tensor_slice.target] += 1
            names.add(tensor_slice.name)
            assert np.empty(tensor_slice.view)[tensor_slice.source].shape == covered[tensor_slice.target].shape
        assert (covered == 1).all(), path
    assert names == hf.shapes(cfg).keys()


@given(cfg=configs(), block_bytes=st.integers(16, 400), data=st.data())
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_block_size_reads_the_same(tmp_path_factory, monkeypatch, cfg, block_bytes, data):
    directory = tmp_path_factory.mktemp("blocks")
    dtype = data.draw(st.sampled_from([np.float32, hf.BF16]))
    tensors = hf.random_tensors(cfg, dtype=dtype)
    hf.write(directory, tensors, shards=data.draw(st.integers(1, 3)))
    monkeypatch.setattr(reader, "BLOCK_BYTES", block_bytes)
    assert_same_bits(load(directory, cfg, threads=3), wanted(cfg, tensors, np.float32))


@pytest.mark.parametrize("fp8", ["keep", "dequantize"])
def test_devices_read_only_their_share(tmp_path, fp8):
    """Experts split over four devices and everything else replicated: the values and the shardings are as asked."""
    cfg = hf.fp8_config(n_routed_experts=8)
    hf.write(tmp_path, hf.random_tensors(cfg))
    mesh = Mesh(np.array(jax.devices()[:4][::-1]), ("d",))
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec(*("d" if a == "experts" else None for a in spec.axes))),
        declare(cfg),
    )
    plain = load_params(tmp_path, cfg, dtype=hf.BF16, fp8=fp8, progress=False)
    sharded = load_params(tmp_path, cfg, dtype=hf.BF16, fp8=fp8, shardings=shardings, progress=False)
    assert_same_bits(by_path(cfg, sharded), by_path(cfg, plain))
    experts = sharded.moe.moe.gate_up.data if fp8 == "keep" else sharded.moe.moe.gate_up
    assert experts.sharding == shardings.moe.moe.gate_up
    assert {s.data.shape for s in experts.addressable_shards} == {(2, 2, 256, 200)}
    assert sharded.embed.sharding.is_fully_replicated


@pytest.mark.parametrize("stored", ["plain", "fp8"])
def test_plain_products_become_fp8_on_their_devices(tmp_path, stored):
    """Each stack is rounded where it lies, as if files had it so; FP8 ones and all else stay as they are."""
    cfg = hf.fp8_config() if stored == "fp8" else hf.config(num_nextn_predict_layers=0)
    hf.write(tmp_path, hf.random_tensors(cfg, dtype=np.float32))
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec(*("d" if a == "experts" else None for a in spec.axes))),
        declare(cfg),
    )
    kept = load_params(tmp_path, cfg, dtype=np.float32, shardings=shardings, progress=False)
    how = dict(dtype=np.float32, shardings=shardings, fp8="quantize", progress=False)
    rounded = load_params(tmp_path, cfg, **how)
    described = jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), load_params(tmp_path, cfg, shapes=True, **how))
    assert described == jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), rounded)
    if stored == "fp8":
        return assert_same_bits(by_path(cfg, rounded), by_path(cfg, kept))
    is_quantizable = jax.tree.map(lambda spec: spec.quantizable, declare(cfg))

    def check(quantizable, before, after):
        if not quantizable:
            return np.testing.assert_array_equal(after, before)
        data, scale = jax.jit(quantize_128x128)(np.asarray(before))
        np.testing.assert_array_equal(np.asarray(after.data).view(np.uint8), np.asarray(data).view(np.uint8))
        np.testing.assert_array_equal(after.scale, scale)
        assert after.data.sharding == after.scale.sharding == before.sharding
        assert not any(shard.data.unsafe_buffer_pointer() % ALIGNMENT for shard in after.data.addressable_shards)

    jax.tree.map(check, is_quantizable, kept, rounded)


def test_columns_may_be_split(tmp_path):
    cfg = hf.config(num_attention_heads=4)
    tensors = hf.random_tensors(cfg)
    hf.write(tmp_path, tensors)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    axes = {"heads": "x", "vocab": "y"}
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec(*(axes.get(a) for a in spec.axes))), declare(cfg)
    )
    loaded = load_params(tmp_path, cfg, dtype=np.float32, shardings=shardings, progress=False)
    assert_same_bits(by_path(cfg, loaded), wanted(cfg, tensors, np.float32))


def test_data_and_scale_may_be_sharded_apart(tmp_path):
    cfg = hf.fp8_config()
    hf.write(tmp_path, hf.random_tensors(cfg))
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    rows = NamedSharding(mesh, PartitionSpec(None, "d"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda _: everywhere, declare(cfg))
    attention = dataclasses.replace(shardings.moe.attention, q_b=Fp8Weight(rows, everywhere))
    shardings = dataclasses.replace(shardings, moe=dataclasses.replace(shardings.moe, attention=attention))
    loaded = load_params(tmp_path, cfg, dtype=hf.BF16, shardings=shardings, progress=False)
    assert loaded.moe.attention.q_b.data.sharding == rows
    assert loaded.moe.attention.q_b.scale.sharding == everywhere


def test_shardings_of_another_model_are_rejected(tmp_path):
    cfg = hf.config()
    hf.write(tmp_path, hf.random_tensors(cfg))
    shardings = jax.tree.map(lambda _: jax.devices()[0], declare(hf.config(q_lora_rank=None)))
    with pytest.raises(ValueError, match=r"do not match the model.*dense\.attention\.q_b"):
        load(tmp_path, cfg, shardings=shardings)


def test_mtp_modules_beyond_the_configuration_are_skipped_and_logged(tmp_path, caplog):
    cfg = hf.config(num_nextn_predict_layers=2)
    tensors = hf.random_tensors(cfg)
    hf.write(tmp_path, tensors)
    fewer = dataclasses.replace(cfg, num_nextn_predict_layers=0)
    with caplog.at_level(logging.INFO):
        loaded = load(tmp_path, fewer)
    assert "layers that make drafts, from 4 on, are not loaded" in caplog.text
    assert_same_bits(loaded, wanted(fewer, tensors, np.float32))


def test_progress_tells_bytes_and_throughput(tmp_path, capsys):
    cfg = hf.config()
    hf.write(tmp_path, hf.random_tensors(cfg))
    load(tmp_path, cfg, progress=True)
    assert "loading: " in (line := capsys.readouterr().err) and "/s" in line
    load(tmp_path, cfg)
    assert capsys.readouterr().err == ""


def test_a_process_without_a_bar_logs_how_far_it_is(tmp_path, caplog, monkeypatch):
    """A follower's is read in its log: a load of hours must not look like a hang."""
    cfg = hf.config()
    hf.write(tmp_path, hf.random_tensors(cfg))
    caplog.set_level(logging.INFO, "dsv3.checkpoint.load")
    load(tmp_path, cfg)
    [line] = caplog.messages
    assert re.fullmatch(r"loading: \S+ .?B in \S+ s, .*B/s", line)
    caplog.clear()
    monkeypatch.setattr("dsv3.checkpoint.load._EVERY_S", 0.0)
    load(tmp_path, cfg)
    *parts, last = caplog.messages
    assert len(parts) > 10 and last.startswith("loading: ")
    total = re.match(r"loading: (.*B) in ", last)[1]
    assert f"loading: {total} of {total}, " in parts[-1]


def test_the_garbage_collector_is_left_as_it_was(tmp_path):
    """It rests while a load is planned, also when the plan fails."""
    hf.write(tmp_path, hf.random_tensors(hf.config()))
    load(tmp_path, hf.config())
    assert gc.isenabled()
    with pytest.raises(CheckpointError):
        load(tmp_path, hf.config(vocab_size=41))
    assert gc.isenabled()


@pytest.mark.parametrize(("option", "value"), [("dtype", np.int8), ("fp8", "maybe")])
def test_unknown_options_are_rejected(tmp_path, option, value):
    with pytest.raises(ValueError, match=str(np.dtype(value) if option == "dtype" else value)):
        load(tmp_path, hf.config(), **{option: value})


@pytest.mark.parametrize("threads", [1, 3])
def test_as_many_threads_read_as_the_option_of_an_engine_says(monkeypatch, threads):
    """The first reads wait for each other, so that fewer threads would not do."""
    names: list[str] = []
    together = threading.Barrier(threads)
    right = Source.read

    def read(source: Source, start: int, out: np.ndarray) -> int:
        names.append(threading.current_thread().name)
        if len(names) <= threads:
            together.wait(60)
        return right(source, start, out)

    monkeypatch.setattr(Source, "read", read)
    load_components(bundled_model(), EngineOptions(load_threads=threads), progress=False)
    assert set(names) == {f"checkpoint_{number}" for number in range(threads)}
