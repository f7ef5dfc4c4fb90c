"""The account of a device's memory, and an engine sized by it: a CPU that reports a memory limit."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv3.config.options import EngineOptions
from dsv3.engine import build
from dsv3.engine.build import build_engine
from dsv3.engine.device import pool
from dsv3.engine.device.programs import largest
from dsv3.engine.engine import Engine
from dsv3.engine.memory import DeviceMemory, MemoryAccount, WorkingMemoryFile, account, check_beside, check_fits
from tests.dsv3.engine import fewer
from tests.dsv3.engine.conftest import parts
from tests.dsv3.model.golden import DIRECTORY

H100, H200 = 84_900_000_000, 150_100_000_000
SPREAD = EngineOptions(data_parallel_size=8, enable_expert_parallel=True)
OPTIONS = EngineOptions(dtype="float32", max_num_seqs=16, max_model_len=1024, max_num_batched_tokens=64)
TOTAL = 3_500_000
"""Bytes of a device in which the small model has some pages."""


def on(total: int, share: float = 0.92, **sizes: int) -> MemoryAccount:
    """A card of which jax's pool has a fraction, and an engine that may use 0.9."""
    return account(DeviceMemory(total, int(total * share)), 0.9, **({"state": 0, "page_size": 64} | sizes))


@pytest.mark.parametrize(
    ("total", "weights", "working", "page", "tokens"),
    [
        (H100, 31.4e9, 1.62e9, 64 * 31_104, 1_395_000),  # DeepSeek-V2-Lite
        (H100, 59.9e9, 1.9e9, 64 * 54_144, 270_000),  # GLM-4.7-Flash, which jax's own pool of 0.75 could not hold
        (H200, 98.6e9, 2.1e9, 64 * 70_272, 489_000),  # DeepSeek-V3 on eight, neither
    ],
)
def test_real_cards(total: int, weights: float, working: float, page: int, tokens: int) -> None:
    sizes = {"weights": int(weights), "working": int(working), "page": page}
    assert on(total, **sizes).tokens == pytest.approx(tokens, rel=0.01)
    assert on(total, **sizes).cache + weights + working <= 0.9 * total
    assert on(total, 0.75, **sizes).pool == int(0.75 * total), "no more than jax has"


def test_one_line_says_where_memory_goes() -> None:
    found = on(H100, weights=31_400_000_000, working=1_600_000_000, page=64 * 31_104, state=200_000_000)
    assert str(found) == (
        "84.9 GB in all, 76.41 of them for this engine: weights 31.40, state 0.20, working memory 1.60, "
        "cache 43.21 GB (1,389,184 tokens)"
    )
    assert "in use before 5.00" in str(dataclasses.replace(found, in_use=5_000_000_000))


def test_memory_in_use_does_not_change_the_programs() -> None:
    """They are stored by the number of pages, among others; a page of DeepSeek-V3 takes 4.5 MB."""
    sizes = {"weights": 98_600_000_000, "working": 2_100_000_000, "page": 64 * 70_272, "state": 0, "page_size": 64}
    memory = DeviceMemory(H200, int(H200 * 0.92))
    held = (256, 10_000_000, 60_000_000)
    found = [account(dataclasses.replace(memory, in_use=each), 0.9, **sizes) for each in held]
    assert len({each.pages for each in found}) == 1
    assert all(each.in_use >= before for each, before in zip(found, held, strict=True))
    assert account(memory, 0.9, **sizes).pages - found[0].pages <= 15


@pytest.mark.parametrize(
    ("found", "options", "devices", "advice"),
    [
        (
            on(H200, weights=671_000_000_000, working=0, page=64 * 70_272),
            EngineOptions(),
            1,
            "spread the routed experts over at least 5 devices (data_parallel_size 5 and enable_expert_parallel)",
        ),
        (on(H100, weights=98_600_000_000, working=0, page=64 * 70_272), SPREAD, 8, "use more than 8 devices"),
        (
            on(H100, weights=70_000_000_000, working=8_000_000_000, page=64 * 70_272),
            SPREAD,
            8,
            "lower max_num_batched_tokens or max_num_seqs, which determine working memory, or raise "
            "gpu_memory_utilization (now 0.9)",
        ),
    ],
)
def test_what_does_not_fit_names_what_to_change(found, options, devices, advice) -> None:
    with pytest.raises(ValueError, match="the model does not fit") as caught:
        check_fits(found, options, devices=devices, spreads=True)
    assert advice in str(caught.value) and "use devices with more memory" in str(caught.value)


