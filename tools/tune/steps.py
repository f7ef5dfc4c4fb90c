"""Times whole steps of engines with other batch sizes, chunk sizes and numbers of drafts.

The engines share their weights; each has a pool of pages that holds what is measured, so that several fit a device.
"""

import dataclasses
import functools
import gc
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.config.speculative import MAX_DRAFTS, SpeculativeConfig
from dsv3.engine.components import EngineComponents
from dsv3.engine.engine import Engine
from dsv3.engine.executor import LocalExecutor
from dsv3.engine.jobs import JOB_KINDS
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineRequest
from tools.tune.selection import Outcome, choose_sizes, fastest, smallest_as_fast, timed_in_turns

_ROUNDS = 5
_DECODE_STEPS = 16
_CONTEXT = 256
"""Tokens of each request before the decode steps that are timed."""
_LEAST_CHUNK = 256
_DRAFTED = (1, 4, 16, 64)
"""Numbers of requests at which drafts are tried."""
_ANSWER = 48
_FOREVER = 2**31 - 1


class TimedEngine:
    """An engine of these components under other limits, compiled; `close` frees its pages."""

    def __init__(self, components: EngineComponents, cfg: EngineConfig, tokens: int, requests: int) -> None:
        pages = requests * (cfg.pages_for(tokens + cfg.tokens_ahead) + 1)
        cfg = dataclasses.replace(cfg, num_pages=min(cfg.num_pages, max(cfg.pages_per_seq, pages)))
        started = time.monotonic()
        components = dataclasses.replace(components, cfg=cfg)
        self._executor = LocalExecutor(components, JOB_KINDS)
        self.engine = Engine(components, self._executor)
        self.engine.warm_up()
        self.compile_seconds = time.monotonic() - started
        self._ids, self._random = itertools.count(), np.random.default_rng(0)
        self._decoded: list[list[int]] = []  # prompts of requests that decode: the prefix cache has them

    def prefill(self, tokens: int) -> float:
        """Returns the seconds of a prompt of `tokens` tokens on every rank; of several where none may be so long."""
        longest = longest_prompt(self.engine.cfg)
        count = -(-tokens // longest)
        lengths = [tokens // count + (i < tokens % count) for i in range(count)]
        return self.answer([self._prompt(n) for n in lengths * self.engine.cfg.num_ranks], 1)

    def decode(self, rows: int) -> float:
        """Returns the seconds of a decode step of `rows` requests on every rank."""
        engine, count = self.engine, rows * self.engine.cfg.num_ranks
        context = context_of(engine.cfg)
        self._decoded += [self._prompt(context) for _ in range(count - len(self._decoded))]
        added = [self._add(prompt, longest_prompt(engine.cfg) - context) for prompt in self._decoded[:count]]
        while engine.scheduler.slots.decoding.sum() < count:
            engine.step()
        for _ in range(2):
            engine.step()
        started = time.perf_counter()
        for _ in range(_DECODE_STEPS):
            engine.step()
        seconds = (time.perf_counter() - started) / _DECODE_STEPS
        for number in added:
            engine.abort(number)
        self._finish()
        return seconds

    def answer(self, prompts: Sequence[list[int]], tokens: int) -> float:
        """Returns the seconds in which all prompts are answered, greedily, with `tokens` tokens each."""
        for prompt in prompts:
            self._add(prompt, tokens)
        started = time.perf_counter()
        self._finish()
        return time.perf_counter() - started

    def close(self) -> None:
        """Frees the engine's pages; the weights stay, which others use."""
        self._executor.devices.free_cache()
        del self.engine, self._executor
        gc.collect()

    @property
    def programs(self) -> int:
        """The number of its programs."""
        return len(self._executor.devices.programs.keys())

    def _add(self, prompt: list[int], tokens: int) -> int:
        number = next(self._ids)
        sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens)
        self.engine.add(EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=sampling))
        return number

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.integers(0, self.engine.model_cfg.vocab_size, tokens).tolist()

    def _finish(self) -> None:
        while self.engine.has_work:
            self.engine.step()
        if self.engine.failure is not None:
            raise RuntimeError("the engine that is timed has failed") from self.engine.failure


def longest_prompt(cfg: EngineConfig) -> int:
    """Returns the most tokens of a prompt that is answered with one."""
    return cfg.max_model_len - 1


