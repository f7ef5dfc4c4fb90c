"""Log-probabilities of a prompt's tokens, each given those before it, for requests that ask for them.

The program follows that of a prefill with chunks of such requests, in the same job, and reads its hidden states. Logits
of all tokens at once would take 4 GB for 8,192 tokens of DeepSeek-V3: they are computed in blocks of tokens, at most
1,024 tokens per rank and step. The results of a chunk leave the engine at once, so none accumulate. A step without such
requests launches no such program.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv3.engine.device import sampling
from dsv3.engine.device.devices import Devices, Forward
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.device.state import next_tokens, ragged_batch
from dsv3.sampling_params import MAX_LOGPROBS
from dsv3.scheduler.batch_slots import BatchSlots
from dsv3.scheduler.request import EngineOutput, PromptLogprobs
from dsv3.scheduler.sequence import Chunk

NAME = "prompt_logprobs"
MAX_PROMPT_LOGPROB_TOKENS = 1024
"""Tokens of a rank with log-probabilities per step: bounds the delay of other requests, and the hidden states kept."""
_BLOCK = 64  # tokens whose logits exist at a time: 33 MB of 129,280 words
_PART = 256  # tokens per output: an API server encodes an output to JSON without interruption


def num_hidden_rows(layout: Layout, size: int) -> int:
    """Returns how many hidden states a prefill of `size` tokens returns; chunks that need them come first."""
    drafts = layout.functions.draft is not None and layout.model_cfg.hyper_connections is None
    return size if drafts else min(size, MAX_PROMPT_LOGPROB_TOKENS)


def prompt_logprob_outputs(
    slots: BatchSlots, chunks: list[list[Chunk]], results: tuple[np.ndarray, ...]
) -> Iterator[EngineOutput]:
    """Yields the results of the chunks of each rank.

    Requests that have left the slots that these were computed for get nothing.
    """
    for rank, mine in enumerate(chunks):
        row = 0
        for chunk in mine:
            sequence = chunk.sequence
            if sequence.needs_prompt_logprobs and slots.holds(sequence, chunk.epoch):
                for part in _parts(chunk, [array[rank, row:] for array in results]):
                    yield EngineOutput(request_id=sequence.id, token_ids=[], prompt_logprobs=part)
            row += chunk.stop - chunk.start


def _parts(chunk: Chunk, results: list[np.ndarray]) -> Iterator[PromptLogprobs]:
    """Yields a chunk's results in parts: its row i belongs to the token behind its token i, if the prompt has one."""
    stop, width = min(chunk.stop, chunk.sequence.prompt_length - 1), chunk.sequence.sampling.prompt_logprobs or 0
    for start in range(chunk.start, max(stop, chunk.start + 1), _PART):
        first = start - chunk.start
        rows = slice(first, first + min(_PART, stop - start))
        own, ranks, ids, top = (array[rows] for array in results)
        columns = own.astype("<f4"), ranks.astype("<i4"), ids[:, :width].astype("<i4"), top[:, :width].astype("<f4")
        yield PromptLogprobs(start + 1, *(column.tobytes() for column in columns))


def programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields one program per bucket of prefill."""
    cfg = layout.cfg
    for size in cfg.prefill_buckets:
        hidden = layout.array(num_hidden_rows(layout, size), layout.model_cfg.hidden_size, dtype=layout.functions.dtype)
        body, arguments = functools.partial(prompt_logprobs_body, layout), (layout.params, hidden, *layout.chunks(size))
        key, padding = Key(NAME, size), {3: layout.padding_chunk}
        yield layout.per_rank(key, body, arguments, takes_params=True, gathered="all", padding=padding)


def launch(devices: Devices, bucket: int, forward: Forward) -> tuple[jax.Array, ...]:
    """Starts the program on the hidden states of a prefill of the bucket; copies of its results have been started."""
    program = devices.programs.get(Key(NAME, bucket))
    results = program(devices.params, forward.hidden, *forward.batch)
    for array in results:
        array.copy_to_host_async()
    return results


def prompt_logprobs_body(
    layout: Layout, params: Any, hidden: jax.Array, tokens: jax.Array, rows: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns log-probabilities of the tokens that follow the first tokens of a prefill's batch, for one rank.

    `hidden` `[n, D]`, `tokens` `[T]` and `rows` `[B, HEADER + Mp]` are those of `prefill.prefill_body`. Results are for
    m = min(n, 1,024) tokens: the next token's log-probability `[m]` and rank `[m]`, and ids and log-probabilities `[m,
    20]` of the likeliest. Behind a prompt's end they are undefined.
    """
    count = min(hidden.shape[0], MAX_PROMPT_LOGPROB_TOKENS)
    after = next_tokens(ragged_batch(layout.cfg, tokens, rows), rows, jnp.zeros((), jnp.int32))
    blocks = -(-count // _BLOCK)
    padding = blocks * _BLOCK - count

    def block_logprobs(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        functions = layout.functions
        logits = functions.vocabulary.whole(functions.scores(params, layout.model_cfg, block[0]))
        own, ids, top = sampling.log_probabilities(logits, block[1], MAX_LOGPROBS)
        return own, sampling.rank_of(logits, block[1]), ids, top

    blocked = (jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for x in (hidden[:count], after[:count]))
    results = lax.map(block_logprobs, tuple(x.reshape(blocks, _BLOCK, *x.shape[1:]) for x in blocked))
    own, ranks, ids, top = (x.reshape(-1, *x.shape[2:])[:count] for x in results)
    return own, ranks, ids, top
