"""What the engine says becomes Prometheus's text."""

import dataclasses

from dsv3.api.answers.metrics import Metrics
from dsv3.api.engine.process import _numbers
from dsv3.engine.stats import EngineStats, ExpertStats

STATS = EngineStats(3, 1, 7, 0.5, 0, 0, 0, 0, 10, 20, 30, 0.1, (1, 2))
EXPERTS = ExpertStats(0.75, 0.5, 2, 40, 1, 6, 1000, 200)


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
    assert sample(metrics, "dsv3:experts_moved_total") == 55
    for name, value in {
        "dsv3:expert_rebalances_total": 2,
        "dsv3:expert_checksum_failures_total": 1,
        "dsv3:dispatch_extra_rounds_total": 6,
        "dsv3:dispatch_in_node_bytes_total": 1000,
        "dsv3:dispatch_cross_node_bytes_total": 200,
    }.items():
        assert sample(metrics, name) == value