def context_of(cfg: EngineConfig) -> int:
    """Returns the tokens of a request before the decode steps that are timed."""
    return min(_CONTEXT, longest_prompt(cfg) // 2)


def tune_chunk(components: EngineComponents) -> tuple[int, Outcome, float]:
    """Returns max_num_batched_tokens, and the seconds that a program took to compile.

    It is the smallest of the limit, its half and its quarter that computes a long prompt about as fast: other requests
    wait for a chunk. A limit that is faster by itself wins.
    """
    cfg = components.cfg
    most = cfg.max_num_batched_tokens
    chunks = [most, *(size for size in (most // 2, most // 4) if size >= _LEAST_CHUNK)]
    prompt = min(longest_prompt(cfg), 2 * most)
    engines = []
    for chunk in chunks:
        limits = dataclasses.replace(
            cfg, max_num_batched_tokens=chunk, prefill_batch_sizes=str(chunk), decode_batch_sizes="1", max_num_seqs=1
        )
        engines.append(TimedEngine(components, limits, prompt, 1))
    each = sum(engine.compile_seconds for engine in engines) / sum(engine.programs for engine in engines)
    for engine in engines:
        engine.prefill(prompt)
    times = timed_in_turns([functools.partial(engine.prefill, prompt) for engine in engines], _ROUNDS)
    for engine in engines:
        engine.close()
    at, gained = smallest_as_fast(times)
    return chunks[at], Outcome("max_num_batched_tokens", str(most), str(chunks[at]), gained), each


def tune_sizes(
    components: EngineComponents, decode: Sequence[int], prefill: Sequence[int]
) -> tuple[dict[str, str], list[Outcome]]:
    """Returns the values of decode_batch_sizes and prefill_batch_sizes, where others than the defaults are faster.

    `decode` and `prefill` are the candidates: ascending, with the default sizes.
    """
    cfg = dataclasses.replace(
        components.cfg,
        decode_batch_sizes=",".join(map(str, decode)),
        prefill_batch_sizes=",".join(map(str, prefill)),
    )
    timed = TimedEngine(components, cfg, context_of(cfg) + 64 * cfg.tokens_per_row, cfg.max_num_seqs)
    options, outcomes = {}, []
    shared = max(size for size in components.cfg.decode_buckets if size <= 16)  # rows of a prefill step
    for name, candidates, measure, default, required in (
        ("decode_batch_sizes", decode, timed.decode, components.cfg.decode_buckets, {1, shared, decode[-1]}),
        ("prefill_batch_sizes", prefill, timed.prefill, components.cfg.prefill_buckets, {prefill[-1]}),
    ):
        for size in candidates:
            measure(size)  # the first time of a size is slower
        times = timed_in_turns([functools.partial(measure, size) for size in candidates], _ROUNDS)
        chosen, gained = choose_sizes(candidates, times, default, required)
        if chosen != default:
            options[name] = ",".join(map(str, chosen))
        outcomes.append(Outcome(name, ",".join(map(str, default)), ",".join(map(str, chosen)), gained))
    timed.close()
    return options, outcomes


def tune_drafts(components: EngineComponents, prompts: Sequence[list[int]]) -> tuple[dict[str, Any], list[Outcome]]:
    """Returns speculative_config with the number of drafts by batch size that answers `prompts` fastest.

    Components have the method's weights. The default number stays where no other gains.
    """
    cfg = components.cfg
    assert cfg.speculative is not None and cfg.speculative_config is not None
    method = cfg.speculative.method
    plain = SpeculativeConfig.from_json({"method": method})
    assert plain is not None
    most = cfg.draft_block or MAX_DRAFTS[method]
    default = min(plain.most_drafts, most)
    counts = range(most + 1)
    sizes = sorted({min(size, cfg.max_num_seqs) for size in _DRAFTED})
    longest = longest_prompt(cfg) - _ANSWER
    prompts = [prompt[:longest] for prompt in prompts]
    engines = []
    for count in counts:
        drafts = {"method": method, "num_speculative_tokens": count}
        limits = dataclasses.replace(
            cfg,
            speculative_config=drafts if count else None,
            tokens_per_row=1 + count,
            prefill_batch_sizes=str(cfg.max_num_batched_tokens),
            decode_batch_sizes=",".join(map(str, sizes)),
            max_num_seqs=sizes[-1],
        )
        engines.append(TimedEngine(components, limits, max(map(len, prompts)) + _ANSWER, sizes[-1]))
    ranges, outcomes, first = [], [], 1
    for size in sizes:
        asked = list(itertools.islice(itertools.cycle(prompts), size * cfg.num_ranks))
        for engine in engines:
            engine.answer(asked, _ANSWER)
        times = timed_in_turns([functools.partial(engine.answer, asked, _ANSWER) for engine in engines], _ROUNDS)
        count, gained = fastest(times, default)
        ranges.append([first, _FOREVER if size == sizes[-1] else size, count])
        outcomes.append(Outcome(f"drafts of {size} requests", str(default), str(count), gained))
        first = size + 1
    for engine in engines:
        engine.close()
    if all(count == default for _, _, count in ranges):
        return {}, outcomes
    chosen = {"method": method, "num_speculative_tokens_per_batch_size": ranges}
    return {"speculative_config": chosen}, outcomes


def candidate_sizes(default: Sequence[int], first: int, halves_from: int) -> list[int]:
    """Returns the default sizes, the powers of two, and from `halves_from` on also the sizes half-way between them."""
    powers = list(itertools.takewhile(lambda size: size < default[-1], (first << i for i in range(31))))
    halves = [size * 3 // 2 for size in powers if halves_from <= size and size * 3 // 2 < default[-1]]
    return sorted({*default, *powers, *halves})
