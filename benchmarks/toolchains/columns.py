"""Columns of the matrix: a release of jax, one of its CUDA plugins and a ptxas, each in a folder of its own."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "executables",
    "mosaic",
    *(f"steps-{gpu}" for gpu in ("H200", "A100", "L40S", "B200", "H100")),
    *(f"triton-{gpu}" for gpu in ("A100", "L40S", "B200")),
)
"""What is run of a column, one process each: `cases.PARTS`."""
_TOOLKITS = "/usr/local/cuda*"
_SET_BY_US = ("LD_LIBRARY_PATH", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "CUDA_HOME", "CUDA_ROOT")
_VARIED = re.compile(r"^(jax|jaxlib|nvidia|triton)\b")
"""Packages that a column chooses, or that follow from what it chooses; all others are those of constraints.txt."""
_HIDE = 'n=$1; shift; while [ "$n" -gt 0 ]; do mount -t tmpfs none "$1"; shift; n=$((n-1)); done; exec "$@"'


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


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """A column made ready: the Python of its environment, and the folder that NVIDIA's packages were unpacked in."""

    python: Path
    packages: Path | None


HERE = Toolchain(Path(sys.executable), None)
"""The environment that this process runs in, with the CUDA toolkits that the machine has."""


def jax_bounds() -> dict[str, str]:
    """Returns what pip is asked for: the oldest jax that pyproject.toml takes, and the newest."""
    (bound,) = [found for found in _project()["dependencies"] if re.match(r"jax\b", found)]
    oldest = re.search(r">=([\d.]+)", bound)
    if oldest is None or "<" not in bound:
        raise ToolchainsError(f"pyproject.toml bounds jax by {bound!r}, which needs >= and <")
    return {"oldest": f"=={oldest[1]}", "newest": bound.removeprefix("jax")}


def prepare(column: Column, folder: Path) -> Toolchain:
    """Makes the environment of a column and unpacks its ptxas, where `folder` has them not yet. Raises ToolchainsError.

    Columns of one jax and one extra share the environment, which is lent the ptxas of the last one prepared: a link
    stands where pip would have put it. None of CUDA's libraries are installed, since nothing runs.
    """
    environment = folder / "environments" / f"{column.jax}-cuda{column.cuda}"
    python = environment / "bin" / "python"
    if not (environment / "ready").exists():
        _run([sys.executable, "-m", "venv", "--clear", str(environment)])
        constraints = folder / "constraints.txt"
        constraints.parent.mkdir(parents=True, exist_ok=True)
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        constraints.write_text("\n".join(line for line in lines if not _VARIED.match(line)))
        bound = jax_bounds()[column.jax]
        wanted = [line for line in _project()["dependencies"] if not re.match(r"jax\b", line)]
        wanted += _project()["optional-dependencies"]["triton"]
        wanted += [f"{package}{bound}" for package in ("jax", *_plugins(column))]
        _run([str(python), "-m", "pip", "install", "--quiet", "--constraint", str(constraints), *wanted])
        (environment / "ready").touch()
    packages = folder / "ptxas" / column.ptxas
    if not (packages / "ready").exists():
        names = ["nvidia-cuda-nvcc-cu12"] if column.cuda == 12 else ["nvidia-cuda-nvcc", "nvidia-nvvm"]
        exact = [f"{name}=={column.ptxas}.*" for name in names]
        _run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *exact])
        (packages / "ready").touch()
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "nvidia").unlink(missing_ok=True)
    (site / "nvidia").symlink_to(packages / "nvidia")
    return Toolchain(python, packages)


def command(toolchain: Toolchain, part: str) -> list[str]:
    """Returns the command of a part in which the machine's own CUDA toolkits are empty folders, but for `HERE`.

    Raises ToolchainsError where they cannot be hidden: a private mount namespace needs root, or namespaces of users.
    """
    own = [str(toolchain.python), "-m", "benchmarks.toolchains.cases", part]
    own = ["nice", "-n", "10", *own]
    found = sorted({str(path.resolve()) for path in Path("/").glob(_TOOLKITS[1:]) if path.is_dir()})
    if toolchain is HERE or not found:
        return own
    private = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    hidden = [*private, "sh", "-c", _HIDE, "sh", str(len(found)), *found]
    tried = subprocess.run([*hidden, "true"], capture_output=True, text=True)
    if tried.returncode:
        raise ToolchainsError(f"{', '.join(found)} cannot be hidden: {tried.stderr.strip()}; remove it, or run as root")
    return [*hidden, *own]


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


def versions(toolchain: Toolchain) -> dict[str, str]:
    """Returns the versions of what a column varies, by package."""
    code = (
        "import json, importlib.metadata as m; "
        "print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
    )
    path = {**os.environ, "PYTHONPATH": str(toolchain.packages or "")}
    found: Mapping[str, str] = json.loads(_run([str(toolchain.python), "-c", code], path))
    return {name: version for name, version in sorted(found.items()) if _VARIED.match(name)}


def _plugins(column: Column) -> tuple[str, str]:
    return f"jax-cuda{column.cuda}-plugin", f"jax-cuda{column.cuda}-pjrt"


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _run(words: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise ToolchainsError(f"{' '.join(words[:6])} ... ended with {done.returncode}: {done.stderr.strip()[-600:]}")
    return done.stdout
