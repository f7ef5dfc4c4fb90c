"""One toy engine of two ranks, compiled once for all tests of this directory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsv3.config.engine import EngineConfig
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.programs import Programs
from dsv3.engine.engine import Engine
from dsv3.kv_cache.tiers import host_pool
from tests.dsv3.engine import toy

LIMITS = {"max_model_len": 256, "num_pages": 7, "max_num_seqs": 4, "max_num_batched_tokens": 100, "num_ranks": 2}


def parts(**changes) -> EngineComponents:
    """The toy with `LIMITS`, some of them changed."""
    return EngineComponents.on_devices(toy.FUNCTIONS, toy.PARAMS, toy.toy_config(), EngineConfig(**(LIMITS | changes)))


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The compiled programs of `LIMITS`, those that move pages to tiers and back included."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(host_pool, "FOLDER", tmp_path_factory.mktemp("shared_memory"))
        engine = Engine(parts(kv_offloading_size=1e-3))
    engine.warm_up()
    return engine.executor.devices.programs


@pytest.fixture(autouse=True)
def host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where engines of this test keep pages of the host's memory."""
    folder = tmp_path / "shared_memory"
    folder.mkdir()
    monkeypatch.setattr(host_pool, "FOLDER", folder)
    return folder


@pytest.fixture
def make_engine(programs: Programs) -> Callable[..., Engine]:
    """Makes fresh, warm engines; only options that change no shape may differ from `LIMITS`."""

    def make(**changes) -> Engine:
        engine = Engine(parts(**changes))
        engine.executor.devices.programs = programs
        engine.warm_up()
        return engine

    return make


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Iterator[Engine]:
    """A fresh engine, which must hold no page and have compiled nothing when the test is over."""
    engine = make_engine()
    yield engine
    if engine.failure is None:
        assert engine.stats().pages_in_use == 0
    assert engine.stats().recompilations == 0
