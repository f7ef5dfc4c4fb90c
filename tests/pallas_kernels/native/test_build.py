"""Building the C++ kernels: what is missing or unsafe leaves XLA's products, and says why; nothing half-built stays."""

import os
import platform
import stat
import time
from pathlib import Path

import pytest

from pallas_kernels import backend
from pallas_kernels.native import build

FRESH = build._library.__wrapped__
REGISTER = build._register


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_register", lambda path, key: ({"LayerProduct": key}, False))
    return tmp_path / "dsv3" / "native"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler of a few lines of shell: `$MACROS` describe its CPU, `script` is what it does for a library."""
    path = tmp_path / "bin" / "c++"
    path.parent.mkdir()
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    monkeypatch.setenv("MACROS", "avx512")

    def write(script):
        path.write_text(f'#!/bin/sh\ncase "$*" in *-dM*) echo "$MACROS"; exit;; esac\n'
                        f'while [ "$1" != -o ]; do shift; done\n{script}\n')  # fmt: skip
        path.chmod(0o755)

    write('echo "built $$" > "$2"')
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
    ("script", "reason"), [('echo "no <vector>" >&2; exit 1', "no <vector>"), ("sleep 5", "timed out")]
)
def test_a_build_that_fails_or_hangs_leaves_nothing(script, reason, cache, compiler, monkeypatch):
    monkeypatch.setattr(build, "_BUILD_SECONDS", 0.5)
    compiler(script)
    found = FRESH()
    assert not found.targets and reason in found.reason
    assert not list(cache.iterdir())


def test_what_a_killed_build_has_left_goes_after_a_day(cache, compiler):
    left, running = cache / ".build-left", cache / ".build-running"
    for directory, age in ((left, 2 * build._ABANDONED_SECONDS), (running, 60)):
        directory.mkdir(parents=True, mode=0o700)
        (directory / "rows.o").touch()
        os.utime(directory, (time.time() - age,) * 2)
    cache.chmod(0o700)
    assert FRESH().targets
    assert not left.exists() and (running / "rows.o").exists()


def test_a_directory_that_others_may_write_is_not_trusted(cache, compiler):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    found = FRESH()
    assert not found.targets and "chmod 700" in found.reason


@pytest.mark.parametrize(
    "spoil", [lambda path: path.chmod(0o777), lambda path: (path.unlink(), path.symlink_to("/etc/passwd"))]
)
def test_a_library_that_others_may_write_is_built_again(spoil, cache, compiler):
    FRESH()
    (built,) = cache.iterdir()
    spoil(built)
    assert FRESH().reason.startswith("built into")
    assert stat.S_ISREG(built.lstat().st_mode) and not built.lstat().st_mode & 0o022
    assert built.read_text().startswith("built")


def test_a_file_that_is_no_library_is_no_crash(cache, compiler, monkeypatch):
    monkeypatch.setattr(build, "_register", REGISTER)
    found = FRESH()
    assert not found.targets and "kernels-" in found.reason


def test_the_kernels_say_whether_this_cpu_multiplies_bfloat16():
    found = build.library()
    if not found.targets or platform.machine() != "x86_64":
        pytest.skip("no kernels, or another kind of CPU")
    assert found.multiplies_bfloat16 == ("avx512_bf16" in Path("/proc/cpuinfo").read_text())
