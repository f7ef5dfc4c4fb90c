"""Sampling on the device: pure functions over one rank's logits `[B, W]` float32.

The order is vLLM's: logit bias, forbidden end tokens, penalties; then temperature, min_p, top_k, top_p.
Raw log-probabilities are of the model's own distribution, before any of these, processed ones after all.

Random numbers are counter-based: a draw depends on the request's seed and the position of the token alone, so a text
does not depend on the rest of the batch. A draw inverts the cumulative distribution in two levels (blocks of 128
tokens, then one block) with one uniform number each; it reads the logits a few times and sorts nothing. The thresholds
of top_k and top_p are found by bisecting the bit pattern of a float32, which orders like the number: 30 passes find
them exactly. Tokens of equal probability at a threshold are kept together, where a sort would cut between.

XLA may compute a cheap value again in each loop that needs it, and LLVM rounds `a * b - c` once in one loop and twice
in another. So two uses of one product may differ in their last bit, and a maximum may equal none of the values beside
it. What is compared with its own maximum is therefore read from memory: the model's logits, and the result of a
scatter.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsv3.model.vocabulary import Vocabulary

_WORD_BITS = 32
_BLOCK = 128
_PASSES = 30  # bits of a float32 in [0, 1] that may be set
_MIN_TEMPERATURE = 1e-5  # colder is greedy; vLLM's bound
_TINY = float(jnp.finfo(jnp.float32).tiny)  # the least number that is not flushed to 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Controls:
    """Sampling parameters of the rows of a batch.

    `position` is the index of the token to be sampled. `top_k` 0 keeps every token.
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
    """Changes to the logits of a row before sampling; ids of W or more are padding."""

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

    Maximum first, then its index: XLA:CPU does not vectorize argmax, which takes three to five times as long.
    """
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    is_top = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_top, index, logits.shape[-1] - 1), axis=-1)


def replace_invalid(logits: jax.Array, tokens: jax.Array, instead: int) -> jax.Array:
    """Returns `tokens`, with `instead` where a row has no distribution: a logit is NaN or +inf, or all are -inf."""
    return jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), tokens, instead)


def sample(logits: jax.Array, controls: Controls, *, filters: bool = True, adaptive: bool = False) -> jax.Array:
    """Returns one token `[B]` int32 for each row; rows of temperature 0 (below 1e-5) take the most likely one.

    Without `filters` no row uses top_k, top_p or min_p: their 62 passes over the logits are left out. An `adaptive`
    sampler checks while it runs whether a row uses top_k, and whether one uses top_p, and skips the other passes.
    """
    is_greedy = controls.temperature < _MIN_TEMPERATURE
    weights = _sampled_weights(logits, controls, filters, adaptive)
    drawn = draw(weights, uniforms(controls.seed, controls.position))
    return jnp.where(is_greedy, greedy(logits), drawn)


def processed_logprobs(
    logits: jax.Array,
    tokens: jax.Array,
    controls: Controls,
    count: int,
    *,
    filters: bool = True,
    adaptive: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what `log_probabilities` does, of the distribution that `sample` draws `tokens` `[B]` from.

    Excluded tokens have minus infinity. Rows of temperature 0 have the distribution of temperature 1 without filters,
    as vLLM's.
    """
    is_greedy = controls.temperature < _MIN_TEMPERATURE
    neutral = dataclasses.replace(
        controls,
        top_p=jnp.where(is_greedy, 1.0, controls.top_p),
        min_p=jnp.where(is_greedy, 0.0, controls.min_p),
        top_k=jnp.where(is_greedy, 0, controls.top_k),
    )
    return log_probabilities(jnp.log(_sampled_weights(logits, neutral, filters, adaptive)), tokens, count)


def kept_words(
    logits: jax.Array, tokens: jax.Array, controls: Controls, *, filters: bool = True, adaptive: bool = False
) -> jax.Array:
    """Returns the tokens that `sample` draws `tokens` `[B]` from, as bits: uint32 `[B, words]`, see `apply_bitmask`.

    Rows of temperature 0 draw from their most likely token alone.
    """
    is_greedy = (controls.temperature < _MIN_TEMPERATURE)[:, None]
    is_drawn = jnp.arange(logits.shape[-1]) == tokens[:, None]
    kept = jnp.where(is_greedy, is_drawn, _sampled_weights(logits, controls, filters, adaptive) > 0)
    bits = jnp.pad(kept, ((0, 0), (0, -kept.shape[-1] % _WORD_BITS))).reshape(len(kept), -1, _WORD_BITS)
    return (bits.astype(jnp.uint32) << jnp.arange(_WORD_BITS, dtype=jnp.uint32)).sum(axis=-1, dtype=jnp.uint32)


