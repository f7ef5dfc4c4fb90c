"""A model whose cache has two groups, with entries of 4 and 16 tokens in pages of 32: served like every other.

Engine, scheduler and tiers have no code for it. An entry is the sum over its tokens of what the hash of the toy adds,
so an answer needs every entry of every layer. Where groups or layers disagree there are NaNs, which no text has.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dsv3.config.engine import EngineConfig
from dsv3.config.model import CacheGroup, ModelConfig
from dsv3.engine.build import account_for
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.layout import Layout
from dsv3.engine.engine import Engine
from dsv3.engine.functions import StepFunctions
from dsv3.engine.memory import DeviceMemory, local_bytes
from dsv3.kv_cache.layout import Pool, page_bytes
from dsv3.kv_cache.tiers import tiers
from dsv3.model.batch import DecodeBatch, PrefillBatch
from tests.dsv3.engine import fewer, toy
from tests.dsv3.engine.driving import request, run, run_out_of_pages
from tests.dsv3.engine.test_pages import clear_caches, counts

PAGE = 32
LIMITS = {"max_model_len": 256, "num_pages": 14, "max_num_seqs": 4, "max_num_batched_tokens": 100, "page_size": PAGE}
PROMPT = [i % 60 + 1 for i in range(200)]
FULL = 192
"""Tokens of the prompt's full pages."""


@dataclasses.dataclass(frozen=True)
class Grouped(ModelConfig):
    """Layers 0 and 2 keep an entry per 4 tokens, layer 1 one per 16."""

    @property
    def page_size(self) -> int:
        return PAGE

    def cache_groups(self, cache_dtype: str) -> tuple[CacheGroup, ...]:
        return CacheGroup("fine", (0, 2), 1, "uint32", 4), CacheGroup("coarse", (1,), 1, "uint32", 16)


CFG = Grouped(**dataclasses.asdict(toy.toy_config()))


