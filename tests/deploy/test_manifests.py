"""The files in deploy/ start what they say: flags parse, numbers are those of configs/, probes exist."""

import dataclasses
import pathlib
import re

import pytest
from jax.sharding import AbstractMesh

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import DECODE_EP144, NODE_8XH200, PREFILL_EP32
from dsv3.config.server_options import ServerOptions
from dsv3.engine.expert_parallel import first_expert_map
from dsv3.server.http.app import make_app
from sharding.mesh import DEVICES
from tests.deploy.files import DEPLOY, Started, kubernetes, manifests, pods, slurm, started_in

SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sh"))
UNITS = {
    "single_node": NODE_8XH200,
    "decode_ep144": DECODE_EP144,
    "prefill_ep32": PREFILL_EP32,
    "decode leader": DECODE_EP144,
    "decode follower": DECODE_EP144,
    "prefill leader": PREFILL_EP32,
    "prefill follower": PREFILL_EP32,
    "pair-prefill leader": NODE_8XH200,
    "pair-decode leader": NODE_8XH200,
}
ENDING_S = 2 + 10 + 10 + 10  # error events, closing fronts, the leader and its followers (docs/multi_host.md)
LWS_FIELDS = {"replicas", "startupPolicy", "rolloutStrategy", "leaderWorkerTemplate", "networkConfig"}
LWS_TEMPLATE_FIELDS = {"size", "restartPolicy", "leaderTemplate", "workerTemplate", "subGroupPolicy"}


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> dict[str, Started]:
    found = [slurm(script, tmp_path_factory.mktemp("slurm")) for script in SCRIPTS]
    found += [each for each, _ in kubernetes()]
    return {each.name: each for each in found}


def test_every_file_is_known(started) -> None:
    assert set(started) == set(UNITS)


@pytest.mark.parametrize("name", UNITS)
def test_numbers_are_those_of_the_deployment(started, name) -> None:
    """The devices divide all replicas of experts: without redundant ones the unit of 18 nodes could not start."""
    process, unit = started[name], UNITS[name]
    assert (process.nodes, process.gpus_per_node) == (unit.nodes, unit.gpus_per_node)
    devices, engine = process.nodes * process.gpus_per_node, process.engine
    assert engine.num_redundant_experts == unit.redundant_experts and engine.enable_expert_parallel
    assert (DEEPSEEK_V3.n_routed_experts + engine.num_redundant_experts) % devices == 0
    assert (engine.data_parallel_size or devices) == devices == unit.devices
    if unit.decode_requests:
        assert engine.max_num_seqs == unit.decode_requests
    if unit.prefill_tokens and "pair-decode" not in name:
        assert engine.max_num_batched_tokens == unit.prefill_tokens
    assert (process.cluster is None) == (unit.nodes == 1)
    if process.cluster is not None:
        assert process.cluster.num_processes == unit.devices
        assert process.cluster.processes_per_node == unit.gpus_per_node
        assert process.cluster.is_leader == ("follower" not in name)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_slurm_starts_as_many_processes_per_host_as_it_is_asked_for(script, tmp_path) -> None:
    for tasks in (1, 8):
        process = slurm(script, tmp_path, tasks_per_node=tasks)
        if process.nodes * tasks == 1:
            assert process.cluster is None
            continue
        assert process.cluster is not None and process.cluster.cluster_key_file
        assert process.cluster.num_processes == process.nodes * tasks
        assert (process.cluster.num_nodes, process.cluster.processes_per_node) == (process.nodes, tasks)


@pytest.mark.parametrize("unit", ["decode", "prefill"])
def test_the_pods_of_a_unit_start_every_process_once(unit) -> None:
    """Pod 0 has process 0, which serves."""
    [document] = [d for _, d in manifests() if d["kind"] == "LeaderWorkerSet" and d["metadata"]["name"] == unit]
    (_, nodes, leader), (_, _, follower) = pods(document)
    found = [each for rank in range(nodes) for each in started_in(follower if rank else leader, unit, nodes, rank)]
    assert [each.cluster.process_id for each in found] == list(range(8 * nodes))
    assert {(each.cluster.num_processes, each.cluster.processes_per_node) for each in found} == {(8 * nodes, 8)}
    assert all(each.engine == found[0].engine for each in found)


@pytest.mark.parametrize("name", ["decode_ep144", "prefill_ep32"])
def test_the_expert_map_of_the_start_can_be_made(started, name) -> None:
    """Every expert has a device, and as many replicas come out as the script asks for; without them it cannot start."""
    process = started[name]
    mesh = AbstractMesh((process.nodes, process.gpus_per_node, 1, 1), DEVICES)
    found = first_expert_map(DEEPSEEK_V3, mesh, process.engine.num_redundant_experts)
    experts = found.phy2log
    assert experts.shape[1] == 256 + 32 and all(set(layer) == set(range(256)) for layer in experts.tolist())
    if name == "decode_ep144":
        with pytest.raises(ValueError, match="144"):
            first_expert_map(DEEPSEEK_V3, mesh, 0)


