"""Cluster options: addresses, the key file, Slurm's environment, and the processes that one host starts itself."""

import argparse
from pathlib import Path

import pytest
from absl import flags as absl_flags

from dsv3.config.options import ClusterOptions, EngineOptions, split_address
from dsv3.files import read_key
from launch import cluster
from launch.cluster import one_host_flags, processes_needed, slurm_membership
from launch.flags import UsageError

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "gpu[007-010,12]",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}


NOTHING = {"coordinator": None, "num_processes": None, "process_id": None, "processes_per_node": None}


def member(coordinator: str, num_processes: int, process_id: int, per_node: int = 1) -> ClusterOptions:
    place = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    return ClusterOptions(**place, processes_per_node=per_node, cluster_key_file="key")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-0015],host2", "node001"),
        ("node[001,007-015],host2", "node001"),
        ("gpu[7]", "gpu7"),
        ("a-b[3-4]-ib,c", "a-b3-ib"),
    ],
)
def test_slurm_gives_all_options(nodes: str, first: str) -> None:
    found = slurm_membership(SLURM | {"SLURM_STEP_NODELIST": nodes})
    address = f"{first}:{61440 + 4711 % 4094}"
    assert found == {"coordinator": address, "num_processes": 4, "process_id": 2, "processes_per_node": 1}
    ClusterOptions(**found, cluster_key_file="key")


@pytest.mark.parametrize(("counts", "each"), [("2", 2), ("4(x18)", 4), ("1", 1)])
def test_slurm_gives_the_processes_per_host(counts: str, each: int) -> None:
    assert slurm_membership(SLURM | {"SLURM_STEP_TASKS_PER_NODE": counts})["processes_per_node"] == each


@pytest.mark.parametrize("counts", ["2(x3),1", "2,2(x3)", ""])
def test_unequal_hosts_of_a_slurm_step_are_refused(counts: str) -> None:
    with pytest.raises(ValueError, match=r"SLURM_STEP_TASKS_PER_NODE: .* equally many tasks.*--ntasks-per-node"):
        slurm_membership(SLURM | {"SLURM_STEP_TASKS_PER_NODE": counts})


@pytest.mark.parametrize("job", ["0", "4093", "4094", "99999999"])
def test_slurm_ports_leave_space_for_the_control_port(job: str) -> None:
    _, port = split_address(slurm_membership(SLURM | {"SLURM_JOB_ID": job})["coordinator"], "coordinator")
    assert 61440 <= port < 65535


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID"])
def test_outside_of_a_step_slurm_gives_no_options(missing: str) -> None:
    """A batch script without srun is one process, whatever the job has reserved."""
    assert slurm_membership({k: v for k, v in SLURM.items() if k != missing}) == NOTHING


def test_a_step_of_one_task_is_a_single_process() -> None:
    assert slurm_membership(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) == NOTHING
    assert slurm_membership({}) == NOTHING


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:0", "host:65535", "host:-1", "host:x", "host:٣"])
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="coordinator"):
        split_address(text, "coordinator")


def test_the_control_port_is_the_next_one() -> None:
    assert member("[::1]:80", 2, 1).control_address == ("::1", 81)
    assert member("host:80", 2, 0).control_address == ("host", 81)


@pytest.mark.parametrize(("processes", "process_id"), [(0, 0), (2, 2), (2, -1), (10**6, 0)])
def test_invalid_counts_are_refused(processes: int, process_id: int) -> None:
    with pytest.raises(ValueError, match=r"num_processes|process_id"):
        member("host:80", processes, process_id)


def test_processes_of_a_node_have_consecutive_numbers() -> None:
    places = [member("host:80", 6, i, 3) for i in range(6)]
    assert [(each.num_nodes, each.local_id) for each in places] == [(2, i) for i in (0, 1, 2, 0, 1, 2)]
    assert [places[0].node_of(i) for i in (1, 3, 5)] == [range(0, 3), range(3, 6), range(3, 6)]
    with pytest.raises(ValueError, match="processes_per_node: 4 does not divide num_processes 6"):
        member("host:80", 6, 0, 4)


def test_keys(tmp_path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ValueError, match=r"No such file.*urandom"):
        read_key(path)
    path.write_bytes(b" short \n")
    path.chmod(0o600)
    with pytest.raises(ValueError, match=r"5 bytes, at least 32.*urandom"):
        read_key(path)
    path.write_bytes(b"k" * 5000)
    with pytest.raises(ValueError, match="more than 4096"):
        read_key(path)
    path.write_bytes(b"k" * 40 + b"\n")
    assert read_key(path) == b"k" * 40
    for mode in (0o604, 0o602, 0o640, 0o660):
        path.chmod(mode)
        with pytest.raises(ValueError, match=r"cluster_key_file .*other users may open it.*chmod"):
            read_key(path)


def library(**changes) -> EngineOptions:
    return EngineOptions(enable_expert_parallel=True, expert_transport="nccl_ep", **changes)


def test_the_expert_parallel_library_gets_a_process_per_gpu(monkeypatch) -> None:
    """The host is the only one, and the command is not one of several already."""
    monkeypatch.setattr(cluster, "visible_gpus", lambda: 8)
    assert processes_needed(library(), None) == processes_needed(library(data_parallel_size=8), None) == 8
    assert processes_needed(library(), member("h:1", 16, 0, 8)) == processes_needed(EngineOptions(), None) == 1
    for wrong in (dict(data_parallel_size=4), dict(tensor_parallel_size=8)):
        with pytest.raises(UsageError, match=r"do not fit the 8 GPUs of this host; .* CUDA_VISIBLE_DEVICES"):
            processes_needed(library(**wrong), None)
    monkeypatch.setattr(cluster, "visible_gpus", lambda: 1)
    assert processes_needed(library(), None) == 1


def test_processes_of_one_host_share_a_new_key_and_a_coordinator(tmp_path: Path, monkeypatch) -> None:
    given = argparse.Namespace(value=None)
    monkeypatch.setattr(absl_flags, "FLAGS", {"cluster_key_file": given})
    found = dict(flag.removeprefix("--").split("=") for flag in one_host_flags(8, tmp_path))
    key = Path(found.pop("cluster_key_file"))
    host, port = split_address(found.pop("coordinator"), "coordinator")
    assert host == "127.0.0.1" and 0 < port < 65535 and found == {"data_parallel_size": "8"}
    assert len(read_key(str(key))) >= 32 and key.stat().st_mode & 0o77 == 0
    given.value = "mine.key"
    assert not any("key" in flag for flag in one_host_flags(8, tmp_path))
