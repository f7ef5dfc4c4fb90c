"""Programs that outlive their process: found by name, or by their text; never those of another user.

Each test compiles a program of its own, which jax's cache, shared by all tests, cannot have.
"""

import functools
import logging
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.engine import build, stored
from dsv3.engine.build import bundled_model, load_components
from dsv3.engine.cluster import start
from dsv3.engine.device.programs import Key, Programs, ProgramSpec
from dsv3.engine.stored import KEPT_S, ProgramStore
from pallas_kernels import backend
from pallas_kernels.backend import Backend

X = jnp.arange(8.0)
KEY = b"k" * 32
MACHINE = {"machine": "this"}


def counted(lowered, compile):
    """A program whose compilation calls `compile`."""
    names = ("as_text", "in_tree", "out_tree", "args_info", "out_info")
    return SimpleNamespace(compile=compile, **{name: getattr(lowered, name) for name in names})


class Start:
    """One start of a process: what it had to trace and to compile."""

    def __init__(self, base: Path, fields: str = "options", key: bytes = KEY) -> None:
        self.store = ProgramStore(str(base), key, MACHINE, {"fields": fields}, jax.devices()[:1])
        self.traced: list[float] = []
        self.compiled = 0

    def get(self, factor: float, name: str = "decode") -> float:
        """Returns the program's sum of `factor * X`."""
        return float(self.store.get(name, functools.partial(self._lower, factor), None)(X))

    def _lower(self, factor: float):
        self.traced.append(factor)
        lowered = jax.jit(lambda x: jnp.sum(factor * x)).lower(X)
        return counted(lowered, functools.partial(self._compile, lowered))

    def _compile(self, lowered, options):
        self.compiled += 1
        return lowered.compile(options)


def test_the_next_start_neither_traces_nor_compiles(tmp_path) -> None:
    first, second = Start(tmp_path), Start(tmp_path)
    assert first.get(1.25) == second.get(1.25) == 35
    assert (first.traced, first.compiled) == ([1.25], 1)
    assert (second.traced, second.compiled) == ([], 0)
    assert str(second.store) == "1 of 1 programs loaded from the store"


def test_other_options_trace_and_compile_only_what_is_new(tmp_path) -> None:
    Start(tmp_path).get(1.5)
    other = Start(tmp_path, "other options")
    assert (other.get(1.5, "a"), other.get(1.75, "b")) == (42, 49)
    assert (other.traced, other.compiled) == ([1.5, 1.75], 1)
    again = Start(tmp_path, "other options")
    assert (again.get(1.5, "a"), again.get(1.75, "b"), again.traced) == (42, 49, [])


def test_programs_of_one_text_with_other_trees_are_two(tmp_path) -> None:
    """A later version's state has a field more, which the program leaves alone: its text is the same."""

    def total(given):
        return sum(leaf.sum() for leaf in jax.tree.leaves(given)) * 6.5

    for name, given in (("a", {"x": X, "y": None}), ("b", {"x": None, "y": X}), ("c", (X, None)), ("d", (X,))):
        program = Start(tmp_path).store.get(name, functools.partial(jax.jit(total).lower, given), None)
        assert float(program(given)) == 182


def test_programs_of_one_text_with_other_shapes_of_what_they_do_not_read_are_two(tmp_path) -> None:
    """Another model's parameters differ in layers, and those alone, for a program that reads the head."""
    for name, unread in (("a", X[:3]), ("b", X[:4]), ("c", X[:3].astype(jnp.bfloat16))):
        lower = functools.partial(jax.jit(lambda x, _: x.sum() * 6.875).lower, X, unread)
        assert float(Start(tmp_path).store.get(name, lower, None)(X, unread)) == 192.5


@pytest.mark.parametrize("damaged, factor", [("instance-*/process-0/decode", 2.25), ("programs-*/*", 2.75)])
def test_a_file_written_with_another_key_is_not_used(tmp_path, damaged, factor, caplog) -> None:
    Start(tmp_path).get(factor)
    [path] = tmp_path.glob(damaged)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    second = Start(tmp_path)
    assert second.get(factor) == 28 * factor
    assert second.traced == [factor] and "its MAC is wrong" in caplog.text
    assert Start(tmp_path, key=b"another" * 8).get(factor) == 28 * factor


def test_each_key_has_programs_of_its_own(tmp_path) -> None:
    """A process group with its cluster's key and a server alone may use one directory in turns."""
    Start(tmp_path).get(4.5)
    Start(tmp_path, key=b"another" * 8).get(4.75)
    again = Start(tmp_path)
    assert again.get(4.5) == 126 and again.traced == []
    assert len(list(tmp_path.glob("programs-*"))) == 2