@pytest.fixture
def share(monkeypatch) -> dict[str, str]:
    """The environment before jax has started."""
    environment: dict[str, str] = {}
    monkeypatch.setattr(pool, "os", SimpleNamespace(environ=environment))
    monkeypatch.setattr(pool.xla_bridge, "backends_are_initialized", lambda: False)
    return environment


def test_the_pool_gets_what_the_engine_may_use_and_slack(share, monkeypatch) -> None:
    pool.set_memory_fraction(0.9)
    assert share == {"XLA_CLIENT_MEM_FRACTION": "0.9200"}
    pool.set_memory_fraction(0.5)
    assert share == {"XLA_CLIENT_MEM_FRACTION": "0.9200"}, "a second engine shares the pool of the first"
    share.clear()
    pool.set_memory_fraction(1.0)
    assert float(share.pop("XLA_CLIENT_MEM_FRACTION")) < 1, "CUDA needs some"
    share["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.5"  # jax refuses both
    pool.set_memory_fraction(0.9)
    assert share == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    share.clear()
    monkeypatch.setattr(pool.xla_bridge, "backends_are_initialized", lambda: True)
    pool.set_memory_fraction(0.9)
    assert share == {}, "jax has its pool already"


def device(platform: str, stats: dict[str, int] | None) -> Any:
    return SimpleNamespace(platform=platform, device_kind="NVIDIA H100", memory_stats=lambda: stats)


@pytest.mark.parametrize(
    ("given", "fraction"), [({}, 0.75), ({"XLA_CLIENT_MEM_FRACTION": "0.92"}, 0.92), ({pool._FRACTIONS[1]: "0.5"}, 0.5)]
)
def test_the_cards_total_is_behind_the_pools(share, given, fraction) -> None:
    share |= given
    stats = {"bytes_limit": int(H100 * fraction), "bytes_in_use": 7}
    found = pool.device_memory(device("cuda", stats))
    assert found is not None and found.total == pytest.approx(H100)
    assert (found.pool, found.in_use) == (stats["bytes_limit"], 7)
    assert pool.device_memory(device("cpu", None)) is None


def test_an_allocator_without_a_pool_is_refused(share) -> None:
    share["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
    with pytest.raises(ValueError, match="XLA_PYTHON_CLIENT_ALLOCATOR=platform has no pool; unset it"):
        pool.device_memory(device("cuda", None))


def gpus(*numbers: int, pool_bytes: int) -> list[Any]:
    stats = {"bytes_limit": pool_bytes}
    return [
        SimpleNamespace(platform="cuda", local_hardware_id=number, memory_stats=lambda: stats) for number in numbers
    ]


@pytest.mark.parametrize(
    ("visible", "asked"),
    [(None, "--id=1,3"), ("4,5,6,7", "--id=5,7"), ("A, B,C,D", "--id=B,D")],
)
def test_memory_outside_the_pool_is_that_of_the_fullest_gpu(tmp_path, monkeypatch, visible, asked) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f'#!/bin/sh\nprintf "%s " "$@" > {tmp_path}/arguments\nprintf "1000\\n1300\\n"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert pool.memory_outside_pool(gpus(1, 3, pool_bytes=900 * 2**20)) == 400 * 2**20
    assert (tmp_path / "arguments").read_text().split()[-1] == asked


@pytest.mark.parametrize("script", [None, "exit 9", "echo No devices were found", "echo 1000", "sleep 600"])
def test_a_start_continues_without_nvidia_smi(tmp_path, monkeypatch, script) -> None:
    if script is not None:
        command = tmp_path / "nvidia-smi"
        command.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(pool, "_QUERY_S", 0.3)
    assert pool.memory_outside_pool(gpus(0, 1, pool_bytes=2**30)) is None


def test_a_library_needs_place_beside_jaxs_pool() -> None:
    """A card of 80 GB, of which jax's pool has 92 %, and 3 % are for CUDA."""
    card = DeviceMemory(80 * 10**9, 73_600 * 10**6)
    for taken in (0, 3_900 * 10**6):
        check_beside(card, taken, 0.9)
    with pytest.raises(ValueError, match=r"0\.9 leaves 6\.4 GB beside .* NCCL EP needs 5\.1 GB .* set it to 0\.88"):
        check_beside(card, 5_100 * 10**6, 0.9)


@pytest.fixture
def bounded(monkeypatch, tmp_path: Path) -> Iterator[Callable[[int], Engine]]:
    """Makes the CPU report so much memory, and an engine of few programs with a compilation cache of its own."""

    def start(total: int) -> Engine:
        monkeypatch.setattr(build, "device_memory", lambda _: DeviceMemory(total, total))
        monkeypatch.setattr(build, "use_compilation_cache", lambda _: tmp_path)
        return build_engine(DIRECTORY / "greedy", OPTIONS, progress=False)

    with fewer.one_bucket(), fewer.greedy_samplers():
        yield start


def test_what_does_not_fit_is_refused_before_a_weight_is_read(bounded, monkeypatch) -> None:
    load, read = build.load_replicated, []

    def note(*given: Any) -> Any:
        read.append(given[-1].shapes)
        return load(*given)

    monkeypatch.setattr(build, "load_replicated", note)
    with pytest.raises(ValueError, match="the model does not fit"):
        bounded(100_000)
    assert read == [True]


def test_an_engine_is_sized_by_what_its_programs_take(bounded, tmp_path: Path, caplog) -> None:
    """The first start compiles the largest programs to measure them, the next one reads the figure."""
    caplog.set_level(logging.INFO)
    engine = bounded(TOTAL)
    assert "compiling the largest programs" in caplog.text and "memory of a device: 0.0 GB in all" in caplog.text
    assert 16 < engine.cfg.num_pages < 256
    assert "pages" not in vars(engine.executor.devices), "what compiles has the pool's room"
    engine.warm_up()
    assert "working memory: programs take" in caplog.text
    assert vars(engine.executor.devices)["pages"]["latents"].shape[1] % engine.cfg.num_pages == 0
    caplog.clear()
    again = bounded(TOTAL)
    assert "compiling the largest programs" not in caplog.text
    assert again.cfg == engine.cfg
    [kept] = tmp_path.glob("*.working")
    known, _ = int(kept.read_text()), kept.write_text("1")
    small = bounded(TOTAL)
    assert small.cfg.num_pages > engine.cfg.num_pages
    small.warm_up()
    assert "the next start reserves more" in caplog.text
    assert 1 < int(kept.read_text()) <= known


def test_the_largest_programs_are_those_of_the_most_rows() -> None:
    engine = Engine(parts())
    keys = engine.executor.devices.programs.keys()
    found = largest(engine.cfg, keys)
    assert {key.kind for key in found} >= {"prefill", "decode", "sample", "logprobs", "prompt_logprobs"}
    for key in found:
        assert key.size == max(other.size for other in keys if other.kind == key.kind)
    assert len({key.size for key in keys if key.kind == "decode"}) > 1


def test_an_unreadable_file_is_measured_again(tmp_path: Path) -> None:
    kept = WorkingMemoryFile(tmp_path, {"limit num_pages": "7", "devices": "1 x H100"})
    assert kept.read() is None
    kept.write(123)
    assert WorkingMemoryFile(tmp_path, {"limit num_pages": "9", "devices": "1 x H100"}).read() == 123, (
        "whatever the pool"
    )
    assert WorkingMemoryFile(tmp_path, {"devices": "2 x H100"}).read() is None
    [path] = tmp_path.glob("*.working")
    path.write_text("?")
    assert kept.read() is None


def test_a_context_beyond_the_models_is_refused_at_the_start() -> None:
    """It was served once: text turned to nonsense behind the model's context, without an error."""
    with pytest.raises(ValueError, match="max_model_len: 100000 is greater than the model's context of 2048 tokens"):
        build_engine(build.bundled_model(), EngineOptions(max_model_len=100_000), progress=False)
