"""Choosing tokens on the device: pure functions over one rank's logits `[B, W]` float32.

The order is vLLM's: logit bias, forbidden end tokens, penalties; then temperature, min_p, top_k, top_p. Log-
probabilities are of the model's own distribution, before any of these.

Random numbers are counter-based: a draw depends on the request's seed and the position of the token alone, so a text
does not depend on what else is in the batch. A draw inverts the cumulative distribution in two levels (blocks of 128
tokens, then one block) with one uniform number each; it reads the logits a few times and sorts nothing. The
thresholds of top_k and top_p are found by bisecting the bit pattern of a float32, which orders like the number: 31
passes find them exactly. Tokens of equal probability at a threshold are kept together, where a sort would cut between.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_BLOCK = 128
_MIN_TEMPERATURE = 1e-5  # below it logits overflow when divided; vLLM's bound


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Controls:
    """Sampling parameters of the rows of a batch.

    `position` is the index of the token to be sampled, `min_length` the one before which end tokens are forbidden.
    `top_k` 0 keeps every token.
    """

    temperature: Any  # [B] float32
    top_p: Any  # [B] float32
    min_p: Any  # [B] float32
    top_k: Any  # [B] int32
    seed: Any  # [B, 2] uint32
    position: Any  # [B] int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adjustments:
    """What changes the logits of a row before sampling; ids of W or more are padding."""

    repetition: Any  # [B] float32
    presence: Any  # [B] float32
    frequency: Any  # [B] float32
    counts: Any  # [B, W] int32, occurrences in the answer
    in_prompt: Any  # [B, W] bool
    bias_ids: Any  # [B, n] int32
    bias: Any  # [B, n] float32
    forbidden_ids: Any  # [B, m] int32


def greedy(logits: jax.Array) -> jax.Array:
    """Returns the most likely token `[B]` int32, the first of equals; any token for a row with a NaN.

    Maximum first, then its index: XLA:CPU does not vectorise argmax, which takes three to five times as long.
    """
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    is_top = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_top, index, logits.shape[-1] - 1), axis=-1)


def guard(logits: jax.Array, tokens: jax.Array, instead: int) -> jax.Array:
    """Returns `tokens`, with `instead` where a row has no distribution: a logit is NaN or +inf, or all are -inf."""
    return jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), tokens, instead)


def sample(logits: jax.Array, controls: Controls) -> jax.Array:
    """Returns one token `[B]` int32 for each row; rows of temperature 0 (below 1e-5) take the most likely one."""
    is_greedy = controls.temperature < _MIN_TEMPERATURE
    scaled = logits / jnp.where(is_greedy, 1.0, controls.temperature)[:, None]
    weights = jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True))  # the most likely token has 1
    weights = filtered(weights, controls.top_k, controls.top_p, controls.min_p)
    drawn = draw(weights, uniforms(controls.seed, controls.position))
    return jnp.where(is_greedy, greedy(logits), drawn)


def filtered(weights: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Returns the unnormalised probabilities with those that min_p, top_k or top_p exclude set to 0.

    top_p counts the probability that min_p and top_k have left. Every row keeps its most likely token.
    """
    weights = jnp.where(weights >= min_p[:, None], weights, 0.0)  # relative to the most likely token, which has 1
    count = jnp.where(top_k > 0, top_k, weights.shape[-1])
    weights = _at_least(weights, lambda kept: jnp.sum(kept, axis=-1) >= count)
    needed = jnp.where(top_p < 1, top_p * jnp.sum(weights, axis=-1), jnp.inf)  # inf is never reached: keep all
    return _at_least(weights, lambda kept: jnp.sum(jnp.where(kept, weights, 0.0), axis=-1) >= needed)


def _at_least(weights: jax.Array, enough: Any) -> jax.Array:
    """Keeps the weights of the highest threshold for which the kept ones are `enough` ([B, W] bool -> [B] bool)."""
    bits = lax.bitcast_convert_type(weights, jnp.int32)  # not negative: ordered like the weights

    def step(i: jax.Array, threshold: jax.Array) -> jax.Array:
        raised = threshold | (1 << (30 - i))
        return jnp.where(enough(bits >= raised[:, None]), raised, threshold)

    threshold = lax.fori_loop(0, 31, step, jnp.zeros(weights.shape[0], jnp.int32))
    return jnp.where(bits >= threshold[:, None], weights, 0.0)


def uniforms(seed: jax.Array, position: jax.Array) -> jax.Array:
    """Returns two numbers in [0, 1) per row, `[B, 2]`, from its seed and the position of its token."""

    def one(words: jax.Array, counter: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, counter), (2,))

    return jax.vmap(one)(seed, position)


def draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Returns the token `[B]` int32 with a probability proportional to its weight, from two uniform numbers per row."""
    B, W = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -W % _BLOCK))).reshape(B, -1, _BLOCK)
    block = _invert(jnp.sum(blocks, axis=-1), uniform[:, 0])
    inside = _invert(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], uniform[:, 1])
    return block * _BLOCK + inside


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Returns the first index at which the cumulative weight passes `uniform` of the total, never one of weight 0."""
    cumulative = jnp.cumsum(weights, axis=-1)
    passed = cumulative > (uniform * cumulative[:, -1])[:, None]
    return jnp.where(passed[:, -1], jnp.argmax(passed, axis=-1), jnp.argmax(weights, axis=-1)).astype(jnp.int32)


def adjusted(logits: jax.Array, adjustments: Adjustments) -> jax.Array:
    """Returns the logits after bias, forbidden tokens and penalties (repetition: CTRL, arXiv:1909.05858.

    The others: OpenAI).
    """
    a = adjustments
    rows = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[rows, a.bias_ids].add(a.bias, mode="drop")
    logits = logits.at[rows, a.forbidden_ids].set(-jnp.inf, mode="drop")
    seen = (a.counts > 0) | a.in_prompt
    repetition = jnp.where(seen, a.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - a.frequency[:, None] * a.counts
    return logits - a.presence[:, None] * (a.counts > 0)


def log_probabilities(logits: jax.Array, tokens: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns log-probabilities `[...]` of `tokens` `[...]`, and ids and log-probabilities `[..., count]` of the best.

    `logits` are `[..., W]`. Negative tokens stand for none: theirs means nothing.
    """
    logp = jax.nn.log_softmax(logits, axis=-1)
    own = jnp.take_along_axis(logp, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    top, ids = lax.top_k(logp, min(count, logits.shape[-1]))
    return own, ids.astype(jnp.int32), top
