"""Settings every test shares, fixed before jax is imported; and what keeps the suite's time down."""

import atexit
import functools
import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

# With the CUDA plugin of the `aot` extra installed and no GPU, jax would otherwise try, and fail, to start it.
os.environ["JAX_PLATFORMS"] = "cpu"
# Meshes of up to eight devices, on one CPU.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# Where each of eight devices waits in a library's call, on a thread each, their programs still need threads.
os.environ["NPROC"] = "12"
# Small programs are kept too: a hit takes a tenth of the 20 to 50 ms of their compilation.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Processes that tests start leave out LLVM's optimisations, too (`pytest_runtest_setup`), and share programs with them.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# Its idle threads spin, on the cores that the other workers need.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# Where no bytecode is kept, each process that a test starts takes 0.5 s more, of 2, to read our modules.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""

import jax
import pytest

_CACHE = "JAX_COMPILATION_CACHE_DIR"


def pytest_configure(config: pytest.Config) -> None:
    """One compilation cache for a run: what two workers or processes need is compiled once.

    It is new in every run, and the user's own stays out of it. Imports leave no garbage to look for.
    """
    sys.dont_write_bytecode = False
    gc.disable()
    if hasattr(config, "workerinput"):  # of xdist
        atexit.register(os._exit, 0)  # to destroy all that a worker has imported and compiled takes seconds
        return  # it has inherited the directory
    if getattr(config.option, "numprocesses", None) and (library := _jemalloc()):
        os.environ.setdefault("LD_PRELOAD", library)  # for workers, and the processes that their tests start
    directory = os.environ[_CACHE] = tempfile.mkdtemp(prefix="dsv3-tests-")
    jax.config.update("jax_compilation_cache_dir", directory)
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))


def _jemalloc() -> str | None:
    """Returns the allocator in Ray's wheel, if it is installed.

    XLA's compiler allocates small objects most of the time: glibc's takes a fifth of a worker's time, this a tenth.
    """
    ray = importlib.util.find_spec("ray")
    library = Path(ray.origin).with_name("core") / "libjemalloc.so" if ray and ray.origin else None
    return str(library) if library and library.exists() else None


@pytest.hookimpl(optionalhook=True)  # pytest runs without xdist, too
def pytest_xdist_auto_num_workers() -> int:
    """Returns one worker more than cores: one that waits for a process it has started leaves its core idle."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 1


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Has each worker begin to collect elsewhere: it reads what another has made of a file already.

    Where all begin at once, each rewrites the assertions of all files, which takes 9 s.
    """
    report = yield
    if isinstance(collector, pytest.Directory) and (worker := getattr(collector.config, "workerinput", None)):
        first = int(worker["workerid"].removeprefix("gw")) * len(report.result) // worker["workercount"]
        report.result = report.result[first:] + report.result[:first]
    return report


_TESTS = Path(__file__).parent
# Folders of which most time is waiting for processes that they have started.
_WAITING = ("dsv3/server", "dsv3/engine/cluster", "dsv3/batch", "dsv3/kv_cache", "launch", "router")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that compile for a GPU, and the notebook, come first: one worker would sit alone on them at the end.

    Of the rest, those that wait lie evenly among those that compute: workers that all wait leave cores idle.
    """
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path)  # workers must have one order
    long = {item.path for item in items if item.get_closest_marker("aot") or item.path.name == "test_examples.py"}
    places: dict[Path, float] = {}
    files = dict.fromkeys(item.path for item in items)
    for kind in ([file for file in files if _waits(file)], [file for file in files if not _waits(file)]):
        places |= {file: (number + 0.5) / len(kind) for number, file in enumerate(kind)}
    items.sort(key=lambda item: (item.path not in long, places[item.path]))


def _waits(file: Path) -> bool:
    return file.is_relative_to(_TESTS) and file.relative_to(_TESTS).as_posix().startswith(_WAITING)


def pytest_collection_finish() -> None:
    """Spares the garbage collector the million objects that imports have made, and most rounds: 5 % of the time."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


def pytest_sessionfinish() -> None:
    """Looks for garbage once at the end: pytest does so twice, and each takes seconds with what jax has cached."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def others_collected() -> None:
    """Collects what earlier tests have left, and spares later collections what stays: each takes a second with it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leaves out LLVM's optimisations, a third of a compilation for a CPU, of programs that run for milliseconds.

    Not for a GPU: there machine code is tested, and ptxas is slow with what LLVM left as it was.
    """
    optimised = any(item.get_closest_marker(name) for name in ("aot", "optimised"))
    jax.config.update("jax_disable_most_optimizations", not optimised)
    if item.get_closest_marker("aot"):
        _spare_ptxas()


_PTXAS = """#!/bin/sh
unset LD_PRELOAD
case "$1" in --*) exec {ptxas} "$@";; esac
for word; do
    case "$word" in -arch=*) made={folder}/"$word";; esac
    if [ "$last" = -o ]; then output="$word"; fi
    last="$word"
done
if [ ! -e "$made" ]; then
    {ptxas} {folder}/empty.ptx "-${{made##*/-}}" -o "$made.$$" && mv "$made.$$" "$made" || exit 1
fi
exec cp "$made" "$output"
"""


@functools.cache
def _spare_ptxas() -> None:
    """Assembles an empty module in place of XLA's kernels where a program is compiled to be read only.

    That was a third of the time, and LLVM's optimisations of what is thrown away were another fifth. Our own kernels,
    and programs whose resources are tested, get ptxas itself, and all optimisations.
    """
    nvidia = importlib.util.find_spec("nvidia")
    roots = nvidia.submodule_search_locations if nvidia else None
    toolkit = Path(next(iter(roots or ["/nowhere"])), "cu13").absolute()
    if not (ptxas := toolkit / "bin" / "ptxas").exists():
        return
    from pallas_kernels import aot

    folder = Path(tempfile.mkdtemp(prefix="ptxas-", dir=os.environ[_CACHE]))
    shutil.copytree(toolkit / "nvvm", folder / "nvvm", copy_function=os.symlink)
    shutil.copytree(toolkit / "bin", folder / "bin", copy_function=os.symlink)
    (folder / "empty.ptx").write_text(".version 8.0\n.target sm_80\n.address_size 64\n")
    script = folder / "bin" / "ptxas"
    script.unlink()
    script.write_text(_PTXAS.format(ptxas=ptxas, folder=folder))
    script.chmod(0o755)
    aot._UNTUNED = aot._UNTUNED | {
        "xla_gpu_cuda_data_dir": str(folder),
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
