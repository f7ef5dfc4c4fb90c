"""The share of each of several processes of a host: its GPUs, ports of its own, one node of the mesh."""

import ctypes
import dataclasses
from types import SimpleNamespace

import jax
import pytest

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.engine import build
from dsv3.engine.cluster import start


def place(process_id: int, processes_per_node: int, num_processes: int = 16) -> ClusterOptions:
    return ClusterOptions(
        coordinator="127.0.0.1:80",
        num_processes=num_processes,
        process_id=process_id,
        processes_per_node=processes_per_node,
        cluster_key_file="key",
    )


class Driver:
    """Plays CUDA's driver library, with so many GPUs, or one that does not start."""

    def __init__(self, gpus: int, status: int = 0) -> None:
        self._gpus, self._status = gpus, status

    def cuInit(self, flags: int) -> int:
        return self._status

    def cuDeviceGetCount(self, count) -> int:
        count._obj.value = self._gpus
        return self._status


@pytest.fixture
def shown(monkeypatch):
    """Makes the driver show this process so many GPUs of its host."""
    monkeypatch.setattr(start, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms=None)))

    def show(gpus: int, status: int = 0) -> None:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": Driver(gpus, status)}[name])

    return show


@pytest.mark.parametrize(("gpus", "processes"), [(8, 8), (8, 4), (8, 2), (2, 2)])
def test_processes_of_a_node_share_its_gpus(shown, gpus, processes) -> None:
    """Each GPU belongs to one process of each node."""
    shown(gpus)
    for node in range(2):
        assert start.first_gpu(place(node * processes, processes, 2 * processes)) in (0, None)
        taken = [start.own_gpus(place(node * processes + i, processes, 2 * processes)) for i in range(processes)]
        assert [gpu for own in taken for gpu in own or []] == list(range(gpus))
        assert {len(own or []) for own in taken} == {gpus // processes}


@pytest.mark.parametrize("gpus", [1, 6, 12])
def test_gpus_that_cannot_be_shared_are_refused(shown, gpus) -> None:
    """A Slurm task that is bound to its GPU sees one."""
    shown(gpus)
    with pytest.raises(ValueError, match=rf"processes_per_node: 8 does not divide the {gpus} GPUs .*--gpus-per-node"):
        start.own_gpus(place(3, 8))


def test_a_process_alone_on_its_host_takes_all_that_jax_finds(shown, monkeypatch) -> None:
    """So does one whose driver does not start, for jax's error message, and one on the CPU."""
    shown(3)
    assert start.own_gpus(place(3, 1)) is None
    shown(0, status=100)
    assert start.own_gpus(place(3, 8)) is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    assert start.own_gpus(place(3, 8)) is None
    shown(3)
    monkeypatch.setattr(start.jax.config, "jax_platforms", "cpu")
    assert start.own_gpus(place(3, 8)) is None


def test_further_processes_of_a_host_serve_pages_at_the_next_ports() -> None:
    host = EngineOptions(kv_offloading_size=1, transfer_key_file="key", transfer_address="[::1]:9000", max_num_seqs=3)
    addresses = [start.process_options(host, place(i, 4)).transfer_address for i in range(8)]
    assert addresses == [f"[::1]:{9000 + i % 4}" for i in range(8)]
    assert start.process_options(host, place(5, 4)) == dataclasses.replace(host, transfer_address="[::1]:9001")
    silent = EngineOptions(max_num_seqs=3)
    assert start.process_options(silent, place(3, 4)) is silent
    last = dataclasses.replace(host, transfer_address="host:65534")
    with pytest.raises(ValueError, match=r"transfer_address: 'host:65535'"):
        start.process_options(last, place(1, 4))


def test_nodes_of_the_mesh_are_hosts_not_processes(tmp_path) -> None:
    options = EngineOptions(
        data_parallel_size=8, max_model_len=64, enable_expert_parallel=True, compilation_cache_dir=str(tmp_path)
    )
    parts = build.load_components(build.bundled_model(), options, num_nodes=2, progress=False, shapes=True)
    assert dict(parts.mesh.shape) == {"node": 2, "gpu": 4, "tensor": 1, "context": 1}
    assert parts.mesh.devices.flat[:].tolist() == jax.devices()
    assert (parts.cfg.num_nodes, parts.cfg.num_processes) == (2, 1)


@pytest.mark.parametrize(("each", "shards", "words"), [(1, 2, "the 1 devices of a process"), (4, 3, "the 4 devices")])
def test_a_rank_lies_in_one_process(monkeypatch, each, shards, words) -> None:
    devices = [SimpleNamespace(process_index=i // each, id=i, platform="cuda") for i in range(4 * each)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(ValueError, match=rf"tensor_parallel_size {shards} does not divide {words}.*fewer processes"):
        build._devices(None, shards)
    assert build._devices(None, 1) == devices
