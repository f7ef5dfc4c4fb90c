"""Columns of the matrix: a release of jax, one of its CUDA plugins and a ptxas, each in an environment of its own."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SET_BY_US = ("LD_LIBRARY_PATH", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "CUDA_HOME", "CUDA_ROOT")
_VARIED = re.compile(r"^(jax|jaxlib|nvidia|triton)\b")
"""Packages that a column chooses, or that follow from what it chooses; all others are those of constraints.txt."""
_HIDE = 'for cuda in /usr/local/cuda*; do [ ! -d "$cuda" ] || mount -t tmpfs none "$cuda" || exit 2; done; exec "$@"'


class ToolchainsError(RuntimeError):
    """A column cannot be tried here; the text says why."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column: jax is "oldest" or "newest" within the bounds of pyproject.toml, cuda 12 or 13, ptxas a release."""

    jax: str
    cuda: int
    ptxas: str

    @property
    def name(self) -> str:
        return f"{self.jax}-cuda{self.cuda}-ptxas{self.ptxas}"


COLUMNS = tuple(
    Column(jax, cuda, ptxas)
    for jax in ("newest", "oldest")
    for cuda, ptxas in ((13, "13.0"), (12, "12.9"), (13, "13.5"), (12, "12.8"))
)
"""What a user can have: each extra with its pinned ptxas, with the newest of its CUDA, and with the oldest we take."""


def jax_bounds() -> dict[str, str]:
    """Returns what pip is asked for: the oldest jax that pyproject.toml takes, and the newest."""
    (bound,) = [found for found in _project()["dependencies"] if re.match(r"jax\b", found)]
    oldest = re.search(r">=([\d.]+)", bound)
    if oldest is None or "<" not in bound:
        raise ToolchainsError(f"pyproject.toml bounds jax by {bound!r}, which needs >= and <")
    return {"oldest": f"=={oldest[1]}", "newest": bound.removeprefix("jax")}


def prepare(column: Column, folder: Path) -> Path:
    """Returns the Python of a column's environment, which is made where `folder` has it not yet.

    None of CUDA's libraries are installed, since nothing runs. Raises ToolchainsError.
    """
    environment = folder / "environments" / column.name
    python, ready = environment / "bin" / "python", environment / "ready"
    if not ready.exists():
        _run([sys.executable, "-m", "venv", "--clear", str(environment)])
        constraints = environment / "constraints.txt"
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        constraints.write_text("\n".join(line for line in lines if not _VARIED.match(line)))
        jax, plugin = jax_bounds()[column.jax], f"jax-cuda{column.cuda}"
        nvcc = ["nvidia-cuda-nvcc-cu12"] if column.cuda == 12 else ["nvidia-cuda-nvcc", "nvidia-nvvm"]
        wanted = [line for line in _project()["dependencies"] if not re.match(r"jax\b", line)]
        wanted += _project()["optional-dependencies"]["triton"]
        wanted += [f"{package}{jax}" for package in ("jax", f"{plugin}-plugin", f"{plugin}-pjrt")]
        wanted += [f"{package}=={column.ptxas}.*" for package in nvcc]
        _run([str(python), "-m", "pip", "install", "--quiet", "--constraint", str(constraints), *wanted])
        ready.touch()
    return python


def command(python: Path, part: str) -> list[str]:
    """Returns the command of a part, in which the machine's own CUDA toolkits are empty folders.

    Its exit status is 2 where they cannot be hidden: a private mount namespace needs root, or namespaces of users.
    """
    private = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    return [*private, "sh", "-c", _HIDE, "sh", str(python), "-m", "benchmarks.toolchains.cases", part]


def environment(folder: Path) -> dict[str, str]:
    """Returns the variables of a part, in which no ptxas is along PATH."""
    kept = {name: value for name, value in os.environ.items() if name not in _SET_BY_US}
    path = [entry for entry in kept.get("PATH", os.defpath).split(os.pathsep) if not shutil.which("ptxas", path=entry)]
    return kept | {
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(ROOT),
        "PYTHONNOUSERSITE": "1",
        "JAX_PLATFORMS": "cpu",
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def versions(python: Path) -> dict[str, str]:
    """Returns the versions of jax and Triton in an environment."""
    names = ("jax", "triton")
    code = f"import importlib.metadata as m; print(*map(m.version, {names}))"
    return dict(zip(names, _run([str(python), "-c", code]).split(), strict=True))


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _run(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise ToolchainsError(f"{' '.join(words[:6])} ... ended with {done.returncode}: {done.stderr.strip()[-600:]}")
    return done.stdout
