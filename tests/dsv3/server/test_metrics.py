"""What the engine says becomes Prometheus's text."""

import dataclasses
import os
import sys

import pytest

from dsv3.engine.jobs.draft import DraftStats
from dsv3.engine.jobs.experts import ExpertStats
from dsv3.engine.jobs.pages import PageStats
from dsv3.kv_cache.events import EventStats
from dsv3.kv_cache.tiers.counts import TierCounts
from dsv3.scheduler.request import HOST_TIME_BOUNDS, STEP_TOKENS_BOUNDS, EngineStats
from dsv3.scheduler.structured_output import GrammarStats, MaskStats
from dsv3.server.engine.process import _numbers
from dsv3.server.http.api_server import Throughput
from dsv3.server.serving.metrics import NUM_NUMBERS, Metrics, SharedNumbers

STATS = EngineStats(3, 1, 7, 0.5, 0, 0, 0, 0, 10, 20, 30, 0.1, (1, 2))
EXPERTS = ExpertStats(0.75, 0.5, (1.0, 0.5), 2, 40, 1, 6, 1000, 200)


def sample(metrics: Metrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model_name": "m"})


def test_counters_grow_and_gauges_follow() -> None:
    metrics = Metrics("m")
    for running in (3, 5):
        metrics.update(_numbers(dataclasses.replace(STATS, running=running)))
    assert sample(metrics, "vllm:num_requests_running") == 5
    assert sample(metrics, "dsv3:engine_steps_total") == 30


def test_spread_experts_have_metrics_of_their_own() -> None:
    metrics = Metrics("m")
    metrics.update(_numbers(STATS))
    assert b"expert" not in metrics.text()
    for moved in (40, 55):
        experts = dataclasses.replace(EXPERTS, moved=moved)
        metrics.update(_numbers(dataclasses.replace(STATS, jobs={"experts": experts})))
    assert sample(metrics, "dsv3:expert_balancedness") == 0.75
    assert sample(metrics, "dsv3:expert_balancedness_min") == 0.5
    for layer, even in {"0": 1.0, "1": 0.5}.items():
        labels = {"model_name": "m", "layer": layer}
        assert metrics.registry.get_sample_value("dsv3:expert_layer_balancedness", labels) == even
    assert sample(metrics, "dsv3:experts_moved_total") == 55
    for name, value in {
        "dsv3:expert_rebalances_total": 2,
        "dsv3:expert_checksum_failures_total": 1,
        "dsv3:dispatch_repeats_total": 6,
        "dsv3:dispatch_in_node_bytes_total": 1000,
        "dsv3:dispatch_cross_node_bytes_total": 200,
    }.items():
        assert sample(metrics, name) == value


def test_drafts_have_the_metrics_of_vllm() -> None:
    metrics = Metrics("m")
    metrics.update(_numbers(STATS))
    assert b"spec_decode" not in metrics.text()
    metrics.update(_numbers(dataclasses.replace(STATS, jobs={"draft": DraftStats(10, 20, 12, (8, 4))})))
    assert sample(metrics, "vllm:spec_decode_num_drafts_total") == 10
    assert sample(metrics, "vllm:spec_decode_num_draft_tokens_total") == 20
    assert sample(metrics, "vllm:spec_decode_num_accepted_tokens_total") == 12
    for position, count in {"0": 8, "1": 4}.items():
        labels = {"model_name": "m", "position": position}
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert metrics.registry.get_sample_value(name, labels) == count


def test_masks_and_grammars_are_counted_where_answers_can_be_held() -> None:
    metrics = Metrics("m")
    metrics.update(_numbers(STATS))
    assert b"mask" not in metrics.text() and b"dsv3:grammars_kept" not in metrics.text()
    counts = tuple(range(len(HOST_TIME_BOUNDS) + 1))
    jobs = {"mask": MaskStats(40, 0.5, 1, counts), "grammars": GrammarStats(3, 9, 2)}
    metrics.update(_numbers(dataclasses.replace(STATS, jobs=jobs)))
    metrics.add("grammars_refused", 1)
    for name, value in {
        "dsv3:masked_rows_total": 40,
        "dsv3:mask_failures_total": 1,
        "dsv3:mask_step_seconds_sum": 0.5,
        "dsv3:mask_step_seconds_count": sum(counts),
        "dsv3:grammars_compiled_total": 3,
        "dsv3:grammars_found_total": 9,
        "dsv3:grammars_kept": 2,
        "dsv3:grammars_refused_total": 1,
    }.items():
        assert sample(metrics, name) == value, name


def test_tiers_have_labels() -> None:
    metrics = Metrics("m")
    metrics.update(_numbers(STATS))
    assert b"kv_tier" not in metrics.text()
    host = TierCounts(queries=640, hits=128, damaged=1, bytes_held=7)
    host.note_load(1000, 0.003)
    metrics.update(_numbers(dataclasses.replace(STATS, jobs={"pages": PageStats(2, {"host": host})})))
    assert sample(metrics, "dsv3:num_requests_loading") == 2
    labels = {"model_name": "m", "tier": "host"}
    for name, value in {
        "dsv3:kv_tier_queries_total": 640,
        "dsv3:kv_tier_hits_total": 128,
        "dsv3:kv_tier_damaged_pages_total": 1,
        "dsv3:kv_tier_loaded_bytes_total": 1000,
        "dsv3:kv_tier_bytes": 7,
        "dsv3:kv_tier_load_seconds_sum": 0.003,
        "dsv3:kv_tier_load_seconds_count": 1,
    }.items():
        assert metrics.registry.get_sample_value(name, labels) == value
    assert metrics.registry.get_sample_value("dsv3:kv_tier_load_seconds_bucket", labels | {"le": "0.002"}) == 0
    assert b'tier="store"' not in metrics.text()


def test_lost_kv_events_are_counted_where_some_are_published() -> None:
    metrics = Metrics("m")
    metrics.update(_numbers(STATS))
    assert b"kv_events" not in metrics.text()
    metrics.update(_numbers(dataclasses.replace(STATS, jobs={"kv_events": EventStats(3)})))
    assert sample(metrics, "dsv3:kv_events_dropped_batches_total") == 3


def test_the_histogram_of_host_times_is_exported() -> None:
    """Its buckets are cumulated, as Prometheus has them; a histogram of another length would be none."""
    metrics = Metrics("m")
    metrics.update(_numbers(STATS))
    assert b"dsv3:engine_step_host_seconds" not in metrics.text()
    counts = tuple(range(len(HOST_TIME_BOUNDS) + 1))
    metrics.update(_numbers(dataclasses.replace(STATS, host_time_counts=counts)))
    for i, bound in enumerate(map(str, HOST_TIME_BOUNDS)):
        labels = {"model_name": "m", "le": bound}
        assert metrics.registry.get_sample_value("dsv3:engine_step_host_seconds_bucket", labels) == sum(counts[: i + 1])
    assert sample(metrics, "dsv3:engine_step_host_seconds_count") == sum(counts)
    assert sample(metrics, "dsv3:engine_step_host_seconds_sum") == STATS.host_time_sum


def test_the_histogram_of_tokens_per_step_is_exported() -> None:
    metrics = Metrics("m")
    metrics.update(_numbers(STATS))
    assert b"vllm:iteration_tokens_total" not in metrics.text()
    counts = (3, *[0] * (len(STEP_TOKENS_BOUNDS) - 1), 2)
    metrics.update(_numbers(dataclasses.replace(STATS, step_tokens_counts=counts)))
    assert sample(metrics, "vllm:iteration_tokens_total_count") == 5
    assert sample(metrics, "vllm:iteration_tokens_total_sum") == STATS.prompt_tokens + STATS.generated_tokens
    labels = {"model_name": "m", "le": "16384.0"}
    assert metrics.registry.get_sample_value("vllm:iteration_tokens_total_bucket", labels) == 3


def test_lengths_and_phases_of_requests_are_those_of_vllm(server) -> None:
    """Each sequence counts once, when it has ended."""
    kinds = ("prompt_tokens", "generation_tokens", "prefill_time_seconds", "decode_time_seconds")
    names = [f"vllm:request_{kind}_{what}" for kind in kinds for what in ("count", "sum")]

    def values() -> list[float]:
        server.wait_for(server.is_idle)
        return [server.metric(name) for name in names]

    before = values()
    server.http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 4, "n": 2}).raise_for_status()
    server.http.post("/v1/completions", json={"prompt": [5] * 10, "max_tokens": 1}).raise_for_status()
    grown = [after - first for after, first in zip(values(), before, strict=True)]
    assert grown[:4] == [3, 16, 3, 9]
    assert (grown[4], grown[6]) == (3, 3) and grown[5] > 0 and grown[7] > 0


