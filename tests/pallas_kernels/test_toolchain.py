"""The ptxas that assembles kernels: pip's first, and none that is too old."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import backend, toolchain
from pallas_kernels.backend import Backend

ROOT = Path(__file__).parents[2]


def ptxas(directory: Path, release: str, status: int = 0) -> Path:
    """Writes a ptxas that only prints its release."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "ptxas"
    says = f"echo 'Cuda compilation tools, release {release}, V{release}.85'; exit {status}"
    path.write_text(f'#!/bin/sh\ncase "$*" in *--version*) {says};; esac\necho too old >&2; exit 255\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """The directory of pip's packages, without NVIDIA's packages; PATH and the host's toolkit are empty."""
    monkeypatch.setattr(toolchain, "_WHEELS", ("played_wheels.cu13", "played_wheels.cuda_nvcc"))
    monkeypatch.setattr(toolchain, "_TOOLKIT", tmp_path / "usr/local/cuda/bin")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PATH", str(tmp_path / "host"))
    yield tmp_path / "site" / "played_wheels"
    for name in [name for name in sys.modules if name.startswith("played_wheels")]:
        del sys.modules[name]


def test_pips_ptxas_comes_before_the_hosts(wheels, tmp_path, caplog) -> None:
    ptxas(tmp_path / "host", "12.4")
    ptxas(wheels / "cuda_nvcc" / "bin", "12.9")
    with caplog.at_level(logging.INFO):
        backend.prepare(Backend.TRITON)
        backend.prepare(Backend.TRITON)
    first = str(wheels / "cuda_nvcc" / "bin")
    assert os.environ["PATH"].split(os.pathsep) == [first, str(tmp_path / "host")], "once, with the rest behind it"
    assert f"kernels are assembled by ptxas 12.9, {first}/ptxas" in caplog.text


def test_of_two_wheels_the_one_with_a_ptxas_is_used(wheels) -> None:
    (wheels / "cu13" / "lib").mkdir(parents=True)  # as nvidia-cublas leaves it
    ptxas(wheels / "cuda_nvcc" / "bin", "12.9")
    assert toolchain._own_directory() == wheels / "cuda_nvcc" / "bin"
    ptxas(wheels / "cu13" / "bin", "13.0")
    assert toolchain._own_directory() == wheels / "cu13" / "bin"


@pytest.mark.parametrize("where", ["host", "usr/local/cuda/bin"])
@pytest.mark.parametrize("release", ["11.8", "12.4", "12.6"])
def test_an_old_ptxas_is_rejected_by_name(wheels, tmp_path, where, release) -> None:
    path = ptxas(tmp_path / where, release)
    with pytest.raises(ValueError, match=f"{path} is ptxas {release}, but .* 12.8 or newer; install .* cuda13"):
        backend.prepare(Backend.MOSAIC)


@pytest.mark.parametrize("release", ["12.8", "13.0", "13.10"])
def test_a_newer_ptxas_of_the_host_is_used(wheels, tmp_path, release, caplog) -> None:
    path = ptxas(tmp_path / "host", release)
    with caplog.at_level(logging.INFO):
        assert toolchain.check_ptxas() == f"ptxas {release}, {path}"
    assert f"ptxas {release}, {path}" in caplog.text


def test_a_ptxas_that_does_not_run_is_rejected(wheels, tmp_path) -> None:
    path = ptxas(tmp_path / "host", "13.0")
    path.write_text("#!/bin/sh\necho wrong machine >&2; exit 3\n")
    with pytest.raises(ValueError, match=r"names no release .status 3: 'wrong machine'"):
        toolchain.check_ptxas()
    path.write_text("#!/no/such/shell\n")
    with pytest.raises(ValueError, match="ptxas does not run"):
        toolchain.check_ptxas()


def test_without_a_ptxas_the_log_names_what_to_install(wheels, caplog) -> None:
    assert toolchain.check_ptxas() == ""
    assert "no ptxas is in a wheel" in caplog.text and "cuda13 or cuda12" in caplog.text


def test_other_backends_need_no_ptxas(wheels, tmp_path) -> None:
    ptxas(tmp_path / "host", "11.8")
    before = os.environ["PATH"]
    for each in (Backend.NATIVE, Backend.REFERENCE):
        backend.prepare(each)
    assert os.environ["PATH"] == before


_COMPILES = """
import os
import jax, jax.numpy as jnp
from pallas_kernels import aot, backend
from pallas_kernels.backend import Backend
from pallas_kernels.fp8 import quantize_1x128
assert "MOSAIC_GPU_RUNTIME_LIB_PATH" not in os.environ
x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
aot.compile_for(lambda x: quantize_1x128(x, backend=Backend.MOSAIC), x)
assert os.path.isfile(os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"])
"""


@pytest.mark.aot
def test_a_kernel_compiles_beside_an_old_toolkit(tmp_path) -> None:
    """A process of its own: jaxlib looks for ptxas once."""
    ptxas(tmp_path, "12.4")
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    environment.pop("MOSAIC_GPU_RUNTIME_LIB_PATH", None)  # set if an earlier test has imported Mosaic
    done = subprocess.run(
        [sys.executable, "-c", _COMPILES], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