def test_an_executable_of_jaxs_own_cache_is_not_stored(tmp_path) -> None:
    jax.jit(lambda x: jnp.sum(2.5 * x)).lower(X).compile()  # now jax's cache has it
    jax.clear_caches()
    Start(tmp_path).get(2.5)
    second = Start(tmp_path)
    assert second.get(2.5) == 70 and second.traced == [2.5]


def test_programs_of_one_text_are_written_side_by_side(tmp_path, monkeypatch) -> None:
    """Two threads have both begun to write the executable before either is done."""
    meet, write = threading.Barrier(2, timeout=60), Path.write_bytes
    lowered = jax.jit(lambda x: jnp.sum(3.5 * x)).lower(X)
    program = lowered.compile()
    same = counted(lowered, lambda options: program)

    def write_together(path: Path, content: bytes) -> int:
        written = write(path, content[: len(content) // 2])
        if path.parent.name.startswith("programs-"):
            meet.wait()
        with path.open("ab") as file:
            file.write(content[len(content) // 2 :])
        return written

    monkeypatch.setattr(Path, "write_bytes", write_together)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: Start(tmp_path).store.get(name, lambda: same, None), "ab"))
    second = Start(tmp_path)
    assert (second.get(3.5, "a"), second.get(3.5, "b"), second.traced) == (98, 98, [])


def grow_old(root: Path) -> None:
    """Makes everything in `root` older than the retention time."""
    for path in root.rglob("*"):
        os.utime(path, (0, time.time() - 2 * KEPT_S))


def test_unused_programs_are_removed(tmp_path) -> None:
    """What the start itself uses stays, however old; so do the owner's key and jax's own files."""
    Start(tmp_path).get(3.75)
    Start(tmp_path, "other options").get(4.25)
    others = [tmp_path / "programs-7.key", tmp_path / "of jax"]
    for path in others:
        path.touch()
    grow_old(tmp_path)
    used = Start(tmp_path)
    assert used.get(3.75) == 105 and used.traced == []
    used.store.remove_unused()
    again = Start(tmp_path)
    assert again.get(3.75) == 105 and again.traced == []
    assert all(path.exists() for path in others)
    assert [len(list(tmp_path.glob(which))) for which in ("programs-*/*", "instance-*/*/*")] == [1, 1]


def test_a_start_removes_nothing_before_it_has_its_programs(tmp_path) -> None:
    order: list[str] = []
    store = SimpleNamespace(get=lambda *_: order.append("get"), remove_unused=lambda: order.append("forget"))
    programs = Programs("cpu")
    programs.add(ProgramSpec(Key("decode", size), jnp.sin, (X,)) for size in (1, 2))
    programs.store = store
    programs.compile_all()
    assert order == ["get", "get", "forget"]


def test_after_an_error_no_other_program_begins_to_compile(monkeypatch) -> None:
    begun, is_shut_down, shutdown = [], threading.Event(), ThreadPoolExecutor.shutdown

    def get(name: str, *_: object) -> None:
        begun.append(name)
        if len(begun) == 1:
            raise ValueError("the first one")
        is_shut_down.wait(10)

    def shut_down(*given, **more) -> None:
        shutdown(*given, **more)
        is_shut_down.set()

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shut_down)
    monkeypatch.setattr("dsv3.engine.device.programs._COMPILE_THREADS", 1)
    programs = Programs("cpu")
    programs.add(ProgramSpec(Key("decode", size), jnp.sin, (X,)) for size in (1, 2, 3))
    programs.store = SimpleNamespace(get=get, remove_unused=lambda: None)
    with pytest.raises(ValueError, match="the first one"):
        programs.compile_all()
    assert len(begun) < 3  # the thread may have begun the second one before the error was seen


def test_a_cache_directory_that_cannot_be_made_is_named_with_its_option(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^compilation_cache_dir: .*file.*; set it to a directory"):
        stored.use_compilation_cache(tmp_path / "file" / "cache")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(stored, "jax", SimpleNamespace(config=SimpleNamespace(jax_compilation_cache_dir=None)))
    with pytest.raises(ValueError, match="compilation_cache_dir: no home directory"):
        stored.use_compilation_cache()


def test_a_full_disk_costs_only_the_next_start(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "no space left")))
    assert Start(tmp_path).get(3.25) == 91
    assert "not stored for the next start" in caplog.text


