"""Limits from options and hardware, without a device."""

import dataclasses

import jax.numpy as jnp
import pytest

from dsv3.config.declaration import options_of
from dsv3.config.engine import EngineConfig
from dsv3.config.hugging_face import from_hf
from dsv3.config.model import YarnConfig
from dsv3.config.options import EngineOptions, RunOptions
from dsv3.engine import build
from dsv3.engine.dtypes import EngineDtypes
from dsv3.engine.limits import Hardware, engine_config, longest_context, pages_of_one, with_pages
from tests.dsv3.deepseek_v4 import FLASH, FLASH_0731
from tests.dsv3.engine import conftest, toy

MODEL = toy.toy_config(max_position_embeddings=1000)
FLOAT32 = EngineDtypes(jnp.dtype(jnp.float32), "float32")
SMALL = EngineOptions(max_num_seqs=4, max_num_batched_tokens=64)


def with_five_pages(options: EngineOptions = SMALL, **changes) -> EngineConfig:
    return engine_config(MODEL, options, Hardware(is_cpu=False, **changes), FLOAT32, pages=5)


def test_the_device_decides_what_is_not_set() -> None:
    cpu = engine_config(MODEL, EngineOptions(), Hardware(), FLOAT32)
    gpu = engine_config(MODEL, EngineOptions(), Hardware(is_cpu=False), FLOAT32)
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens) == (64, 1024)
    assert (gpu.max_num_seqs, gpu.max_num_batched_tokens) == (256, 8192)
    assert (cpu.max_model_len, cpu.num_pages) == (1000, 64 * 16)


def test_what_a_running_engine_reads_is_as_it_was_given() -> None:
    """An option is one field: limits have it without another edit."""
    given = {
        "seed": 7,
        "kv_store": "/pages",
        "max_num_queued_reqs": 3,
        "tensor_parallel_size": 2,
        "eplb_threshold": 0.5,
    }
    options = dataclasses.replace(SMALL, enable_expert_parallel=True, expert_overlap=False, **given)
    cfg = with_five_pages(options)
    names = [each.name for each in options_of(RunOptions)]
    assert {name: getattr(cfg, name) for name in names} == {name: getattr(options, name) for name in names}
    assert cfg.kv_offloading_size == 1.0 and given.items() <= {name: getattr(cfg, name) for name in names}.items()


def test_requests_are_as_long_as_the_pages_are_many() -> None:
    cfg = with_five_pages(num_ranks=6, num_nodes=2, num_processes=3)
    assert (cfg.num_pages, cfg.max_model_len, cfg.num_ranks, cfg.num_nodes) == (5, 5 * 64, 6, 2)
    assert [cfg.ranks_of(process) for process in range(3)] == [range(0, 2), range(2, 4), range(4, 6)]


def test_a_requested_length_is_not_shortened() -> None:
    with pytest.raises(ValueError, match="lower max_model_len"):
        with_five_pages(dataclasses.replace(SMALL, max_model_len=640))


def test_a_length_beyond_the_models_is_refused() -> None:
    """Beyond its positions a model generates nonsense without an error."""
    assert engine_config(MODEL, EngineOptions(max_model_len=1000), Hardware(), FLOAT32).max_model_len == 1000
    with pytest.raises(ValueError, match="max_model_len: 1001 is greater than the model's context of 1000 tokens"):
        engine_config(MODEL, EngineOptions(max_model_len=1001), Hardware(), FLOAT32)


def test_yarn_stretches_what_a_model_was_made_for() -> None:
    """A config.json may give its original length beside the factor."""
    yarn = YarnConfig(factor=4.0, original_max_position_embeddings=1000)
    assert longest_context(dataclasses.replace(MODEL, yarn=yarn)) == 4000
    assert longest_context(dataclasses.replace(MODEL, yarn=yarn, max_position_embeddings=5000)) == 5000
    assert pages_of_one(dataclasses.replace(MODEL, yarn=yarn), EngineOptions(max_model_len=4000)) == 63


def test_another_process_with_less_memory_shortens_the_rest() -> None:
    cfg = with_five_pages()
    assert with_pages(cfg, 9, SMALL) == cfg
    less = with_pages(cfg, 3, SMALL)
    assert (less.num_pages, less.max_model_len) == (3, 3 * 64)
    asked = EngineOptions(max_model_len=300)
    with pytest.raises(ValueError, match="lower max_model_len"):
        with_pages(cfg, 3, asked)


def test_drafts_have_pages_behind_the_longest_request() -> None:
    """One request of whole pages takes one page more; where pages are fewer, requests get shorter by the drafts."""
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    asked = EngineOptions(max_num_seqs=1, max_model_len=128, speculative_config=drafts)
    cfg = engine_config(MODEL, asked, Hardware(), FLOAT32)
    assert (cfg.max_model_len, cfg.num_pages, cfg.pages_per_seq) == (128, 3, 3)
    silent = EngineOptions(max_num_seqs=4, speculative_config=drafts)
    short = with_pages(engine_config(MODEL, silent, Hardware(), FLOAT32), 3, silent)
    assert (short.max_model_len, short.pages_per_seq) == (3 * 64 - short.tokens_ahead, 3)


@pytest.mark.parametrize("drafts", [2, 5])
def test_blocks_are_run_whole_whatever_is_drafted(drafts: int) -> None:
    options = dataclasses.replace(SMALL, speculative_config={"method": "dspark", "num_speculative_tokens": drafts})
    cfg = engine_config(from_hf(FLASH_0731), options, Hardware(is_cpu=False), FLOAT32, pages=10_000)
    tokens = {program.kind: program.tokens for program in cfg.forward_programs}
    assert tokens["decode"] == 4 * (1 + drafts) and tokens["dspark decode"] == tokens["dspark prefill"] == 4 * 5


def test_a_served_model_has_the_layers_that_draft_and_no_others() -> None:
    stages, module = from_hf(FLASH_0731), from_hf(FLASH)
    for method, cfg in (("mtp", module), ("dspark", stages)):
        options = dataclasses.replace(SMALL, speculative_config={"method": method})
        assert build.served(cfg, options) == cfg
        assert build.served(cfg, SMALL).num_draft_layers == 0
    for method, cfg, message, own in (
        ("dspark", module, "DSpark's stages", "mtp"),
        ("mtp", stages, "multi-token prediction", "dspark"),
    ):
        with pytest.raises(ValueError, match=f"method '{method}' needs a .*{message}.*choose '{own}' or 'ngram', or"):
            build.served(cfg, dataclasses.replace(SMALL, speculative_config={"method": method}))
    more = {"method": "dspark", "num_speculative_tokens": 6}
    with pytest.raises(ValueError, match="num_speculative_tokens 6 is more than the 5 tokens of the model's blocks"):
        build.served(stages, dataclasses.replace(SMALL, speculative_config=more))


def test_the_start_logs_dtypes_cache_concurrency_and_batch_sizes(caplog) -> None:
    with caplog.at_level("INFO"):
        build.log_components(conftest.parts())
    for text in (
        "dtypes: weights float32 ",
        "KV cache: float32, 7 pages of 64 tokens per rank, 896 tokens in all (data_parallel_size 2, ",
        "maximum concurrency for requests of 256 tokens: 3.50x",
        "decode batch sizes [1, 4], prefill batch sizes [64, 100]",
    ):
        assert text in caplog.text
