"""The trained policy has the bits of a batch-invariant engine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv3.checkpoint import load_params
from dsv3.config.options import EngineOptions
from dsv3.engine.build import build_engine
from dsv3.engine.operations import UpdateWeights
from tests.dsv3.engine.driving import drain, request, run
from tests.dsv3.engine.fewer import one_bucket
from tests.dsv3.model.golden import DIRECTORY
from training.served import served_logprobs, with_values_of

pytestmark = pytest.mark.optimised  # as XLA compiles other programs

LIMITS = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 64, "batch_invariant": True}
LIMITS |= {"dtype": "float32", "fp8": "quantize", "enable_return_routed_experts": True}


def test_log_probabilities_have_the_engines_bits() -> None:
    """A tiny V3 with FP8 products, quantized from the trainer's weights; answers of several lengths."""
    directory = DIRECTORY / "deepseek_v3"
    with one_bucket():
        engine = build_engine(directory, EngineOptions(**LIMITS), progress=False)
    cfg = engine.model_cfg
    params = load_params(directory, cfg, dtype=jnp.float32, fp8="dequantize", progress=False)
    done = engine.operate(UpdateWeights(params, None, "keep"))
    drain(engine)
    done.result(0)
    prompts = {length: np.random.default_rng(length).integers(3, cfg.vocab_size, length).tolist() for length in (3, 70)}
    how = {"max_tokens": 8, "temperature": 1.0, "seed": 3, "logprobs": 0, "ignore_eos": True}
    asked = (request(str(n), prompt, return_routed_experts=True, **how) for n, prompt in prompts.items())
    answers = run(engine, *asked)
    tokens = np.zeros((2, 80), np.int32)
    routed = np.full((2, 80, cfg.num_moe_layers, cfg.num_experts_per_tok), -1, np.int16)
    for row, (n, prompt) in enumerate(prompts.items()):
        answer = answers[str(n)]
        tokens[row, : n + 8] = prompt + answer.tokens
        for part in (output.routed_experts for output in answer.outputs):
            if part is not None:
                routed[row, part.start : part.start + len(part.array())] = part.array()
    found = np.asarray(served_logprobs(params, cfg, tokens, routed, fp8=True))
    for row, n in enumerate(prompts):
        sampled = [entry.logprob for output in answers[str(n)].outputs for entry in output.logprobs or []]
        assert found[row, n - 1 : n + 7].tolist() == sampled
    mesh = Mesh(np.array(jax.devices()[:2]), ("devices",))
    spread = dataclasses.replace(params, norm=jax.device_put(params.norm, NamedSharding(mesh, PartitionSpec())))
    with pytest.raises(ValueError, match="norm lies on 2 devices"):
        served_logprobs(spread, cfg, tokens)
    other = routed.copy()
    other[1, 5] = (routed[1, 5] + 1) % cfg.n_routed_experts
    moved = np.asarray(served_logprobs(params, cfg, tokens, other, fp8=True)) != found
    assert not moved[0].any() and not moved[1, :5].any() and moved[1, 5:].any(), "given experts are used"


def test_the_gradient_is_the_trainers() -> None:
    served, weights = jnp.array([0.1, 0.2]), jnp.array([3.0, -1.0])
    values, gradient = jax.value_and_grad(lambda x: jnp.vdot(with_values_of(served, x**2), weights))(served)
    assert float(values) == float(jnp.vdot(served, weights))
    np.testing.assert_array_equal(gradient, 2 * served * weights)