def test_followers_agree_with_their_leader(started) -> None:
    for unit in ("decode", "prefill"):
        leader, follower = started[f"{unit} leader"], started[f"{unit} follower"]
        assert leader.engine == follower.engine and leader.server.model == follower.server.model
        assert leader.cluster.coordinator.rpartition(":")[2] == follower.cluster.coordinator.rpartition(":")[2]
        place = {"coordinator": "host0:8476", "process_id": 0}
        assert dataclasses.replace(leader.cluster, **place) == dataclasses.replace(follower.cluster, **place)


@pytest.mark.parametrize("name", UNITS)
def test_draining_fits_the_time_that_its_manager_gives(started, name) -> None:
    options = started[name.replace("follower", "leader")].server
    assert options.shutdown_grace > 0
    assert options.shutdown_grace + options.shutdown_timeout + ENDING_S <= started[name].ends_within


@pytest.mark.parametrize("name", [name for name in UNITS if "follower" not in name])
def test_whoever_listens_to_all_asks_for_a_key(started, name) -> None:
    options = started[name].server
    assert options.host == "0.0.0.0" and options.api_key_file and options.api_key is None


def test_probes_ask_a_route_that_needs_no_key() -> None:
    """A grace period is only seen by probes: readiness fails before `shutdown_grace` is over."""
    for process, pod in kubernetes():
        [container] = pod["spec"]["containers"]
        probes = {kind: container.get(f"{kind}Probe") for kind in ("startup", "liveness", "readiness")}
        if process.cluster is not None and not process.cluster.is_leader:
            assert set(probes.values()) == {None}
            continue
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in probes.values():
            assert probe["httpGet"] == {"path": "/health", "port": "http", "scheme": "HTTPS"}
        assert ports["http"] == process.server.port and process.server.ssl_certfile
        ready = probes["readiness"]
        assert ready["failureThreshold"] * (ready["periodSeconds"] + ready["timeoutSeconds"]) < (
            process.server.shutdown_grace
        )


def test_the_routes_of_probes_and_scrapes_exist() -> None:
    paths = set(re.findall(r'"(/[a-z_]+)"', pathlib.Path(make_app.__code__.co_filename).read_text()))
    assert {"/health", "/ready", "/metrics"} <= paths


def test_files_of_flags_are_mounted_and_secrets_are_not_for_others() -> None:
    for process, pod in kubernetes():
        [container] = pod["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert len(volumes) == len(mounts)
        options = vars(process.server) | vars(process.engine) | (vars(process.cluster) if process.cluster else {})
        names = [name for name in options if name.endswith(("_file", "certfile", "keyfile"))]
        paths = [options[name] for name in names if options[name] is not None]
        assert all("secret" in mounts[str(pathlib.Path(path).parent)] for path in paths)
        assert "persistentVolumeClaim" in mounts[process.server.model]
        assert process.engine.compilation_cache_dir in mounts
        for volume in volumes.values():
            assert "secret" not in volume or volume["secret"]["defaultMode"] == 0o440
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"] and security["fsGroup"]


def test_shared_memory_holds_the_pages() -> None:
    for process, pod in kubernetes():
        [shm] = [volume["emptyDir"] for volume in pod["spec"]["volumes"] if volume["name"] == "shm"]
        assert shm["medium"] == "Memory"
        assert int(shm["sizeLimit"].removesuffix("Gi")) >= process.engine.kv_offloading_size + 32


def test_leader_worker_sets_have_the_fields_of_their_kind() -> None:
    found = [document for _, document in manifests() if document["kind"] == "LeaderWorkerSet"]
    assert len(found) == 2
    for document in found:
        spec = document["spec"]
        template = spec["leaderWorkerTemplate"]
        assert document["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
        assert set(spec) <= LWS_FIELDS and set(template) <= LWS_TEMPLATE_FIELDS
        # Any failure ends the instance, and followers come before the leader is ready.
        assert template["restartPolicy"] == "RecreateGroupOnPodRestart" and spec["startupPolicy"] == "LeaderCreated"


def test_services_lead_to_leaders_alone() -> None:
    labels = [(role, pod["metadata"]["labels"]) for _, d in manifests() for role, _, pod in pods(d)]
    services = [document for _, document in manifests() if document["kind"] == "Service"]
    assert len(services) == 5
    for service in services:
        wanted = service["spec"]["selector"].items()
        assert [role for role, own in labels if wanted <= own.items()] == ["leader"]


def test_prefill_tells_an_address_that_its_port_has(started) -> None:
    prefill, decode = started["pair-prefill leader"].engine, started["pair-decode leader"].engine
    assert (prefill.role, decode.role) == ("prefill", "decode")
    assert prefill.transfer_address == "10.0.0.7:7001" and decode.transfer_key_file == prefill.transfer_key_file
    [document] = [d for _, d in manifests() if d["kind"] == "Deployment" and d["metadata"]["name"] == "pair-prefill"]
    [container] = document["spec"]["template"]["spec"]["containers"]
    assert 7001 in [port["containerPort"] for port in container["ports"]]


def test_the_default_is_no_grace() -> None:
    assert ServerOptions().shutdown_grace == 0
