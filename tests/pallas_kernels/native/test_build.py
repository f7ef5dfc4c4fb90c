"""Building the C++ kernels: fallback to XLA with a reason, no partial builds."""

import os
import platform
import shlex
import shutil
import stat
import time
from pathlib import Path

import ml_dtypes._ml_dtypes_ext
import pytest

from pallas_kernels import backend
from pallas_kernels.native import build

GOOD = 'echo "built $$" > "$2"'
BAD = 'echo "vectors.h:108: error: no __builtin_shufflevector" >&2; exit 1'
FRESH = build._library.__wrapped__
REGISTER = build._register


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def register(path, key):
        if not path.read_text().startswith("built"):
            raise OSError(f"{path}: file too short")
        return {"LayerProduct": key}, False

    monkeypatch.setattr(build, "_register", register)
    return tmp_path / "dsv3" / "native"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Compilers of a few lines of shell, the only ones on the path.

    `$MACROS` and their names describe them and their CPU. `script` builds a library, `probe` runs before they print
    their macros.
    """
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setenv("MACROS", "avx512")

    def write(script, name="c++", probe=""):
        path = directory / name
        path.write_text(f'#!/bin/sh\ncase "$*" in *-dM*) {probe}\necho "$MACROS {name}"; exit;; esac\n'
                        f'while [ "$1" != -o ]; do shift; done\n{script}\n')  # fmt: skip
        path.chmod(0o755)

    write(GOOD)
    return write


def test_a_library_is_built_once_per_cpu(cache, compiler, monkeypatch):
    first = FRESH()
    assert first.targets and first.reason.startswith("built into")
    (built,) = cache.iterdir()
    assert stat.S_IMODE(cache.stat().st_mode) == stat.S_IMODE(built.stat().st_mode) == 0o700
    again = FRESH()
    assert again.targets == first.targets and again.reason.startswith("found in")
    monkeypatch.setenv("MACROS", "avx2")
    assert FRESH().targets != first.targets
    assert len(list(cache.iterdir())) == 2


def test_without_a_compiler_the_backend_is_the_reference(cache, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(cache))
    found = FRESH()
    assert not found.targets and "no C++ compiler is on the path" in found.reason
    monkeypatch.setattr(backend.native, "library", lambda: found)
    backend._log_once.cache_clear()
    with caplog.at_level("INFO", logger="pallas_kernels.backend"):
        assert backend.resolve_backend() is backend.Backend.REFERENCE
    assert "reference, because" in caplog.text and "no C++ compiler" in caplog.text
    with pytest.raises(backend.BackendUnavailableError, match="no C\\+\\+ compiler"):
        backend.resolve_backend(backend.jax.devices()[0], backend.Backend.NATIVE)


@pytest.mark.parametrize(
    ("script", "reason"), [('echo "no <vector>" >&2; exit 1', "no <vector>"), ("exec /bin/sleep 5", "timed out")]
)
def test_a_build_that_fails_or_hangs_leaves_nothing(script, reason, cache, compiler, monkeypatch):
    monkeypatch.setattr(build, "_BUILD_SECONDS", 0.5)
    compiler(script)
    found = FRESH()
    assert not found.targets and reason in found.reason
    assert not list(cache.iterdir())


@pytest.mark.parametrize("other", ["clang++", "g++-14", "clang++-19"])
def test_the_next_compiler_on_the_path_is_tried_if_the_first_fails(other, cache, compiler):
    compiler(BAD)
    compiler(BAD, "g++-9")
    compiler(GOOD, other)
    first = FRESH()
    assert first.targets and other in first.reason and "no __builtin_shufflevector" in first.reason
    assert "\n" not in first.reason
    compiler("exit 1", other)
    assert FRESH() == (first.targets, f"found in {next(cache.iterdir())} by {shutil.which(other)}", False)


def test_one_compiler_under_two_names_is_tried_once(cache, compiler, tmp_path):
    compiler(BAD)
    (tmp_path / "bin" / "g++").symlink_to("c++")
    found = FRESH()
    assert not found.targets and found.reason.count("shufflevector") == 1


@pytest.mark.parametrize(
    ("unknown", "used"), [("", "-march=native"), ("-march=native", "-mcpu=native"), ("-m*native", "-fPIC")]
)
def test_the_first_supported_flag_for_this_cpu_is_used(unknown, used, cache, compiler, monkeypatch):
    compiler(GOOD, probe=f'case "$*" in *{unknown or "nothing"}*) echo "error: unknown" >&2; exit 1;; esac')
    commands, run = [], build._run
    monkeypatch.setattr(build, "_run", lambda *words, seconds: commands.append(words) or run(*words, seconds=seconds))
    found = FRESH()
    assert found.targets and ("no flag for this CPU" in found.reason) == (used == "-fPIC")
    built = [set(words) for words in commands if "-c" in words]
    assert len(built) == len(build._SOURCES)
    assert all(used in each and not each & {"-march=native", "-mcpu=native"} - {used} for each in built)


def test_a_library_that_does_not_load_is_rebuilt(cache, compiler, caplog):
    """A loss of power may leave an empty file under the final name."""
    first = FRESH()
    (built,) = cache.iterdir()
    built.write_text("")
    again = FRESH()
    assert again.targets == first.targets and again.reason.startswith("built into")
    assert "are rebuilt" in caplog.text and "file too short" in caplog.text
    assert FRESH().reason.startswith("found in")


def test_a_library_is_synced_before_it_is_renamed(cache, compiler, monkeypatch):
    events, replace = [], os.replace

    def sync(descriptor):
        kind = "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "library"
        events.append(f"{kind} of {os.fstat(descriptor).st_size}" if kind == "library" else kind)

    monkeypatch.setattr(build.os, "fsync", sync)
    monkeypatch.setattr(build.os, "replace", lambda *paths: events.append("named") or replace(*paths))
    FRESH()
    (built,) = cache.iterdir()
    assert events == [f"library of {built.stat().st_size}", "named", "directory"]


def test_files_of_a_killed_build_are_removed_after_a_day(cache, compiler):
    left, running = cache / ".build-left", cache / ".build-running"
    for directory, age in ((left, 2 * build._ABANDONED_SECONDS), (running, 60)):
        directory.mkdir(parents=True, mode=0o700)
        (directory / "rows.o").touch()
        os.utime(directory, (time.time() - age,) * 2)
    cache.chmod(0o700)
    assert FRESH().targets
    assert not left.exists() and (running / "rows.o").exists()


def test_a_directory_that_others_can_write_is_not_trusted(cache, compiler):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    found = FRESH()
    assert not found.targets and "chmod 700" in found.reason


@pytest.mark.parametrize(
    "spoil", [lambda path: path.chmod(0o777), lambda path: (path.unlink(), path.symlink_to("/etc/passwd"))]
)
def test_a_library_that_others_can_write_is_rebuilt(spoil, cache, compiler):
    FRESH()
    (built,) = cache.iterdir()
    spoil(built)
    assert FRESH().reason.startswith("built into")
    assert stat.S_ISREG(built.lstat().st_mode) and not built.lstat().st_mode & 0o022
    assert built.read_text().startswith("built")


@pytest.mark.parametrize("content", ["no library", "a library without handlers"])
def test_an_invalid_library_does_not_crash(content, cache, compiler, monkeypatch):
    monkeypatch.setattr(build, "_register", REGISTER)
    if content != "no library":
        other = ml_dtypes._ml_dtypes_ext.__file__
        compiler(f'/bin/cp {shlex.quote(other)} "$2"')
    found = FRESH()
    assert not found.targets and "kernels-" in found.reason


def test_the_kernels_report_whether_this_cpu_multiplies_bfloat16():
    found = build.library()
    flags = Path("/proc/cpuinfo")
    if not found.targets or platform.machine() != "x86_64" or not flags.exists():
        pytest.skip("no kernels, or another kind of CPU or system")
    assert found.multiplies_bfloat16 == ("avx512_bf16" in flags.read_text())
