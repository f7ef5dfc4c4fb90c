"""Keeps the experts' places and loads in a file, from which the engine that comes next starts."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from dsv3.engine.functions import SpreadExperts
from sharding.experts.eplb import ExpertMap, keep_in_place, map_of, rebalance_experts

_log = logging.getLogger(__name__)
_DIGEST_BYTES = 32


class _Kept(msgspec.Struct, frozen=True):
    """A map `phy2log` `[L, Er]`, and the read-outs `loads` `[reads, L, E]`, both int64 and little endian."""

    layers: int
    experts: int
    replicas: int
    phy2log: bytes
    reads: int
    loads: bytes


def keep(path: Path, expert_map: ExpertMap, loads: Sequence[np.ndarray]) -> None:
    """Writes the file anew, in one piece. One that cannot be written is told of, and nothing else happens.

    What a process that dies meanwhile leaves beside it has one name, and so is overwritten by the next.
    """
    layers, replicas = expert_map.phy2log.shape
    kept = _Kept(
        layers=layers,
        experts=expert_map.logcnt.shape[1],
        replicas=replicas,
        phy2log=expert_map.phy2log.astype("<i8").tobytes(),
        reads=len(loads),
        loads=b"".join(load.astype("<i8").tobytes() for load in loads),
    )
    body = msgspec.msgpack.encode(kept)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(hashlib.sha256(body).digest() + body)
        part.replace(path)
    except OSError as error:
        _log.warning("the experts' places are not kept in %s: %s", path, error.strerror or error)


def start_from(path: Path, experts: SpreadExperts, first: ExpertMap) -> tuple[ExpertMap, list[np.ndarray]] | None:
    """Returns where to put the experts of an engine that has them at `first`, and the loads `[L, E]` it knows.

    The map is the one that was kept where it has as many replicas, else one that suits the kept loads. Returns None
    where nothing was kept for as many layers and experts; a file that cannot be used is told of.
    """
    try:
        content = path.read_bytes()
        digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            raise ValueError("it is damaged")
        return _fitted(msgspec.msgpack.decode(body, type=_Kept), experts, first)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        _log.warning("the experts' places in %s are not used: %s", path, error)
        return None


def _fitted(kept: _Kept, experts: SpreadExperts, first: ExpertMap) -> tuple[ExpertMap, list[np.ndarray]]:
    """Raises ValueError for another model's experts."""
    if (kept.layers, kept.experts) != (experts.num_layers, experts.num_experts):
        raise ValueError(
            f"it has {kept.layers} layers of {kept.experts} experts, and the model has {experts.num_layers} of "
            f"{experts.num_experts}"
        )
    loads = list(np.frombuffer(kept.loads, "<i8").reshape(kept.reads, kept.layers, kept.experts))
    if kept.replicas == experts.num_replicas:
        return _map_of(np.frombuffer(kept.phy2log, "<i8").reshape(kept.layers, kept.replicas), kept.experts), loads
    return _map_for(sum(loads, start=np.zeros((kept.layers, kept.experts), np.int64)), experts, first), loads


def _map_of(phy2log: np.ndarray, num_experts: int) -> ExpertMap:
    if any(set(layer) != set(range(num_experts)) for layer in phy2log.tolist()):
        raise ValueError("a layer does not have every expert")
    return map_of(phy2log, num_experts)


def _map_for(load: np.ndarray, experts: SpreadExperts, first: ExpertMap) -> ExpertMap:
    if not load.any():
        return first
    nodes, devices, groups = experts.machine.nodes, experts.machine.devices, experts.num_groups
    new = rebalance_experts(load, experts.num_replicas, groups, nodes, devices)
    return keep_in_place(new, first, groups, nodes, devices)
