"""The engine on two families, token for token against transformers: in chunks, and from pages."""

import dataclasses

import jax
import numpy as np
import pytest

from configs.glm import GLM_4_7_FLASH
from configs.mistral import MISTRAL_SMALL_4
from dsv3 import LLM, SamplingParams
from dsv3.engine.description import describe
from dsv3.engine.dtypes import EngineDtypes, count_parameters, short
from pallas_kernels.backend import Backend
from tests.dsv3.engine.fewer import greedy_samplers, one_bucket
from tests.dsv3.model.golden import DIRECTORY, data, model


@pytest.mark.parametrize(("family", "options"), [("glm4_moe_lite", {}), ("mistral4", {"fp8": "dequantize"})])
def test_greedy_tokens_are_those_of_transformers(family: str, options: dict) -> None:
    """Drafts of a module are in `test_draft_model` and `test_balance`, the logits of GLM's in model/test_families."""
    golden = data(family)
    prompts = [row[row >= 0].tolist() for row in golden["prompts"]]
    limits = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with one_bucket(), greedy_samplers():
        llm = LLM(DIRECTORY / family, progress=False, **limits, **options)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == golden["greedy"].tolist()
    stats = llm.engine.stats()
    assert (stats.pages_in_use, stats.recompilations) == (0, 0)


def test_the_description() -> None:
    half = EngineDtypes(np.dtype("float32"), "bfloat16")
    served = dataclasses.replace(GLM_4_7_FLASH, num_nextn_predict_layers=0)
    line = describe(served, EngineDtypes(jax.numpy.dtype("bfloat16"), "bfloat16"), Backend.MOSAIC)
    assert line == (
        "family glm4_moe_lite, 29.9 billion parameters, 3.58 billion of them per token; "
        "54,144 bytes of cache per token "
        "(bfloat16); computed by Mosaic GPU kernels"
    )
    line = describe(MISTRAL_SMALL_4, half, Backend.MOSAIC)
    assert "attention by jax.numpy, because float32 is neither bfloat16 nor float16" in line
    assert line.count("because") == 1
    assert describe(MISTRAL_SMALL_4, half, Backend.REFERENCE).endswith("computed by jax.numpy")
    sixteen = EngineDtypes(jax.numpy.dtype("bfloat16"), "fp8")  # FP8 pages of latents of 256, which Mosaic has not
    assert describe(MISTRAL_SMALL_4, sixteen, Backend.TRITON).endswith("computed by Triton kernels")
    params, cfg = model("glm4_moe_lite")
    assert count_parameters(cfg)[0] == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert [short(n) for n in (671_000_000_000, 30_600_000_000, 6_030_000, 999)] == [
        "671 billion",
        "30.6 billion",
        "6.03 million",
        "999",
    ]
