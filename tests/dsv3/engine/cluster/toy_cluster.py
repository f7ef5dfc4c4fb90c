"""The toy model over several processes: a factory for the leader's engine process, and a follower when run as a script.

`diverge_at` makes a follower read other results from that step on, `first_launch_s` delays its sampler's first launch.
Programs are compiled with the options of GPUs, and a compilation waits for those of its peers as it does on one. With
`eplb_state` the toy has experts that move, and a process with a file `toy_experts.ENDS` in its compilation cache ends
in the middle of a move. Checks of kernels are played: `FAILS` has which one fails in which process.
"""

import dataclasses
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# One device a process. The environment's own count is meant for tests in one process.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"

import jax
from jax._src import distributed  # the key-value store of jax has no public name

from dsv3.config.engine import EngineConfig
from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.engine import executor, kernel_checks
from dsv3.engine.cluster import digest, follower
from dsv3.engine.cluster.leader_engine import start_leader
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.programs import Key, Programs
from dsv3.engine.executor import LocalExecutor
from dsv3.engine.functions import StepFunctions
from dsv3.engine.jobs import experts
from dsv3.engine.stored import use_compilation_cache
from dsv3.kv_cache.tiers import host_pool, tiers
from dsv3.scheduler.sequence import GREEDY
from dsv3.server.engine.factory import describe
from dsv3.server.engine.messages import Start
from sharding.mesh import rank_mesh
from tests.dsv3.engine import played_checks

_log = logging.getLogger("toy")
_PEERS_MS = 10_000  # XLA's own is a day
FAILS = ("rms_norm", "mla_decode")
LOAD = "tests.dsv3.engine.cluster.toy_cluster"
PAGES = ("kv_offloading_size", "kv_store", "transfer_address", "transfer_key_file")
LIMITS = {"identity": "{}", "max_model_len": 2048, "num_pages": 40, "max_num_seqs": 1, "max_num_batched_tokens": 64}


def load(model_dir: Path, options: EngineOptions, *, num_nodes: int) -> EngineComponents:
    """The toy's parts over all devices; importing it makes an array, for which jax must have been started."""
    from tests.dsv3.engine import toy

    use_compilation_cache(options.compilation_cache_dir)
    Programs.keys = _few_keys  # of the rest each process compiles what it needs
    executor.first_launch_is_slower = lambda platform: True
    Programs.__init__, jax.stages.Lowered.compile = _for_gpus, _compile_as_for_gpus
    devices = jax.devices()
    limits = {"num_ranks": len(devices), "num_processes": jax.process_count(), "num_nodes": num_nodes} | LIMITS
    limits |= {name: getattr(options, name) for name in PAGES}
    host_pool.FOLDER = Path(options.compilation_cache_dir)  # each node's own, as on a host
    tiers.is_loading_faster, tiers.LOAD_S = lambda *_: True, 60.0  # on a busy machine too
    params = toy.PARAMS
    if options.eplb_state is not None:
        model, mesh = toy.toy_config(), rank_mesh(devices, num_nodes)
        functions, params = _with_experts(mesh, Path(options.compilation_cache_dir))
        limits |= {"eplb_state": options.eplb_state, "eplb_interval": 4, "eplb_threshold": 1.0}
    elif options.speculative is None:
        model, functions = toy.toy_config(), toy.FUNCTIONS
    else:
        drafts = {"speculative_config": options.speculative_config}
        limits |= drafts | {"tokens_per_row": 1 + options.speculative.most_drafts}
        model, functions = toy.toy_config(num_nextn_predict_layers=1), toy.drafting(4)  # a fourth is wrong
    parts = EngineComponents.on_devices(functions, params, model, EngineConfig(**limits), devices)
    tokenizer = model_dir / "tokenizer.json"
    return dataclasses.replace(parts, tokenizer=tokenizer) if tokenizer.exists() else parts


