"""The suite itself."""

import pathlib
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

PROJECT = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_it_runs_without_xdist() -> None:
    one = "tests/test_docs.py::test_every_test_that_a_page_names_exists"
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", one]
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def required(extra: str, platform: str) -> dict[str, Requirement]:
    """Returns what pip installs of its own accord for an extra on a platform, by name."""
    found: dict[str, Requirement] = {}
    for text in PROJECT["optional-dependencies"][extra]:
        one = Requirement(text)
        if one.name == "dsv3":
            for other in one.extras:
                found |= required(other, platform)
        elif one.marker is None or one.marker.evaluate({"sys_platform": platform}):
            found[one.name] = one
    return found


def test_a_mac_can_install_what_the_tests_need() -> None:
    of_gpus = ("nvidia", "jax-cuda", "jax-triton", "triton")
    assert not [name for name in required("dev", "darwin") if name.startswith(of_gpus)]
    assert {"jax-cuda13-plugin", "nvidia-cuda-nvcc", "triton"} <= required("dev", "linux").keys()


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_a_user_gets_the_compilers_that_the_kernels_are_tested_with(extra: str) -> None:
    """No newest ones: those of `aot`, or the last of CUDA 12; and no jax that has not been seen."""
    tested, given = required("aot", "linux"), required(extra, "linux")
    if extra == "cuda13":
        for name in ("nvidia-cuda-nvcc", "nvidia-nvvm"):
            assert given[name].specifier == tested[name].specifier
    else:
        assert str(given["nvidia-cuda-nvcc-cu12"].specifier) == "==12.9.*"
    base = {one.name: one for one in map(Requirement, PROJECT["dependencies"])}
    for one in (base["jax"], given["jax"], tested["jax-cuda13-plugin"], tested["jax-cuda13-pjrt"]):
        assert "0.12.0.1" in one.specifier and "0.13" not in one.specifier
