"""Rules, dashboard and scaling ask for metrics and labels that /metrics has."""

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dsv3.server.serving import metrics
from dsv3.server.serving.metrics import Metrics
from dsv3.server.tenants import Tenant, Tenants
from router.relay import RouterMetrics
from tests.deploy.files import DEPLOY, documents

# Labels that Prometheus, or its operator by deploy/kubernetes/decode/monitoring.yaml, adds.
ADDED = {"job", "instance", "instance_name", "le"}
EXPORTED = re.compile(r"(?<![\w:])(?:vllm|dsv3):\w+")
RECORDED = re.compile(r"(?<![\w:])instance_name:\w+:\w+")


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Names of all samples that a server may have, with their labels."""
    stats = {name: 0.0 for name in metrics._EXPERT_GAUGES | metrics._EXPERT_COUNTERS | metrics._DRAFT_COUNTERS}
    stats |= {name: 0.0 for name in metrics._EVENT_COUNTERS}
    stats |= {"experts_balancedness_by_layer": [1.0], "draft_num_accepted_tokens_per_pos": [1.0]}
    stats |= {"host_time_counts": [0.0] * (len(metrics.HOST_TIME_BOUNDS) + 1)}
    for tier in metrics.TIERS:
        stats |= {f"pages_tiers_{tier}_hits": 0.0, f"pages_tiers_{tier}_loads": [0.0] * (len(metrics.LOAD_BOUNDS) + 1)}
    found = Metrics("m", tenants=Tenants([Tenant("a", b"", "")]))
    found.update(stats)
    found.engines = lambda: [(True, stats), (False, stats)]  # independent ones
    samples = [sample for family in found.collect() for sample in family.samples]
    return {each.name: set(each.labels) for each in samples} | of_a_router()


def of_a_router() -> dict[str, set[str]]:
    """Samples of a router with one instance. Prometheus keeps `instance` for whom it reads, and renames theirs."""
    state = {"url": "u", "status": "ok", "version": "", "publishes_events": False, "listener": None}
    one = SimpleNamespace(load=SimpleNamespace(requests=0), **state)
    numbers = RouterMetrics((SimpleNamespace(instances=[one], num_waiting=0),))
    for counter in (numbers.requests, numbers.sent, numbers.broken):
        counter.labels("u")
    numbers.on_end(200, "v1", 0.1, 0.2)
    numbers.broken_by_version.labels("v1")
    families = text_string_to_metric_families(numbers.text().decode())
    renamed = {"instance": "exported_instance"}
    return {each.name: {renamed.get(name, name) for name in each.labels} for it in families for each in it.samples}


def rules() -> list[dict]:
    return [rule for group in documents("prometheus/rules.yaml")[0]["groups"] for rule in group["rules"]]


def dashboard() -> dict:
    return json.loads((DEPLOY / "grafana/dashboard.json").read_text())


def expressions() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule.get("record") or rule["alert"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for trigger in documents("kubernetes/decode/scaling.yaml")[0]["spec"]["triggers"]:
        yield trigger["name"], trigger["metadata"]["query"]


def variables() -> dict[str, str]:
    """The queries that list the values of the dashboard's variables."""
    found = [each for each in dashboard()["templating"]["list"] if each["type"] == "query"]
    return {each["name"]: each["query"]["query"] for each in found}


def test_every_metric_is_exported(exported) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert recorded
    for where, expression in [*expressions(), *variables().items()]:
        names, derived = EXPORTED.findall(expression), RECORDED.findall(expression)
        assert names or derived or expression.startswith("up{"), where
        assert set(names) <= set(exported), where
        assert set(derived) <= recorded, where


def test_every_label_is_there(exported) -> None:
    for where, expression in expressions():
        names = [name for name in EXPORTED.findall(expression)]
        known = ADDED.union({"model_name"}, *(exported[name] for name in names))
        grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
        used = {label for labels in grouped for label in re.split(r",\s*", labels)}
        used |= {label for inside in re.findall(r"{([^}]*)}", expression) for label in re.findall(r"(\w+)[=!]", inside)}
        assert used <= known, where


