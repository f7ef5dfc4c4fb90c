"""Log-probabilities of a prompt's tokens, each given those before it, for requests that ask for them.

The program follows that of a prefill whose chunks belong to such requests, in the same job, and reads the hidden states
that it leaves. Logits of all tokens at once would take 4 GB for 8,192 tokens of DeepSeek-V3: they are made and used in
blocks of tokens, and a step tells of 1,024 tokens per rank at most. What is told of a chunk leaves the engine at once,
so nothing gathers here. A step without such requests has no such program.
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
from dsv3.engine.device.ragged import HEADER, next_tokens, ragged_batch
from dsv3.sampling_params import MAX_LOGPROBS
from dsv3.scheduler.batch_slots import BatchSlots
from dsv3.scheduler.request import EngineOutput, PromptLogprobs
from dsv3.scheduler.sequence import Chunk

NAME = "prompt_logprobs"
MOST_TOLD = 1024
"""Tokens of a rank of which a step tells: what others wait for it, and what each prefill leaves, is bounded so."""
_BLOCK = 64  # tokens whose logits exist at a time: 33 MB of 129,280 words
_PART = 256  # tokens that one output tells of: a front makes JSON of them in one go


def rows_left(layout: Layout, size: int) -> int:
    """Returns how many hidden states a prefill of `size` tokens leaves: the chunks that are told of stand first."""
    return size if layout.functions.draft is not None else min(size, MOST_TOLD)


def outputs_of(slots: BatchSlots, chunks: list[list[Chunk]], results: tuple[np.ndarray, ...]) -> Iterator[EngineOutput]:
    """Yields what the devices have computed of the chunks of each rank.

    It goes to the requests that still hold the slots for which this was computed.
    """
    for rank, mine in enumerate(chunks):
        row = 0
        for chunk in mine:
            sequence = chunk.sequence
            if sequence.tells_prompt and sequence.slot >= 0 and slots.epoch[sequence.slot] == chunk.epoch:
                for part in _parts(chunk, [array[rank, row:] for array in results]):
                    yield EngineOutput(request_id=sequence.id, token_ids=[], prompt_logprobs=part)
            row += chunk.stop - chunk.start


def _parts(chunk: Chunk, results: list[np.ndarray]) -> Iterator[PromptLogprobs]:
    """Yields a chunk's part of the results: its row i tells of the token behind its token i, if the prompt has one."""
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
        hidden = layout.array(rows_left(layout, size), layout.model_cfg.hidden_size, dtype=layout.functions.dtype)
        batch = layout.array(size), layout.array(cfg.prefill_rows(size), HEADER + cfg.pages_per_seq)
        body, arguments = functools.partial(prompt_logprobs_body, layout), (layout.params, hidden, *batch)
        key, padding = Key(NAME, size), {3: layout.no_chunk}
        yield layout.per_rank(key, body, arguments, takes_params=True, gathered="all", padding=padding)


def launch(devices: Devices, bucket: int, forward: Forward) -> tuple[jax.Array, ...]:
    """Starts the program on what the prefill of the bucket has left; the copies of its results are under way."""
    program = devices.programs.get(Key(NAME, bucket))
    results = program(devices.params, forward.hidden, *forward.batch)
    for array in results:
        array.copy_to_host_async()
    return results


def prompt_logprobs_body(
    layout: Layout, params: Any, hidden: jax.Array, tokens: jax.Array, rows: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns for the first tokens of a prefill's batch what their hidden states say of the next one, for one rank.

    `hidden` `[n, D]`, `tokens` `[T]` and `rows` `[B, HEADER + Mp]` are those of `prefill.prefill_body`. The result is
    of m = min(n, 1,024) tokens: the next token's log-probability `[m]` and rank `[m]`, and ids and log-probabilities
    `[m, 20]` of the likeliest. Behind a prompt's end they mean nothing.
    """
    count = min(hidden.shape[0], MOST_TOLD)
    after = next_tokens(ragged_batch(tokens, rows), rows, jnp.zeros((), jnp.int32))
    blocks = -(-count // _BLOCK)
    padding = blocks * _BLOCK - count

    def told(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        functions = layout.functions
        logits = functions.vocabulary.whole(functions.scores(params, layout.model_cfg, block[0]))
        own, ids, top = sampling.log_probabilities(logits, block[1], MAX_LOGPROBS)
        return own, sampling.rank_of(logits, block[1]), ids, top

    blocked = (jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for x in (hidden[:count], after[:count]))
    results = lax.map(told, tuple(x.reshape(blocks, _BLOCK, *x.shape[1:]) for x in blocked))
    own, ranks, ids, top = (x.reshape(-1, *x.shape[2:])[:count] for x in results)
    return own, ranks, ids, top
