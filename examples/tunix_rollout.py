"""An `LLM` as the rollout engine of Tunix (`pip install google-tunix`), and its model as Tunix's actor.

    llm = LLM(directory, dtype="float32")
    actor = Actor(llm.engine.model_cfg, params)
    cluster = RLCluster(
        actor=actor,
        cluster_config=ClusterConfig(rollout_engine=functools.partial(DeepSeekRollout, llm=llm), ...),
        ...
    )

Tunix pads prompts on the left and completions on the right; this project's forward starts each row at position 0.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout import base_rollout

from dsv3 import LLM, SamplingParams
from dsv3.model.module import DeepseekV3


class Actor(DeepseekV3):
    """The model with the arguments and results that Tunix's trainers expect of a module."""

    def __call__(
        self, tokens: jax.Array, *, positions: Any, cache: None, attention_mask: Any, segment_ids: jax.Array
    ) -> tuple[jax.Array, None]:
        """Returns logits float32 `[B, S, W]`, and no cache.

        `tokens` int32 `[B, S]` may be padded on both sides; `segment_ids` `[B, S]` is 0 for padding. Positions and mask
        follow from it, so they are not read.
        """
        length = tokens.shape[1]
        padding = jnp.argmax(segment_ids != 0, axis=1)[:, None]  # on the left
        places = jnp.arange(length)[None]
        rows = jnp.take_along_axis(tokens, (places + padding) % length, axis=1)
        logits = super().__call__(rows).logits
        return jnp.take_along_axis(logits, ((places - padding) % length)[..., None], axis=1), None


class DeepSeekRollout(base_rollout.BaseRollout):
    """Generates with an `LLM`, which stays the caller's to close.

    Tunix constructs it with the actor, the tokenizer, the mesh and the configuration; the tokenizer and the mesh are
    those of the `LLM`. Log-probabilities are the sampler's own, raw: use temperature 1 without filters.
    """

    def __init__(self, llm: LLM, rollout_actor: Actor, **_: Any):
        self._llm = llm
        self._actor = rollout_actor
        tokenizer = llm.tokenizer
        pad = None if tokenizer is None else tokenizer.id_of(tokenizer.special_tokens.get("pad_token", ""))
        if tokenizer is None or pad is None or tokenizer.eos_token_id is None:
            raise ValueError("Tunix needs a tokenizer with a token for padding and one for the end of a sequence")
        self._tokenizer, self._pad, self._eos = tokenizer, pad, tokenizer.eos_token_id

    def generate(
        self, prompts: Sequence[str], rollout_config: base_rollout.RolloutConfig, **_: Any
    ) -> base_rollout.RolloutOutput:
        """Continues each prompt once; a prompt longer than `max_prompt_length` tokens keeps its last ones."""
        longest = rollout_config.max_prompt_length
        tokens = [self._tokenizer.encode(str(prompt))[-longest:] for prompt in prompts]  # Tunix has NumPy's texts
        params = SamplingParams(
            max_tokens=rollout_config.max_tokens_to_generate,
            temperature=rollout_config.temperature,
            top_p=rollout_config.top_p or 1.0,
            top_k=rollout_config.top_k or 0,
            seed=None if rollout_config.seed is None else int(np.asarray(rollout_config.seed).reshape(-1)[-1]),
            stop_token_ids=tuple(rollout_config.eos_tokens or ()),
            logprobs=0,
        )
        completions = [output.outputs[0] for output in self._llm.generate(tokens, params)]
        padded = np.full((len(tokens), longest), self.pad_id(), np.int32)
        for row, ids in zip(padded, tokens, strict=True):
            row[longest - len(ids) :] = ids
        return base_rollout.RolloutOutput(
            text=[each.text for each in completions],
            logits=None,
            tokens=[np.asarray(each.token_ids, np.int32) for each in completions],
            left_padded_prompt_tokens=padded,
            logprobs=[np.asarray([t.logprob for t in each.logprobs or []], np.float32) for each in completions],
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Returns the engine's log-probabilities of `completion_tokens` `[B, C]`, float32; 0 for padding."""
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        pad = self.pad_id()
        known = [np.trim_zeros(row != pad, "f").size for row in prompts]
        lengths = [int((row != pad).sum()) for row in completions]
        rows = [
            [*prompt[prompt.size - before :].tolist(), *completion[:length].tolist()]
            for prompt, completion, before, length in zip(prompts, completions, known, lengths, strict=True)
        ]
        result = np.zeros(completions.shape, np.float32)
        for row, scores, length in zip(result, self._llm.score(rows), lengths, strict=True):
            row[:length] = scores[len(scores) - length :]
        return jnp.asarray(result)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Puts new weights, the state of an `Actor` or a part of it, into the engine."""
        nnx.update(self._actor, params)
        self._llm.update_weights(self._actor.params())

    def pad_id(self) -> int:
        return self._pad

    def eos_id(self) -> int:
        return self._eos

    def model(self) -> Actor:
        return self._actor