def test_histograms_are_asked_by_bucket_and_counters_by_rate(exported) -> None:
    for where, expression in expressions():
        assert expression.count("(") == expression.count(")"), where
        assert expression.count("histogram_quantile") == len(re.findall(r":\w+_bucket", expression)), where
        for name in re.findall(r"[\w:]+_(?:total|bucket)\b", expression):
            assert re.search(rf"(?:rate|increase)\({re.escape(name)}\b", expression), (where, name)
        for quantiled in re.findall(r"histogram_quantile\([^,]+, sum by \(([^)]*)\)", expression):
            assert "le" in quantiled.split(", "), where


def test_alerts_say_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 10
    for rule in alerts:
        assert {"summary", "action"} == set(rule["annotations"]) and rule["labels"]["severity"] in (
            "critical",
            "warning",
        )


def test_the_dashboard_is_one() -> None:
    board = dashboard()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) and board["schemaVersion"] >= 39 and board["uid"]
    names = {variable["name"] for variable in board["templating"]["list"]}
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        used = set(re.findall(r"\$\{?(\w+)", json.dumps(panel))) - {"__rate_interval"}
        assert used <= names
    assert not overlapping(board["panels"])


def overlapping(panels: list[dict]) -> bool:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    return len(set(cells)) < len(cells)


def test_the_dashboard_is_not_blank_under_another_job() -> None:
    """Nothing but the variables says which job, instance or router is shown, and each offers what there is."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            chosen = re.findall(r"{([^}]*)}", target["expr"])
            routers = "dsv3:router_" in target["expr"]
            wanted = 'instance=~"$router"' if routers else 'job=~"$job", instance_name=~"$instance_name"'
            assert set(chosen) == {wanted}, panel["title"]
    assert [query.rstrip(")").rpartition(", ")[2] for query in variables().values()] == [
        "job",
        "instance_name",
        "instance",
    ]
    assert not any("dsv3" in query.replace("dsv3:", "") for query in variables().values())


def test_all_that_a_router_counts_is_shown(exported) -> None:
    shown = {name for _, expression in expressions() for name in EXPORTED.findall(expression)}
    of_events = {"dsv3:router_instance_tells", "dsv3:router_instance_pages"}
    counted = {name for name in of_a_router() if not name.endswith(("_created", "_seconds_sum", "_seconds_count"))}
    assert counted - of_events <= shown and any("router" in rule["expr"] for rule in rules() if "alert" in rule)


def test_scaling_is_for_a_set_that_exists() -> None:
    spec = documents("kubernetes/decode/scaling.yaml")[0]["spec"]
    target, decode = spec["scaleTargetRef"], documents("kubernetes/decode/decode.yaml")[0]
    assert (target["kind"], target["name"]) == (decode["kind"], decode["metadata"]["name"])
    assert target["apiVersion"] == decode["apiVersion"] and spec["minReplicaCount"] >= 1
    for trigger in spec["triggers"]:
        assert trigger["type"] == "prometheus" and float(trigger["metadata"]["threshold"]) > 0
        assert 'instance_name="decode"' in trigger["metadata"]["query"]


def test_prometheus_finds_leaders_and_their_names() -> None:
    monitor, decode = documents("kubernetes/decode/monitoring.yaml")[0], documents("kubernetes/decode/decode.yaml")[0]
    labels = decode["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    [relabeling] = endpoint["relabelings"]
    assert relabeling["sourceLabels"] == ["__meta_kubernetes_pod_label_dsv3_instance"] and "dsv3/instance" in labels
    assert relabeling["targetLabel"] == "instance_name" and monitor["spec"]["jobLabel"] == "app"
    assert (endpoint["path"], endpoint["scheme"]) == ("/metrics", "https") and labels["app"] == "dsv3"
