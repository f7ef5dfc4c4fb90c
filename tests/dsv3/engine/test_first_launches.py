"""Before the first request every program runs on padding, without an effect on the state."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from dsv3.config.engine import EngineConfig
from dsv3.engine import executor
from dsv3.engine.components import EngineComponents
from dsv3.engine.device import devices as device_module
from dsv3.engine.device.programs import Key, Programs, running
from dsv3.engine.engine import Engine
from sharding.mesh import rank_mesh
from tests.dsv3.engine import conftest, toy, toy_experts
from tests.dsv3.engine.driving import request, run
from tests.dsv3.engine.fewer import one_bucket

PROMPT = [(11 * i) % 60 + 1 for i in range(150)]
MORE = {"kv_offloading_size": 1e-3}
DRAFTS = {"method": "mtp", "num_speculative_tokens": 2}
LOOKUP = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}


@pytest.fixture(autouse=True)
def on_a_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "first_launch_is_slower", lambda platform: True)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[Key]]:
    """How often each program is launched."""
    counts: Counter[Key] = Counter()
    get = Programs.get

    def counting(self: Programs, key: Key) -> Callable[..., Any]:
        program = get(self, key)

        def launch(*arguments: Any) -> Any:
            counts[key] += 1
            return program(*arguments)

        return launch

    monkeypatch.setattr(Programs, "get", counting)
    yield counts


def drafting(**options: Any) -> EngineComponents:
    """The toy with drafts, whose programs are those of `test_draft` and `test_draft_lookup`."""
    limits = {"tokens_per_row": 1 + options["num_speculative_tokens"], "max_num_batched_tokens": 64}
    cfg = EngineConfig(**(conftest.LIMITS | limits | {"speculative_config": options}))
    if options["method"] == "ngram":
        return EngineComponents.on_devices(toy.FUNCTIONS, toy.PARAMS, toy.toy_config(), cfg)
    model = toy.toy_config(num_nextn_predict_layers=1)
    return EngineComponents.on_devices(toy.drafting(None), jax.numpy.int32(4), model, cfg)


def with_experts() -> EngineComponents:
    cfg = EngineConfig(**(conftest.LIMITS | {"eplb_interval": 4, "eplb_threshold": 1.0}))
    functions = toy_experts.functions(rank_mesh(jax.devices()[:2]))
    return EngineComponents.on_devices(functions, toy_experts.PARAMS, toy.toy_config(), cfg)


def noise(array: jax.Array) -> jax.Array:
    """Other finite bits in place of an array's."""
    random = np.random.default_rng(0).integers(1, 7, array.shape).astype(array.dtype)
    return jax.device_put(random, array.sharding)


def check_nothing_is_left(engine: Engine, launched: Counter[Key]) -> None:
    devices = engine.executor.devices
    engine.executor.compile_all()
    devices.pages, devices.state = jax.tree.map(noise, (devices.pages, devices.state))
    before = jax.tree.map(np.array, (devices.params, devices.pages, devices.state))
    launched.clear()
    engine.warm_up()
    assert launched == dict.fromkeys(running(engine.cfg, devices.programs.keys()), 2)
    after = jax.tree.map(np.array, (devices.params, devices.pages, devices.state))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    stats = engine.stats()
    assert (stats.pages_in_use, stats.prefix_hits, stats.steps, stats.prompt_tokens) == (0, 0, 0, 0)
    assert devices.decoded is None and devices.prefilled is None


@pytest.mark.parametrize("make", [with_experts, lambda: drafting(**DRAFTS), lambda: drafting(**LOOKUP)])
def test_every_program_is_launched_twice_and_writes_nothing(make, launched: Counter[Key]) -> None:
    with one_bucket():
        check_nothing_is_left(Engine(make()), launched)


def test_an_engine_that_has_launched_all_gives_the_same_texts(programs: Programs, launched: Counter[Key]) -> None:
    engine = Engine(conftest.parts(**MORE))
    engine.executor.devices.programs = programs
    check_nothing_is_left(engine, launched)
    engine.executor.devices.state = engine.executor.devices.zeros(engine.executor.devices.layout.state)
    assert run(engine, request("a", PROMPT, max_tokens=20, ignore_eos=True))["a"].tokens == toy.expected_tokens(
        PROMPT, 20, ()
    )
    assert engine.stats().recompilations == 0


def test_memory_outside_the_pool_is_logged(programs: Programs, monkeypatch, caplog) -> None:
    engine = Engine(conftest.parts())
    engine.executor.devices.programs = programs
    used = iter([int(9e8), int(3.1e9)])
    monkeypatch.setattr(device_module, "memory_outside_pool", lambda devices: next(used))
    with caplog.at_level("INFO", device_module.__name__):
        engine.warm_up()
    assert "0.90 GB before these launches, 3.10 GB after" in caplog.text


def test_a_failing_program_ends_the_start_with_its_name(programs: Programs, monkeypatch) -> None:
    engine = Engine(conftest.parts())
    engine.executor.devices.programs = programs
    get = Programs.get

    def broken(self: Programs, key: Key) -> Callable[..., Any]:
        def launch(*arguments: Any) -> Any:
            raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")

        return launch if key.kind == "decode" and key.size == 4 else get(self, key)

    monkeypatch.setattr(Programs, "get", broken)
    with pytest.raises(RuntimeError, match=r"the program decode 4 fails .* CUDA_ERROR_ILLEGAL_ADDRESS"):
        engine.warm_up()


def test_a_hanging_program_ends_the_start_with_its_name(programs: Programs, monkeypatch) -> None:
    engine = Engine(conftest.parts())
    engine.executor.devices.programs = programs
    monkeypatch.setattr(device_module, "_LIMIT_S", 0.0)
    monkeypatch.setattr(type(jax.numpy.zeros(1)), "is_ready", lambda _: False)
    with pytest.raises(RuntimeError, match=r"the program .* fails .* it has not ended after 0 s"):
        engine.warm_up()