def test_an_engine_keeps_programs_with_a_key_of_its_owner(tmp_path, monkeypatch, caplog) -> None:
    options = EngineOptions(compilation_cache_dir=str(tmp_path), max_model_len=64)
    directory = jax.config.jax_compilation_cache_dir
    try:
        parts = load_components(bundled_model(), options, progress=False)
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "not there yet"))  # as JAX_COMPILATION_CACHE_DIR
        assert stored.local_program_store(bundled_model(), EngineOptions(max_model_len=64), parts) is not None
    finally:
        jax.config.update("jax_compilation_cache_dir", directory)
    assert stored.local_program_store(bundled_model(), options, parts) is not None
    [key] = tmp_path.glob("programs-*.key")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and len(key.read_bytes()) == 32
    key.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert stored.local_program_store(bundled_model(), options, parts) is None
    assert "other users may open it" in caplog.text


@pytest.mark.parametrize("torn", [b"", b"k" * 31, bytes(32)], ids=["empty", "short", "zeros"])
def test_an_incomplete_key_signs_nothing(tmp_path, torn, caplog) -> None:
    """Another user with a file there could sign programs with it, which are unpickled."""
    path = tmp_path / f"programs-{os.geteuid()}.key"
    path.write_bytes(torn)
    path.chmod(0o600)
    key = stored._own_key(tmp_path)
    assert len(key) == 32 and any(key) and key == path.read_bytes() == stored._own_key(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert caplog.text.count("is damaged: a new key is made") == 1
    assert [each.name for each in tmp_path.glob("*programs*")] == [path.name]


def test_a_key_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch) -> None:
    done: list[str] = []
    sync, link = stored.sync, os.link

    def synced(path: Path) -> None:
        done.append("names" if path.is_dir() else f"{len(path.read_bytes())} bytes")
        sync(path)

    monkeypatch.setattr(stored, "sync", synced)
    monkeypatch.setattr(os, "link", lambda part, path: (done.append("link"), link(part, path)))
    stored._own_key(tmp_path)
    stored._own_key(tmp_path)
    assert done == ["32 bytes", "link", "names"]


def test_programs_with_triton_kernels_are_kept_by_no_process(tmp_path, monkeypatch) -> None:
    """Neither by a server alone nor by one of several processes: a kernel is made when its program is lowered."""
    options = EngineOptions(compilation_cache_dir=str(tmp_path / "cache"), max_model_len=64)
    parts = load_components(bundled_model(), options, progress=False, shapes=True)
    secret = tmp_path / "cluster.key"
    secret.write_bytes(KEY)
    secret.chmod(0o600)
    cluster = ClusterOptions(coordinator="localhost:1", num_processes=2, process_id=1, cluster_key_file=str(secret))
    monkeypatch.setattr(stored, "resolve_backend", lambda device: Backend.TRITON)
    alone = stored.local_program_store(bundled_model(), options, parts)
    lowered: list[int] = []

    def lower() -> SimpleNamespace:
        lowered.append(1)
        return SimpleNamespace(compile=lambda options: options)

    for store in (alone, start.open_program_store(cluster, bundled_model(), options, parts)):
        assert store is not None and "not stored" in str(store)
        assert store.get("decode", lower, {"a": 1}) == store.get("decode", lower, {"a": 1}) == {"a": 1}
        store.remove_unused()
    assert len(lowered) == 4
    assert not list((tmp_path / "cache").glob("*/*"))


def test_mosaics_runtime_is_there_before_a_stored_program_is_asked_for(tmp_path, monkeypatch) -> None:
    """It links the kernels of a loaded executable, and a start that finds all programs traces none."""
    order: list[str] = []

    class Asked(Exception):
        pass

    def get(*_):
        order.append("get")
        raise Asked

    monkeypatch.setattr(build, "resolve_backend", lambda device: Backend.MOSAIC)
    monkeypatch.setattr(backend, "check_ptxas", lambda: order.append("ptxas"))
    monkeypatch.setattr(backend, "load_mosaic", lambda: order.append("runtime"))
    monkeypatch.setattr(ProgramStore, "get", get)
    options = EngineOptions(compilation_cache_dir=str(tmp_path), max_model_len=64)
    with pytest.raises(Asked):
        build.build_engine(bundled_model(), options, progress=False).warm_up()
    assert order[:3] == ["ptxas", "runtime", "get"]


def test_programs_of_one_mac_are_not_run_on_another(tmp_path, monkeypatch) -> None:
    """Without /proc/cpuinfo a command lists the CPU's features; without that, its kind at least is known."""
    monkeypatch.setattr(stored, "_CPUINFO", tmp_path / "absent")
    known = set()
    for listed in ("FEAT_BF16: 1", "FEAT_BF16: 0"):
        monkeypatch.setattr(stored, "_SYSCTL", ("/bin/echo", listed))
        known.add(stored._processor())
    monkeypatch.setattr(stored, "_SYSCTL", (str(tmp_path / "absent"),))
    assert len(known | {stored._processor()}) == 3