def test_the_cache_and_the_process_are_described(server) -> None:
    text = server.http.get("/metrics").text
    [info] = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    assert info.endswith(" 1.0")
    for label in ('block_size="64"', 'num_gpu_blocks="1000"', 'cache_dtype="auto"', 'enable_prefix_caching="True"'):
        assert label in info
    if sys.platform == "linux":
        found = dict(line.split() for line in text.splitlines() if line.startswith("process_"))
        assert float(found["process_resident_memory_bytes"]) > 0 and float(found["process_open_fds"]) > 0


def test_the_log_has_a_line_while_something_happens() -> None:
    metrics = Metrics("m")
    throughput = Throughput(metrics)
    assert throughput.line() is None
    metrics.update(_numbers(dataclasses.replace(STATS, prefix_queries=40, prefix_hits=10)))
    metrics.add("prompt_tokens", 100)
    metrics.tokens(7, 0.1)
    line = throughput.line()
    assert line.startswith("running: 3 reqs, waiting: 1 reqs, prompt throughput: ")
    assert line.endswith("KV cache usage: 50.0%, prefix cache hit rate: 25.0%")
    prompt, generated = (float(part.split()[-2]) for part in line.split(", ")[2:4])
    assert prompt / generated == pytest.approx(100 / 7, rel=0.01)
    idle = dataclasses.replace(STATS, running=0, waiting=0, prefix_queries=40, prefix_hits=10)
    metrics.update(_numbers(idle))
    assert throughput.line() is None
    metrics.tokens(1, 0.1)  # ran between two lines
    assert "prefix cache hit rate" not in throughput.line()
    metrics.update(_numbers(dataclasses.replace(STATS, prefix_queries=0)))  # the engine was started anew
    assert "prefix cache hit rate" not in throughput.line()


