"""DeepSeek-V4 with quantized weights, as they are loaded: FP4 experts compute what FP8 ones do."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.checkpoint import load_params
from dsv3.config.hugging_face import from_hf
from dsv3.model.layers.expert_parallel import pack
from dsv3.model.layers.experts import ExpertLayer, Quantized, moe
from dsv3.model.layers.linear import Numerics
from dsv3.model.layers.router import Routing
from dsv3.model.params import Params
from tests.dsv3.checkpoint import deepseek_v4 as v4
from tests.dsv3.checkpoint import hf
from tests.dsv3.model.golden import run

PREVIEW = v4.PREVIEW | {"num_hidden_layers": 3, "num_hash_layers": 1, "compress_ratios": [0, 4, 128, 0]}
CFG = dataclasses.replace(from_hf(PREVIEW), num_nextn_predict_layers=0)
TOKENS = np.random.default_rng(0).integers(0, CFG.vocab_size, (1, 24)).astype(np.int32)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.write(tmp_path_factory.mktemp("quantized"), v4.random_tensors(from_hf(PREVIEW)), shards=1)


def load(directory: Path, **options: Any) -> Params:
    return load_params(directory, CFG, dtype="float32", progress=False, **options)


def logits(params: Params) -> np.ndarray:
    return np.asarray(run(params, CFG, TOKENS).logits)


def test_fp4_and_fp8_weights(directory: Path) -> None:
    """Experts that stay FP4 compute what FP8 ones do, to the bit; FP8 products round their inputs."""
    wanted, rounded = logits(load(directory, fp8="dequantize")), logits(load(directory))
    np.testing.assert_array_equal(logits(load(directory, fp4="keep")), rounded)
    assert 0 < np.sqrt(np.mean((rounded - wanted) ** 2)) < 0.6 * wanted.std()


def test_rows_are_quantized_on_their_way_to_fp4_experts(directory: Path) -> None:
    """Half the bytes, and the sums of FP8 experts to the bit."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((6, CFG.hidden_size)), jnp.float32)
    ids = jnp.asarray(rng.permuted(np.tile(np.arange(CFG.n_routed_experts), (6, 1)), axis=1)[:, :2], jnp.int32)
    routing = Routing(ids, jnp.asarray(rng.uniform(size=(6, 2)), jnp.float32))

    @jax.jit
    def sent(params: Any) -> tuple[Any, jax.Array]:
        layer = ExpertLayer(params, 1, Numerics.from_config(CFG, None))
        rows = pack(x, layer)
        return rows, moe(rows, routing, layer)[0]

    (rows, found), (_, wanted) = (sent(load(directory, fp4=mode).moe.moe) for mode in ("keep", "fp8"))
    assert isinstance(rows, Quantized)
    np.testing.assert_array_equal(found, wanted)
