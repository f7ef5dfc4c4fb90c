"""`--check_kernels`: what a check says, and how it ends, decides what an engine serves with, in all processes alike."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.engine import kernel_checks, stored
from dsv3.engine.build import build_engine, bundled_model, load_components
from dsv3.engine.cluster.start import kept_programs
from dsv3.engine.errors import KernelCheckError
from dsv3.engine.kernel_checks import Replaced, agree, check_kernels
from dsv3.model import forms
from dsv3.server.engine.factory import start_engine
from dsv3.server.engine.messages import Start
from pallas_kernels import native
from pallas_kernels.backend import OPERATIONS, PARTS, Backend, fallbacks, set_fallbacks
from tests.dsv3.engine.cluster.local import write_key
from tests.dsv3.engine.driving import request, run
from tests.dsv3.engine.fewer import greedy_samplers, one_bucket
from tests.dsv3.model.golden import DIRECTORY, data

SCRIPT = str(Path(__file__).with_name("played_checks.py"))
HAS = {
    "native": ["layer_gemm", "mla_decode", "rms_norm"],
    "mosaic": ["fp8_gemm", "mla_decode"],
    "triton": ["mla_decode"],
}
Play = Callable[..., None]


@pytest.fixture(autouse=True)
def nothing_replaced() -> Iterator[None]:
    check_kernels.cache_clear()
    yield
    check_kernels.cache_clear()
    set_fallbacks({})


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Plays the checks of a device."""

    def begin(backend: str = "native", **plan) -> None:
        command = (sys.executable, "-S", SCRIPT, json.dumps({"backend": backend, "has": HAS} | plan))
        monkeypatch.setattr(kernel_checks, "_DEVICE", command)
        monkeypatch.setattr(kernel_checks, "_CHECKS", command)

    return begin


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("fails", "ragged: is off by 3.1, allowed 0.01 (and 1 more)"),
        ("crashes", "the check ends after 1 cases: ended by SIGKILL; it says nothing"),
        ("raises", "the check ends after 1 cases: exit status 1; RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("breaks off", """: printed no row: '{"case": "ragg'"""),
        ("empty", "the check has no case"),
    ],
)
def test_a_check_that_does_not_pass_costs_its_operation_alone(how, says, play) -> None:
    play(ends={"mla_decode native": how})
    assert check_kernels() == {"mla_decode": Replaced("reference", says)}


def test_where_all_pass_nothing_is_replaced_and_a_process_checks_once(play, caplog) -> None:
    play()
    with caplog.at_level(logging.INFO, logger="dsv3.engine.kernel_checks"):
        assert check_kernels() == {} == check_kernels()
    assert [line.split(":")[0] for line in caplog.messages] == [
        "checking 3 native kernels",
        *(f"{name} on native" for name in HAS["native"]),
    ]


@pytest.mark.parametrize(
    ("triton", "instead"),
    [("passes", "triton"), ("fails", "reference"), ("untried", "reference"), ("raises", "reference")],
)
def test_on_hopper_a_triton_form_that_passes_takes_the_place(triton, instead, play) -> None:
    play("mosaic", ends={"mla_decode mosaic": "fails", "fp8_gemm mosaic": "raises", "mla_decode triton": triton})
    found = check_kernels()
    assert {name: each.backend for name, each in found.items()} == {"mla_decode": instead, "fp8_gemm": "reference"}


def test_a_part_that_fails_costs_the_operations_that_have_it(play) -> None:
    """Some of these may be right at the shapes of their own checks."""
    has = {"mosaic": ["mla_decode", "mla_prefill", "combine_splits"], "triton": ["mla_decode"]}
    play("mosaic", has=has, ends={"combine_splits mosaic": "fails"})
    says = "combine_splits: ragged: is off by 3.1, allowed 0.01 (and 1 more)"
    assert check_kernels() == {
        "mla_decode": Replaced("triton", says),
        "mla_prefill_context": Replaced("reference", says),
    }
    assert set().union(*PARTS.values()) < OPERATIONS


def test_other_gpus_do_not_try_the_same_kernel_twice(play) -> None:
    play("triton", ends={"mla_decode triton": "fails"})
    assert check_kernels()["mla_decode"].backend == "reference"


def test_a_device_without_kernels_has_none_to_check(play, caplog) -> None:
    play("reference", list="raises")
    assert check_kernels() == {}
    assert "this device has none" in caplog.text


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"list": "crashes"}, "the checks cannot run: .* ended by SIGKILL"),
        ({"list": "untried"}, "the checks cannot run: .* exit status 2; no device of this kind"),
        ({"has": {}}, "the checks cannot run: .* it says nothing"),
        ({"ends": {"rms_norm native": "untried"}}, r"the check of rms_norm cannot run \(no device of this kind\)"),
        (
            {"has": {"native": ["new_op"]}, "ends": {"new_op native": "fails"}},
            "new_op fails .* nothing can take its place",
        ),
    ],
)
def test_checks_that_cannot_run_end_the_start(plan, says, play) -> None:
    """Somebody has asked for them. A model that cannot be served is refused before they take their time."""
    play(**plan)
    with pytest.raises(KernelCheckError, match=says):
        build_engine(bundled_model(), EngineOptions(check_kernels=True), progress=False)
    with pytest.raises(ValueError, match="max_model_len: 1000000000 is greater"):
        build_engine(bundled_model(), EngineOptions(check_kernels=True, max_model_len=10**9), progress=False)
    assert fallbacks() == {}


def test_a_program_that_is_not_there_ends_the_start(play, monkeypatch) -> None:
    monkeypatch.setattr(kernel_checks, "_DEVICE", ("/nowhere/python",))
    with pytest.raises(KernelCheckError, match="/nowhere/python: No such file"):
        check_kernels()


def test_a_process_that_holds_the_gpu_checks_nothing(play, monkeypatch) -> None:
    """The checks would find no memory, and every kernel would fail."""
    play()
    jax.devices()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(KernelCheckError, match="has taken this device's memory already"):
        check_kernels()


def test_checks_get_a_small_pool_whatever_the_server_has(play, monkeypatch) -> None:
    """jaxlib refuses two names of one share."""
    seen: list[dict[str, str]] = []
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    real = kernel_checks.run_limited
    monkeypatch.setattr(kernel_checks, "run_limited", lambda c, s, e: (seen.append(dict(e)), real(c, s, e))[1])
    play()
    check_kernels(gpu=3)
    assert {env["JAX_CUDA_VISIBLE_DEVICES"] for env in seen} == {"3"}
    assert {(env.get("XLA_CLIENT_MEM_FRACTION"), env.get("XLA_PYTHON_CLIENT_MEM_FRACTION")) for env in seen} == {
        ("0.1", None)
    }
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.9"


def test_processes_replace_what_fails_in_any_of_them() -> None:
    one, other = Replaced("triton", "differs"), Replaced("reference", "hangs")
    assert agree({0: {}, 1: {}}) == {}
    assert agree({0: {"a": one}, 1: {"a": one}}) == {"a": Replaced("triton", "process 0: differs; process 1: differs")}
    # The Triton form was not checked in process 0, or failed there.
    assert agree({0: {}, 1: {"a": one}}) == {"a": Replaced("reference", "process 1: differs")}
    assert agree({0: {"a": other}, 1: {"a": one}})["a"].backend == "reference"
    assert list(agree({0: {"b": other}, 1: {"a": one}})) == ["a", "b"]


@pytest.mark.optimised
def test_an_engine_serves_the_same_texts_without_the_kernels_that_fail(play, monkeypatch, caplog) -> None:
    """Kernels that hang, crash and differ are never called again; the log, the front and the model's line say so."""

    def broken(*_, **__):
        raise AssertionError("a kernel that has failed its check")

    for name in ("decode_attention", "rms_norm", "layer_product"):
        monkeypatch.setattr(native, name, broken)
    monkeypatch.setattr(forms, "LOOKING", ())
    real = kernel_checks.run_limited
    monkeypatch.setattr(kernel_checks, "run_limited", lambda c, s, e: real(c, 1.0 if "mla_decode" in c else s, e))
    play(ends={"mla_decode native": "hangs", "rms_norm native": "crashes", "layer_gemm native": "fails"})
    limits = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 128, "max_num_batched_tokens": 64}
    progress: list[str] = []
    host = SimpleNamespace(progress=lambda text, *_: progress.append(text))
    options = EngineOptions(check_kernels=True, **limits)
    with one_bucket(), greedy_samplers():
        engine, info = start_engine(Start("", str(DIRECTORY / "glm4_moe_lite"), options), host)
    golden = data("glm4_moe_lite")
    prompts = [row[row >= 0].tolist() for row in golden["prompts"][2:5]]
    found = run(engine, *(request(str(i), p, max_tokens=6, ignore_eos=True) for i, p in enumerate(prompts)))
    assert [found[str(i)].tokens for i in range(3)] == golden["greedy"][2:5, :6].tolist()
    assert info.kernel_fallbacks == dict.fromkeys(HAS["native"], "reference")
    assert "; mla_decode by reference, because its kernel fails its check" in info.model
    loud = [line for line in caplog.messages if line.startswith("THE KERNEL OF")]
    assert len(loud) == 3 and "layer_gemm FAILS ITS CHECK: ragged: is off by" in loud[0] and "killed after" in loud[1]
    assert progress[0] == "checking the kernels, then loading the weights"


def test_programs_with_a_replaced_kernel_are_never_taken_for_those_without(tmp_path) -> None:
    """Nor are two processes with different tables one instance; Triton's kernels are not kept."""
    options = EngineOptions(compilation_cache_dir=str(tmp_path), max_model_len=64)
    parts = load_components(bundled_model(), options, progress=False, shapes=True)
    secret = write_key(tmp_path)
    cluster = ClusterOptions(coordinator="localhost:1", num_processes=2, process_id=1, cluster_key_file=secret)
    fields, names = [], []
    for table in ({}, {"mla_decode": Backend.REFERENCE}, {"rms_norm": Backend.REFERENCE}):
        set_fallbacks(table)
        fields.append(stored.device_fields(parts)["kernels"])
        names.append({store._names for store in (stored.own_store(bundled_model(), options, parts),
                                                 kept_programs(cluster, bundled_model(), options, parts))})  # fmt: skip
    assert len(set(fields)) == 3 and fields[1].endswith(", mla_decode by reference")
    assert len(set.union(*names)) == 6
    set_fallbacks({"mla_decode": Backend.TRITON})
    assert "not kept" in str(stored.own_store(bundled_model(), options, parts))