def test_fronts_count_together() -> None:
    """Each sees the sum; one that has ended leaves its counts behind, and its successor goes on with them."""
    numbers = SharedNumbers(NUM_NUMBERS, 2)
    first = Metrics("m", numbers)
    for _ in range(2):
        other = Metrics("m", SharedNumbers(NUM_NUMBERS, 2, 1, os.dup(numbers.descriptor)))
        other.finished("stop")
        other.observe("e2e", 0.003)
        other.tokens(3, 0.006)
        other.flush()
        first.tokens(1, 0.002)
    for metrics in (first, other):
        metrics.flush()
        assert (
            metrics.registry.get_sample_value(
                "vllm:request_success_total", {"model_name": "m", "finished_reason": "stop"}
            )
            == 2
        )
        assert sample(metrics, "vllm:generation_tokens_total") == 8
        assert sample(metrics, "vllm:inter_token_latency_seconds_count") == 8
        assert sample(metrics, "vllm:inter_token_latency_seconds_sum") == pytest.approx(8 * 0.002)
        labels = {"model_name": "m", "le": "0.005"}
        assert metrics.registry.get_sample_value("vllm:e2e_request_latency_seconds_bucket", labels) == 2


def test_counts_that_nobody_asks_for_take_no_memory() -> None:
    metrics = Metrics("m")
    for _ in range(100_000):
        metrics.observe("ttft", 1.0)
        metrics.tokens(1, 1.0)
    assert all(len(pending) < 5000 for pending in metrics._observed.values())
    assert sample(metrics, "vllm:generation_tokens_total") == 100_000