def written(pages: Pool, table: jax.Array, tokens: jax.Array, positions: jax.Array, valid: jax.Array) -> Pool:
    """Adds tokens `[T]` to their entries, in pages of `table` `[T, Mp]`; the first token of an entry empties it."""
    page = jnp.take_along_axis(table, (positions // PAGE)[:, None], axis=1)[:, 0]
    position = positions.astype(jnp.uint32)
    amount = toy.mixed(tokens.astype(jnp.uint32), position, position)
    found = {}
    for group in CFG.cache_groups("float32"):
        array, each = pages[group.name], pages[group.name].shape[0] // len(group.layers)
        row = positions % PAGE // group.tokens_per_entry
        for layer in range(len(group.layers)):
            place = jnp.where(valid, page + layer * each, array.shape[0])
            first = jnp.where(positions % group.tokens_per_entry == 0, place, array.shape[0])
            array = array.at[first, row].set(0, mode="drop")
            array = array.at[place, row].add(amount[:, None] * (2 * layer + 1), mode="drop")
        found[group.name] = array
    return found


def read(pages: Pool, table: jax.Array, length: jax.Array) -> jax.Array:
    """Hidden state [2] of the first `length` tokens of a request with page table [Mp], read from all layers."""
    sums = []
    for group in CFG.cache_groups("float32"):
        array, each = pages[group.name], pages[group.name].shape[0] // len(group.layers)
        for layer in range(len(group.layers)):
            entries = array[jnp.clip(table, 0, each - 1) + layer * each].reshape(-1)
            live = jnp.arange(len(entries)) * group.tokens_per_entry < length
            sums.append(jnp.sum(jnp.where(live, entries, 0)))
    agree = (sums[0] == sums[2]) & (sums[1] == 3 * sums[0])
    return jnp.where(agree, toy.hidden_of(sums[0]), jnp.nan)


def prefill(params: jax.Array, cfg: ModelConfig, batch: PrefillBatch, pages: Pool) -> toy.ToyOutput:
    """Only the last row of a chunk has a hidden state: the entries of others have later tokens in them already."""
    T, B = batch.tokens.shape[0], batch.page_table.shape[0]
    rows, ends = jnp.arange(T), batch.cu_lengths[1:]
    table = batch.page_table[jnp.minimum(jnp.searchsorted(ends, rows, side="right"), B - 1)]
    pages = written(pages, table, batch.tokens, batch.positions, rows < ends[-1])
    last = jnp.where(ends > batch.cu_lengths[:-1], ends - 1, T)
    hidden = jax.vmap(lambda table, row: read(pages, table, batch.positions[row] + 1))(batch.page_table, last)
    return toy.ToyOutput(jnp.zeros((T, 2)).at[last].set(hidden + params, mode="drop"), pages)


def decode(params: jax.Array, cfg: ModelConfig, batch: DecodeBatch, pages: Pool) -> toy.ToyOutput:
    lengths = batch.lengths
    pages = written(pages, batch.page_table, batch.tokens[:, 0], jnp.maximum(lengths - 1, 0), lengths > 0)
    hidden = jax.vmap(lambda table, length: read(pages, table, length))(batch.page_table, lengths)
    return toy.ToyOutput(hidden[:, None] + params, pages)


def parts(**changes: object) -> EngineComponents:
    functions = StepFunctions(prefill, decode, toy.logits)
    return EngineComponents.on_devices(functions, toy.PARAMS, CFG, EngineConfig(**(LIMITS | changes)))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose programs all tests share."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("dsv3.kv_cache.tiers.host_pool.FOLDER", tmp_path_factory.mktemp("shared_memory"))
        with fewer.one_bucket(), fewer.greedy_samplers():
            engine = Engine(parts(kv_offloading_size=1e-3, identity="f"))
            engine.warm_up()
    yield engine


@pytest.fixture
def make(compiled: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Makes engines that load what a tier has, however fast they would compute it."""
    for name in ("LOOKUP_S", "LOAD_S"):
        monkeypatch.setattr(tiers, name, 60.0)
    monkeypatch.setattr(tiers, "is_loading_faster", lambda *_: True)

    def make(**changes: object) -> Engine:
        with fewer.one_bucket(), fewer.greedy_samplers():
            engine = Engine(parts(**({"kv_offloading_size": 1e-3, "identity": "f"} | changes)))
            engine.executor.devices.programs = compiled.executor.devices.programs
            engine.warm_up()
        return engine

    return make


def generate(engine: Engine, name: str) -> int:
    """Generates an answer, checks the text, and returns how many of the prompt's tokens were cached."""
    gathered = run(engine, request(name, PROMPT, max_tokens=40, ignore_eos=True))[name]
    assert gathered.tokens == toy.expected_tokens(PROMPT, 40, ())
    return gathered.outputs[0].num_cached_tokens


def test_chunks_and_preempted_requests_give_their_texts(make: Callable[..., Engine]) -> None:
    engine = make()
    run_out_of_pages(engine)
    assert engine.stats().recompilations == 0


def test_pages_are_found_again_on_the_device_in_the_host_and_in_a_store(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make(kv_store=str(tmp_path))
    assert [generate(engine, "first"), generate(engine, "from the device")] == [0, FULL]
    clear_caches(engine)
    assert generate(engine, "from the host") == FULL
    clear_caches(engine, host=True)
    assert generate(engine, "from the store") == FULL
    assert (counts(engine).hits, counts(engine, "store").hits) == (FULL, FULL)
    assert counts(engine, "store").loaded_bytes == FULL // PAGE * page_bytes(CFG, "float32")


def test_the_memory_account_counts_the_pool(compiled: Engine) -> None:
    layout: Layout = compiled.executor.devices.layout
    found = account_for(layout, DeviceMemory(10**6, 10**6), 0.9, working=0)
    assert (found.page, found.page_size) == (2 * 8 * 4 + 2 * 4, PAGE)
    assert local_bytes(layout.pages) == LIMITS["num_pages"] * found.page
