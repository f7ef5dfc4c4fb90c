"""One process of a gang that is played on one host, to compile its programs ahead (`dsv3.engine.cluster.ahead`).

`python -m dsv3.engine.cluster.rehearsal ORDER COORDINATOR PLACE COMPILES`. It ends with its standard input. It takes
the same steps as the real one, but for the weights: their shapes are enough.
"""

import dataclasses
import importlib
import logging
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

import jax
import msgspec

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.engine.cluster.ahead import MOST_S, Order, end_with_input, marker, places
from dsv3.engine.cluster.smaller import fitted
from dsv3.engine.cluster.start import Load, kept_programs, start_jax
from dsv3.engine.executor import lay_out
from dsv3.engine.fingerprint import agreed, environment, shaping
from dsv3.engine.jobs.registry import JOB_KINDS
from dsv3.engine.limits import with_pages
from dsv3.engine.stored import NothingKept, ProgramStore, machine_fields, use_compilation_cache
from dsv3.logs import configure_logging
from dsv3.processes.key_file import read_key
from pallas_kernels.backend import Backend, fallbacks, set_fallbacks

_log = logging.getLogger("dsv3.cluster")


def order_of(
    given: ClusterOptions, cluster: ClusterOptions, model_dir: Path, options: EngineOptions, load: Load
) -> Order | None:
    """Returns what to compile ahead beside this process of the gang `cluster`, of the processes `given`.

    None where no smaller gang would ever start, and on GPUs: the process that serves fills their memory, so that no
    other one has room there, and how many pages fit a smaller gang's is not known before.
    """
    size = cluster.num_processes - cluster.processes_per_node
    if given.cluster_return_timeout is None or size < 1 or jax.default_backend() != "cpu":
        return None
    as_one_of = places(cluster.process_id, size, cluster.processes_per_node)
    fields = environment(model_dir) | machine_fields() | agreed(given) | agreed(options) | shaping(options)
    replaced = {operation: backend.value for operation, backend in fallbacks().items()}
    what = f"{size} {as_one_of} {sorted((fields | replaced).items())}"
    name = f"{load.__module__}:{getattr(load, '__name__', '')}"
    key = read_key(given.cluster_key_file)
    done = marker(use_compilation_cache(options.compilation_cache_dir), key, what)
    return Order(given, size, as_one_of, str(model_dir), options, name, done, replaced)


def compile_programs(order: Order, target: ClusterOptions) -> ProgramStore | NothingKept:
    """Compiles all programs of the gang `target`, with jax started over it, one after the other; keeps them."""
    set_fallbacks({operation: Backend(each) for operation, each in order.fallbacks.items()})
    module, _, name = order.load.partition(":")
    load: Load = getattr(importlib.import_module(module), name)
    model_dir = Path(order.model_dir)
    options = fitted(order.engine, model_dir, order.given, target)
    parts = load(model_dir, options, num_nodes=target.num_nodes, shapes=True).shapes
    parts = dataclasses.replace(parts, cfg=with_pages(parts.cfg, parts.cfg.num_pages, options))
    store = kept_programs(target, model_dir, options, parts)
    _, programs = lay_out(parts, JOB_KINDS)
    programs.store = store
    for key in programs.keys():  # noqa: SIM118
        programs.get(key)
    return store


def main(order: Order, coordinator: str, place: int, compiles: bool) -> NoReturn:
    """Joins the gang, and compiles, or waits for the end of the one that does."""
    configure_logging()
    end_with_input(sys.stdin.fileno(), lambda: os._exit(0))
    importlib.import_module(order.load.partition(":")[0])  # some set what jax's devices are
    size = order.size
    target = dataclasses.replace(order.given, coordinator=coordinator, num_processes=size, process_id=place)
    start_jax(target)
    if not compiles:
        threading.Event().wait(MOST_S)  # the input's end ends this before
    store = compile_programs(order, target)
    _log.info("place %d of %d: %s", place, size, store)
    os._exit(0)  # jax's own shutdown would wait for the others


if __name__ == "__main__":
    _, _text, _coordinator, _place, _compiles = sys.argv
    main(msgspec.json.decode(_text, type=Order), _coordinator, int(_place), _compiles == "1")
