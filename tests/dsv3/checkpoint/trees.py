"""Parameter trees as flat dictionaries, and comparisons of them to the bit."""

from typing import Any

import jax
import numpy as np

from dsv3.checkpoint import layout
from dsv3.config.model import ModelConfig
from dsv3.model.params import Fp4Weight, Fp8Weight, Params, declare

_PAIRS = (Fp4Weight, Fp8Weight)


def by_path(cfg: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Host arrays by dotted path; an FP8 or FP4 weight gives its fields, such as ".data"."""
    flat = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, _PAIRS))
    result = {}
    for path, leaf in zip(layout.leaves(cfg), flat, strict=True):
        if isinstance(leaf, _PAIRS):
            result |= {f"{path}.{name}": np.asarray(array) for name, array in vars(leaf).items()}
        else:
            result[path] = np.asarray(leaf)
    return result


def assert_same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """Same names, shapes, dtypes and bytes."""
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert a[name].tobytes() == b[name].tobytes(), name


def random_params(cfg: ModelConfig, dtype: Any, seed: int = 0) -> Params:
    """Random values at every leaf, made without compiling anything."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jax.device_put(rng.normal(size=s.shape).astype(s.dtype or dtype)), declare(cfg))
