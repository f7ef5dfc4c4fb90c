"""Measures in the order in which choices depend on each other, within a budget of seconds, and writes the file."""

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsv3.config.options import EngineOptions
from dsv3.engine.build import load_components
from dsv3.engine.components import EngineComponents
from dsv3.engine.tuning import Tuning, made_for, write_tuning
from dsv3.text.tokenizer import Tokenizer, TokenizerError
from tools.tune.plans import recorded_choices, tune_plans
from tools.tune.selection import Outcome
from tools.tune.steps import candidate_sizes, tune_chunk, tune_drafts, tune_sizes

_log = logging.getLogger(__name__)
_STEPS_SHARE = 0.6
"""Of the budget, for whole steps; the rest is for kernels."""
_PROGRAMS_PER_SIZE = 2
_PROMPTS, _PROMPT_TOKENS = 16, 96
_QUIET: dict[str, Any] = {
    "kv_offloading_size": 0.0,
    "kv_store": None,
    "kv_events_config": None,
    "step_metrics_config": None,
    "role": "both",
    "transfer_address": None,
    "transfer_key_file": None,
    "transfer_carrier": "sockets",
    "enable_eplb": False,
    "eplb_state": None,
    "tuning": None,
}
"""Options of an engine that is measured alone."""


def tune(
    model_dir: Path,
    options: EngineOptions,
    output: Path,
    budget_seconds: float,
    prompts: Path | None = None,
    say: Callable[[str], None] = print,
) -> Tuning:
    """Measures, writes the file and returns its content.

    `prompts` has a text per line, for which drafts are chosen; None takes Python's standard library. Raises ValueError
    and OSError as `dsv3.engine.build.load_components` does, for prompts that cannot be read, and a file that cannot be
    written.
    """
    started = time.monotonic()
    options = dataclasses.replace(options, **_QUIET)
    drafts = options.speculative
    texts = None if drafts is None else _prompts(model_dir, prompts)
    components = load_components(model_dir, options, progress=False)
    here = made_for(model_dir)
    chosen: dict[str, Any] = {}
    outcomes: list[Outcome] = []

    def left(share: float = 1.0) -> float:
        return budget_seconds * share - (time.monotonic() - started)

    def note(found: list[Outcome]) -> None:
        for each in found:
            changed = f"-> {each.chosen}, {each.gain:.2f} times as fast"
            say(f"{each.choice}: {each.default} {'stays' if each.chosen == each.default else changed}")
        outcomes.extend(found)

    chunk, outcome, program_seconds = tune_chunk(components)
    note([outcome])
    if outcome.chosen != outcome.default:
        chosen["max_num_batched_tokens"] = chunk
        components = _limited(components, max_num_batched_tokens=chunk)
    tried = _affordable(components, left(_STEPS_SHARE) / 2, program_seconds)
    if tried is None:
        say("batch sizes: not tried, because their programs do not compile within the budget")
    else:
        sizes, found = tune_sizes(components, *tried)
        note(found)
        chosen |= sizes
        components = _limited(components, **sizes)
    if texts is not None:
        if left(_STEPS_SHARE) > 0:
            by_size, found = tune_drafts(components, texts)
            note(found)
            chosen |= by_size
            components = _limited(components, **by_size)
        else:
            say("drafts: not tried, because the budget is used up")
    plans: dict[str, str] = {}
    if options.batch_invariant:
        say("kernels: not tried, because batch_invariant fixes their plans")
    else:
        plans, found, untried = tune_plans(recorded_choices(components), left, say)
        outcomes.extend(found)
        say(f"kernels: {len(plans)} of {len(found)} plans are faster than the planner's; {untried} were not tried")
    tuning = Tuning(here, chosen, plans, [each._asdict() for each in outcomes])
    write_tuning(output, tuning)
    return tuning


def _limited(components: EngineComponents, **limits: Any) -> EngineComponents:
    if "speculative_config" in limits:
        widest = dataclasses.replace(components.cfg, **limits).speculative
        limits["tokens_per_row"] = 1 if widest is None else 1 + widest.most_drafts
    return dataclasses.replace(components, cfg=dataclasses.replace(components.cfg, **limits))


def _affordable(
    components: EngineComponents, seconds: float, program_seconds: float
) -> tuple[list[int], list[int]] | None:
    """Returns candidates of decode and prefill sizes whose programs compile within `seconds`.

    Where all are too many, the smallest that are no default are left out; None where the defaults are too many.
    """
    cfg = components.cfg
    decode, prefill = candidate_sizes(cfg.decode_buckets, 1, 16), candidate_sizes(cfg.prefill_buckets, 32, 256)
    while _PROGRAMS_PER_SIZE * (len(decode) + len(prefill)) * program_seconds > seconds:
        both = sorted(((decode, cfg.decode_buckets), (prefill, cfg.prefill_buckets)), key=lambda each: -len(each[0]))
        spare = ((sizes, size) for sizes, default in both for size in sizes if size not in default)
        sizes, size = next(spare, (None, 0))
        if sizes is None:
            return None
        sizes.remove(size)
    return decode, prefill


def _prompts(model_dir: Path, path: Path | None) -> list[list[int]]:
    """Returns the tokens of texts that drafts are measured on. Raises ValueError where there are none."""
    try:
        tokenizer = Tokenizer.from_directory(model_dir)
    except TokenizerError as error:
        raise ValueError(f"drafts are measured on texts, and the model has no tokenizer: {error}") from None
    if path is None:
        files = sorted(Path(os.__file__).parent.glob("*.py"), key=lambda file: -file.stat().st_size)
        texts = [file.read_text("utf-8", "replace")[:2000] for file in files[:_PROMPTS]]
    else:
        texts = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    prompts = [tokens for text in texts[:_PROMPTS] if (tokens := tokenizer.encode(text)[:_PROMPT_TOKENS])]
    if not prompts:
        raise ValueError(f"{path or 'the standard library'} has no text")
    return prompts
