"""What must be equal in every process of an instance, as named fields, so that a mismatch names its cause."""

import functools
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pallas_kernels
import sharding
from dsv3.checkpoint.identity import known_identity
from dsv3.config.declaration import options_of
from dsv3.config.hugging_face import config_digest
from dsv3.config.options import ClusterOptions, EngineOptions

Fields = dict[str, str]
"""Short texts: settings in the clear, files as the first characters of a sha256."""

_DIGEST_CHARACTERS = 16
_SOURCES = (Path(__file__).parents[1], *(Path(str(each.__file__)).parent for each in (sharding, pallas_kernels)))


def fields_of(model_dir: Path, options: EngineOptions, cluster: ClusterOptions) -> Fields:
    """Returns the fields that a process knows before it starts jax."""
    flags = matching_options(cluster) | matching_options(options)
    return {
        **environment(model_dir),
        "weights": known_identity(model_dir)[:_DIGEST_CHARACTERS],
        **{f"--{name}": value for name, value in flags.items()},
    }


def environment(model_dir: Path) -> Fields:
    """Returns what every program depends on before there is a device: code, versions, XLA's flags, the model."""
    return {
        "code": code_digest(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "model config": config_digest(model_dir)[:_DIGEST_CHARACTERS],
    }


def matching_options(options: Any) -> Fields:
    """Returns the options that must be equal in all processes of an instance, by name."""
    return {each.name: repr(getattr(options, each.name)) for each in options_of(type(options)) if each.terms.agree}


def program_options(options: Any) -> Fields:
    """Returns the options that compiled programs may depend on, by name."""
    return {each.name: repr(getattr(options, each.name)) for each in options_of(type(options)) if each.terms.programs}


def differences(leader: Mapping[str, str], other: Mapping[str, str], process_id: int) -> str:
    """Returns the fields that differ, with both values; empty if none does."""
    names = [name for name in [*leader, *(n for n in other if n not in leader)] if leader.get(name) != other.get(name)]
    parts = (f"{n} ({leader.get(n, 'none')} there, {other.get(n, 'none')} in process {process_id})" for n in names)
    return ", ".join(parts)


@functools.cache
def code_digest() -> str:
    """Digests every source file that can change what a program computes."""
    total = hashlib.sha256()
    for root in _SOURCES:
        for path in sorted([*root.rglob("*.py"), *root.rglob("*.cc"), *root.rglob("*.h")]):
            total.update(f"{root.name}/{path.relative_to(root)}\0".encode())
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:_DIGEST_CHARACTERS]
