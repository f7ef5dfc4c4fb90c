"""The distribution of a request's next token, in float64 numpy: the oracle of the samplers.

The order is that of docs/engine.md: logit bias, forbidden tokens, penalties, temperature, min_p, top_k, top_p. Tokens
of equal probability at a threshold are kept together. Parameters are rounded to float32, as on the device.
"""

from collections import Counter
from collections.abc import Collection

import numpy as np

from dsv3.sampling_params import SamplingParams


def apply_adjustments(
    logits: np.ndarray, sampling: SamplingParams, prompt: list[int], answer: list[int], forbidden: Collection[int]
) -> np.ndarray:
    """Returns one row's logits after bias, forbidden tokens and penalties."""
    x = logits.astype(np.float64)
    for token, bias in sampling.logit_bias.items():
        x[token] += np.float32(bias)
    x[list(forbidden)] = -np.inf
    repetition = np.float64(np.float32(sampling.repetition_penalty))
    for token in {*prompt, *answer}:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token, count in Counter(answer).items():
        x[token] -= np.float32(sampling.frequency_penalty) * np.float64(count) + np.float32(sampling.presence_penalty)
    return x


def weights(x: np.ndarray, temperature: float) -> np.ndarray:
    """Returns probabilities relative to the most likely token's; below 1e-5 that token alone, the first of equals."""
    if temperature < 1e-5:
        return (np.arange(len(x)) == x.argmax()).astype(np.float64)
    return np.exp((x - x.max()) / np.float32(temperature))


def support(x: np.ndarray, sampling: SamplingParams, slack: float = 0.0) -> np.ndarray:
    """Returns which tokens can be drawn, given adjusted logits; `slack` loosens min_p and top_p by that share of them.

    With a negative slack they are tightened. So the device's set lies between two of these, whatever it has rounded.
    """
    w = weights(x, sampling.temperature)
    min_p = min(1.0, float(np.float32(sampling.min_p)) * (1 - slack))
    top_p = float(np.float32(sampling.top_p)) * (1 + slack)
    w[w < min_p] = 0
    if 0 < sampling.top_k < len(w):
        w[w < np.sort(w)[-sampling.top_k]] = 0
    if top_p < 1:
        descending = np.sort(w)[::-1]
        missing = np.cumsum(descending) < top_p * w.sum()
        w[w < descending[min(missing.sum(), len(w) - 1)]] = 0
    return w > 0


def chi_square_bound(degrees: int) -> float:
    """Returns the 99.9 % quantile of the chi-square distribution, to 1 %, by Wilson and Hilferty's formula (1931)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.0902 * spread**0.5) ** 3