def _sampled_weights(logits: jax.Array, controls: Controls, filters: bool, adaptive: bool) -> jax.Array:
    """Returns the relative weights that `sample` draws from; rows of temperature 0 have those of temperature 1."""
    is_greedy = controls.temperature < _MIN_TEMPERATURE
    weights = relative_weights(logits, jnp.where(is_greedy, 1.0, controls.temperature))
    if not filters:
        return weights
    return apply_filters(weights, controls.top_k, controls.top_p, controls.min_p, adaptive=adaptive)


def relative_weights(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Returns probabilities relative to the most likely token's: that one has exactly 1, and no other more.

    The maximum is subtracted before the division: the most likely token's difference is 0, whatever is rounded, and
    where the others' quotients overflow, they do so below 0.
    """
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    return jnp.minimum(jnp.exp(below / temperature[:, None]), 1.0)  # an approximate exp may exceed 1 just below 0


def apply_filters(
    weights: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array, *, adaptive: bool = False
) -> jax.Array:
    """Returns the weights (see `relative_weights`) with those that min_p, top_k or top_p exclude set to 0.

    top_p counts the probability that min_p and top_k have left. Every row keeps its most likely token: its weight is 1,
    which no min_p exceeds, and top_k and top_p always keep something. `adaptive` skips the passes of a filter that no
    row uses; a GPU would wait for its host in every such pass, whose number it does not know.
    """
    weights = jnp.where(weights >= min_p[:, None], weights, 0.0)
    count = jnp.where(top_k > 0, top_k, weights.shape[-1])
    passes = jnp.where(jnp.any(top_k > 0), _PASSES, 0) if adaptive else _PASSES
    weights = _at_least(weights, lambda kept: jnp.sum(kept, axis=-1) >= count, passes)
    needed = jnp.maximum(top_p * jnp.sum(weights, axis=-1), _TINY)  # top_p 1e-38 gives 0, which no token would satisfy
    needed = jnp.where(top_p < 1, needed, jnp.inf)  # inf is never reached: keep all
    passes = jnp.where(jnp.any(top_p < 1), _PASSES, 0) if adaptive else _PASSES
    return _at_least(weights, lambda kept: jnp.sum(jnp.where(kept, weights, 0.0), axis=-1) >= needed, passes)


def _at_least(weights: jax.Array, enough: Any, passes: Any) -> jax.Array:
    """Keeps the weights of the highest threshold for which the kept ones are `enough` ([B, W] bool -> [B] bool).

    Weights are in [0, 1], so their highest two bits are 0, and 30 `passes` find it; with 0 passes all are kept.
    """
    bits = lax.bitcast_convert_type(weights, jnp.int32)  # ordered like the weights

    def step(i: jax.Array, threshold: jax.Array) -> jax.Array:
        raised = threshold | (1 << (_PASSES - 1 - i))
        return jnp.where(enough(bits >= raised[:, None]), raised, threshold)

    threshold = lax.fori_loop(0, passes, step, jnp.zeros(weights.shape[0], jnp.int32))
    return jnp.where(bits >= threshold[:, None], weights, 0.0)


def uniforms(seed: jax.Array, position: jax.Array) -> jax.Array:
    """Returns two numbers in [0, 1) per row, `[B, 2]`, from its seed and the position of its token."""

    def one(words: jax.Array, counter: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, counter), (2,))

    return jax.vmap(one)(seed, position)


def force_acceptance(
    drawn: jax.Array, drafts: jax.Array, controls: Controls, chance: float, vocab_size: int
) -> jax.Array:
    """Returns tokens `[B]` with a synthetic acceptance, for benchmarks: the drafts with probability `chance`.

    Elsewhere a token other than the draft is returned. The coin is a third random number of seed and position. Negative
    values, drawn or drafts, stay.
    """

    def coin(words: jax.Array, counter: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, counter), 1))

    other = jnp.where(drawn == drafts, (drawn + 1) % vocab_size, drawn)
    accepted = (jax.vmap(coin)(controls.seed, controls.position) < chance) & (drafts >= 0)
    return jnp.where(drawn < 0, drawn, jnp.where(accepted, drafts, other))


def draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Returns a token `[B]` int32 with a probability proportional to its weight, from two uniform numbers per row."""
    B, W = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -W % _BLOCK))).reshape(B, -1, _BLOCK)
    block = _invert(jnp.sum(blocks, axis=-1), uniform[:, 0])
    inside = _invert(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], uniform[:, 1])
    return block * _BLOCK + inside


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Returns the first index at which the cumulative weight passes `uniform` of the total, never one of weight 0.

    XLA adds in parallel: over more than 256 weights the sum may rise or fall by a rounding where a weight is 0.
    """
    cumulative = jnp.cumsum(weights, axis=-1)
    passed = (weights > 0) & (cumulative > (uniform * cumulative[:, -1])[:, None])
    return jnp.where(passed.any(axis=-1), jnp.argmax(passed, axis=-1), jnp.argmax(weights, axis=-1)).astype(jnp.int32)


def apply_adjustments(logits: jax.Array, adjustments: Adjustments) -> jax.Array:
    """Returns the logits after bias, penalties and forbidden tokens.

    The repetition penalty is CTRL's (arXiv:1909.05858), the others are OpenAI's. Forbidden tokens come last, which
    changes nothing for them: a scatter fixes the bits of all.
    """
    a = adjustments
    rows = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[rows, a.bias_ids].add(a.bias, mode="drop")
    seen = (a.counts > 0) | a.in_prompt
    repetition = jnp.where(seen, a.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - a.frequency[:, None] * a.counts
    logits = logits - a.presence[:, None] * (a.counts > 0)
    return logits.at[rows, a.forbidden_ids].set(-jnp.inf, mode="drop")


def log_probabilities(logits: jax.Array, tokens: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns log-probabilities `[...]` of `tokens` `[...]`, and ids and log-probabilities `[..., count]` of the best.

    `logits` are `[..., W]`. Negative tokens are padding, with undefined results.
    """
    logp = jax.nn.log_softmax(logits, axis=-1)
    own = jnp.take_along_axis(logp, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    top, ids = lax.top_k(logp, min(count, logits.shape[-1]))
    return own, ids.astype(jnp.int32), top


def rank_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the rank `[B]` int32 of `tokens` `[B]` among `logits` `[B, W]`, from 1, the likeliest."""
    own = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    is_other = jnp.arange(logits.shape[-1]) != tokens[:, None]  # `own` may be rounded differently than in `logits`
    return 1 + jnp.sum((logits > own) & is_other, axis=-1, dtype=jnp.int32)


class Best(NamedTuple):
    """The most likely token of each row: int32 `[...]`, and its score, float32 `[...]`."""

    tokens: jax.Array
    scores: jax.Array


def best_tokens(vocabulary: Vocabulary, scores: jax.Array) -> Best:
    """Returns the best tokens of this rank's rows, from scores `[Xn, ..., W / Xn]` (`Vocabulary.scores`).

    The first of equals, as in `greedy`. In a row with a NaN the token is any, and the score NaN.
    """
    width = scores.shape[-1]
    local = greedy(scores) + vocabulary.first_word(width)
    local_top = lax.bitcast_convert_type(jnp.max(scores, axis=-1), jnp.int32)
    tokens, bits = jnp.moveaxis(vocabulary.exchange(jnp.stack([local, local_top], axis=-1)), -1, 0)
    tops = lax.bitcast_convert_type(bits, jnp.float32)
    top = jnp.max(tops, axis=0)
    last = width * vocabulary.ranks - 1
    return Best(jnp.min(jnp.where(tops == top, tokens, last), axis=0), top)


def apply_bitmask(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """Returns logits `[B, S, W]` that are -inf where `masks` `[B, S, words]` have no bit.

    Non-finite logits stay, so that the sampler fails the request.
    """
    bits = (masks[..., None] >> jnp.arange(_WORD_BITS, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(*masks.shape[:-1], -1)[..., : logits.shape[-1]] > 0
    return jnp.where(allowed | ~(logits < jnp.inf), logits, -jnp.inf)


def bitmask_words(vocab_size: int) -> int:
    """Returns the 32-bit words of a token bitmask."""
    return -(-vocab_size // _WORD_BITS)