def _with_experts(mesh: jax.sharding.Mesh, caches: Path) -> tuple[StepFunctions, Any]:
    """The toy whose experts move, one layer per step, and its parameters."""
    from tests.dsv3.engine import toy_experts

    experts.MOVE_BYTES = 1
    experts._move = toy_experts.ending(experts._move, caches / toy_experts.ENDS)
    return toy_experts.functions(mesh), toy_experts.PARAMS


FEW = {"prefill": 64, "decode": 1, "sample": 1, "mtp prefill": 64, "mtp decode": 1}
FEW |= {kind: 0 for kind in (experts.READ_LOAD.kind, experts.MOVE.kind)}


def _few_keys(self: Programs) -> list[Key]:
    few = [key for key in self._specs if FEW.get(key.kind) == key.size]
    return [key for key in few if key.kind != "sample" or key.variant == GREEDY]


_init, _compile = Programs.__init__, jax.stages.Lowered.compile


def _for_gpus(self: Programs, platform: str, *more: Any) -> None:
    _init(self, "cuda", *more)


def _compile_as_for_gpus(lowered: jax.stages.Lowered, options: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
    """Searches its share of the tiles, as XLA does for a GPU, and waits for those of the others, unless told not to.

    A CPU has no tiles: what is shared is that a process has come here.
    """
    _log.info("compiling a program")
    if (options or {}).get("xla_gpu_shard_autotuning", True):
        shares, client = hashlib.sha256(lowered.as_text().encode()).hexdigest(), distributed.global_state.client
        client.key_value_set(f"{shares}/{jax.process_index()}", "found", allow_overwrite=True)
        for process in range(jax.process_count()):
            client.blocking_key_value_get(f"{shares}/{process}", _PEERS_MS)
    return _compile(lowered)


def _play_checks(process_id: int) -> None:
    plan = {"backend": "native", "has": {"native": FAILS}, "ends": {f"{FAILS[process_id]} native": "fails"}}
    command = (sys.executable, "-S", str(Path(played_checks.__file__)), json.dumps(plan))
    kernel_checks._DEVICE = kernel_checks._CHECKS = command


def start(start: Start, host):
    """The factory of the server's engine."""
    _play_checks(0)
    return describe(start_leader(start.cluster, Path(start.model_dir), start.engine, host, load, start.generation))


def _diverging(step: int):
    fetch = LocalExecutor.fetch

    def other(executor, command, launched) -> list[Any]:
        results = fetch(executor, command, launched)
        late = command.number >= step
        return jax.tree.map(lambda array: array + 1, results) if late else results

    return other


def _slow_at_first(seconds: float) -> Callable[..., Any]:
    """What finds programs; the sampler's first launch ends `seconds` after the leader has met it there."""
    get, waits = Programs.get, [seconds]

    def other(programs: Programs, key: Key) -> Callable[..., Any]:
        program = get(programs, key)

        def launch(*arguments: Any) -> Any:
            results = program(*arguments)
            time.sleep(waits.pop() if waits and key.kind == "sample" else 0.0)
            return results

        return launch

    return other


_order = digest.collective_order


def _exchanged(name: str, program: Callable[..., Any]) -> list[str] | None:
    """The order of a program's collectives, as if XLA had put another one first in the sampler."""
    order = _order(name, program)
    return ["all-to-all of another micro-batch", *order] if order and name.startswith("sample") else order


def main(
    cluster,
    model_dir: str,
    engine,
    diverge_at: int | None = None,
    first_launch_s: float | None = None,
    exchanged: bool = False,
) -> None:
    _play_checks(cluster["process_id"])
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if diverge_at is not None:
        LocalExecutor.fetch = _diverging(diverge_at)
    if exchanged:
        digest.collective_order = _exchanged
    if first_launch_s is not None:
        Programs.get = _slow_at_first(first_launch_s)
    follower.run(ClusterOptions(**cluster), Path(model_dir), EngineOptions(**engine), load)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
