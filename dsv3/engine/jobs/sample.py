"""Sampling, the second half of a forward job: one token per row, or several where draft tokens are verified.

A row of S tokens holds its last token and S - 1 drafts of the next ones. Tokens are sampled at every position by the
same rule as without drafts, with a random number that depends on seed and position alone; they count as long as the
draft in their place was equal. So the text is the same with any drafts and with none.

Rows may be constrained by grammars: token bitmasks exclude the tokens that may not come next. The command of such a
sampler is made when the results of the previous step are in. The forward program of the step has been launched by then,
so the devices work while the host computes bitmasks. Bitmasks are an argument of the sampler: a program of their own
would cost a launch and one more pass over the logits.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.engine.device import sampling
from dsv3.engine.device import state as device_state
from dsv3.engine.device.devices import Devices, Forward
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.device.sampling import apply_bitmask, best_tokens, bitmask_words
from dsv3.engine.device.state import NO_DRAFT, AdjustState, DecodeState, adjustments_at, controls_at, existing
from dsv3.engine.job import Command
from dsv3.model.layers.router import id_dtype
from dsv3.model.vocabulary import Vocabulary
from dsv3.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS
from dsv3.scheduler.batch_slots import NOT_FINITE, NOTHING, UNDRAFTED, BatchRows, BatchSlots
from dsv3.scheduler.request import StepOutputs
from dsv3.scheduler.sequence import DRAWN, FILTERED, FULL, GREEDY, Chunk, Sequence
from dsv3.scheduler.structured_output import ALL, Masks


class Sampler(NamedTuple):
    """A compiled sampler: the greatest variant that it serves, and whether it takes bitmasks.

    An `adaptive` one checks while it runs which filters its rows use. One that `returns_details` returns processed
    log-probabilities and masks too, as the engine is configured.
    """

    variant: int
    is_constrained: bool = False
    adaptive: bool = False
    returns_details: bool = False


def samplers(layout: Layout) -> tuple[Sampler, ...]:
    """Returns the samplers of each batch size, those first that cost the least per step.

    On a CPU samplers are adaptive, so three serve all its steps instead of seven, six of which take 1.2 to 2.3 s to
    compile. A constrained row allocates the state of adjustments there, and a row with adjustments has bitmasks. An
    adaptive sampler on a GPU would wait for its host. Those that return details come last: of greedy batches too the
    one that draws.
    """
    drawing: tuple[Sampler, ...]
    if layout.platform == "cpu":
        drawing = Sampler(FILTERED, adaptive=True), Sampler(FULL, layout.takes_grammars, adaptive=True)
    else:
        drawing = tuple(map(Sampler, (DRAWN, FILTERED, FULL)))
        # Batches of constrained greedy rows use the one that draws, as mixed batches do: one program less.
        if layout.takes_grammars:
            drawing += tuple(Sampler(variant, is_constrained=True) for variant in (DRAWN, FILTERED, FULL))
    has_details = _returns_processed(layout) or layout.cfg.enable_return_sampling_mask
    return Sampler(GREEDY), *drawing, *(s._replace(returns_details=True) for s in drawing if has_details)


def _returns_processed(layout: Layout) -> bool:
    return layout.cfg.logprobs_mode == "processed_logprobs"


def sampler_for(layout: Layout, variant: int, is_constrained: bool, returns_details: bool = False) -> Sampler:
    """Returns the sampler of a step whose rows need `variant`, and are constrained or not."""
    each = (s for s in samplers(layout) if s.returns_details == returns_details)
    return next(s for s in each if s.variant >= variant and s.is_constrained >= is_constrained)


NAME = "sample"
_DETAILED = "sample with details"  # samplers that return processed log-probabilities, or masks


class Adjustment(Command, frozen=True):
    """What a request with logit adjustments writes to its slot when it starts, or restarts."""

    rank: int
    slot: int  # within the rank
    prompt_length: int
    tokens: np.ndarray  # [n] int32, prompt and answer so far
    bias_ids: np.ndarray  # int32
    bias: np.ndarray  # float32
    forbidden_ids: np.ndarray  # int32, tokens that `min_tokens` forbids


class RowMasks(Command, frozen=True):
    """Token bitmasks of the constrained rows of a batch, by rank and row."""

    rows: np.ndarray  # [n, 2] int32, rank and row
    masks: np.ndarray  # [n, S, words] uint32

    def part(self, ranks: range) -> "RowMasks":
        """Returns the bitmasks of `ranks`."""
        mine = (self.rows[:, 0] >= ranks.start) & (self.rows[:, 0] < ranks.stop)
        return RowMasks(self.rows[mine] - np.array([ranks.start, 0], np.int32), self.masks[mine])

    def whole(self, ranks: int, rows: int, width: int, words: int) -> np.ndarray:
        """Returns the bitmasks of all rows of a batch, `[ranks, B, S, words]`."""
        masks = np.full((ranks, rows, width, words), ALL, np.uint32)
        masks[self.rows[:, 0], self.rows[:, 1]] = self.masks
        return masks


class SampleCommand(Command, frozen=True, tag=1, omit_defaults=True):
    """Samples the rows of a forward program. `variant` is the sampler's.

    `adjustments` are applied before, at most one per rank in each of `adjust_launches`. With `masks` some rows are
    constrained. With `sampling_masks` the results have the tokens that each was drawn from.
    """

    variant: int
    logprobs: bool = False
    adjustments: list[Adjustment] = msgspec.field(default_factory=list)
    adjust_launches: int = 0
    masks: RowMasks | None = None
    sampling_masks: bool = False

    def part(self, ranks: range) -> "SampleCommand":
        """Returns the command with the adjustments and bitmasks of `ranks` only."""
        if not self.adjustments and self.masks is None:
            return self
        mine = [msgspec.structs.replace(a, rank=a.rank - ranks.start) for a in self.adjustments if a.rank in ranks]
        masks = None if self.masks is None else self.masks.part(ranks)
        return msgspec.structs.replace(self, adjustments=mine, masks=masks)


class ForwardContext(NamedTuple):
    """What a planner of a forward job keeps until its results come.

    These are the rows that sample, their capacity factor (`scheduler.results.CapacityFactor`), and a prefill's chunks
    by rank. `scheduled_at` is a time of `time.monotonic`.
    """

    rows: BatchRows
    factor: int
    chunks: list[list[Chunk]]
    scheduled_at: float = 0.0


class ForwardResults(NamedTuple):
    """Results of a forward job: arrays on their way to the host, and numpy arrays once they are fetched.

    `slots` `[ranks here, B]` show overflow (`Layout.sampling_slots`), and can be waited for where nothing is sampled;
    None where neither is needed. `prompt` are log-probabilities of prompts (`jobs.prompt_logprobs`), `sampled` the
    arguments of `dsv3.scheduler.results`, equal in every process of an instance. `routed_experts` `[ranks, T, L, K]`,
    or of a decode batch `[ranks, B, S, L, K]` beside its tokens, are there where a request wants them.
    """

    slots: Any = None
    prompt: tuple[Any, ...] = ()
    sampled: tuple[Any, ...] = ()
    routed_experts: Any = None


def sampler_command(
    slots: BatchSlots, mine: np.ndarray, starting: Iterable[Sequence] = (), max_num_seqs: int = 0
) -> tuple[SampleCommand, bool]:
    """Returns the command for what the requests in slots `mine` need together, and whether one is constrained.

    Those in `starting` have just got their slot, of `max_num_seqs` per rank.
    """
    adjustments = [_adjustment(sequence, max_num_seqs) for sequence in starting if sequence.variant == FULL]
    ranks = [a.rank for a in adjustments]
    variant, wants_logprobs = int(slots.variant[mine].max()), bool(slots.wants_logprobs[mine].any())
    wants_masks, turns = bool(slots.wants_sampling_mask[mine].any()), max(map(ranks.count, ranks), default=0)
    command = SampleCommand(variant, wants_logprobs, adjustments, turns, sampling_masks=wants_masks)
    return command, bool(slots.constrained[mine].any())


def defer_for_masks(
    masks: Masks | None, command: SampleCommand, rows: BatchRows, width: int
) -> Callable[[StepOutputs], SampleCommand]:
    """Returns a function that completes the sampler's command for constrained `rows`, of `width` tokens.

    A bitmask depends on a row's last token, which the host sees one step late.
    """
    assert masks is not None  # else no request is constrained

    def make(outputs: StepOutputs) -> SampleCommand:
        return msgspec.structs.replace(command, masks=RowMasks(*masks.compute(rows, width, outputs)))

    return make


def _adjustment(sequence: Sequence, max_num_seqs: int) -> Adjustment:
    rank, slot = divmod(sequence.slot, max_num_seqs)
    bias = sequence.sampling.logit_bias
    # A constrained request's end is forbidden by its bitmasks, as far as these allow anything else.
    stop = [] if sequence.matcher is not None else sorted(sequence.stop_ids)[: device_state.MAX_FORBIDDEN]
    return Adjustment(
        rank=rank,
        slot=slot,
        prompt_length=sequence.prompt_length,
        tokens=np.ascontiguousarray(sequence.tokens, np.int32),
        bias_ids=np.array(list(bias), np.int32),
        bias=np.array(list(bias.values()), np.float32),
        forbidden_ids=np.array(stop, np.int32),
    )


class AdjustRow(NamedTuple):
    """One slot's row of `AdjustState` as host arrays of fixed shape, `[ranks here, ...]`."""

    slot: Any  # [ranks] int32, max_num_seqs on the ranks that have nothing to set
    prompt_length: Any  # [ranks] int32
    length: Any  # [ranks] int32
    tokens: Any  # [ranks, max_model_len] int32, vocabulary size in padding
    bias_ids: Any  # [ranks, 300] int32
    bias: Any  # [ranks, 300] float32
    forbidden_ids: Any  # [ranks, 144] int32


def _adjust_rows(adjustments: list[Adjustment], ranks: int, cfg: EngineConfig, vocab_size: int) -> AdjustRow:
    """Returns the arguments of one launch, for at most one adjustment per rank."""
    row = AdjustRow(
        slot=np.full(ranks, cfg.max_num_seqs, np.int32),
        prompt_length=np.zeros(ranks, np.int32),
        length=np.zeros(ranks, np.int32),
        tokens=np.full((ranks, cfg.max_model_len), vocab_size, np.int32),
        bias_ids=np.full((ranks, MAX_LOGIT_BIAS), vocab_size, np.int32),
        bias=np.zeros((ranks, MAX_LOGIT_BIAS), np.float32),
        forbidden_ids=np.full((ranks, device_state.MAX_FORBIDDEN), vocab_size, np.int32),
    )
    for a in adjustments:
        row.slot[a.rank], row.prompt_length[a.rank], row.length[a.rank] = a.slot, a.prompt_length, len(a.tokens)
        for name in ("tokens", "bias_ids", "bias", "forbidden_ids"):
            values = getattr(a, name)
            getattr(row, name)[a.rank, : len(values)] = values
    return row


def sampler_programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields samplers by rows, log-probabilities, and the two programs of adjustments."""
    cfg = layout.cfg
    for rows, width in layout.sampled_shapes:
        for sampler in samplers(layout):
            yield _sampler(layout, rows, width, sampler)
        if _returns_processed(layout):
            continue
        body = functools.partial(logprobs_body, layout.functions.vocabulary)
        arguments = (layout.scores(rows, width), layout.array(rows, width))
        yield layout.per_rank(Key("logprobs", rows, width=width), body, arguments, gathered="all")
    adjust = adjust_shapes(layout)
    yield layout.per_rank(Key("new_adjust"), functools.partial(_zeros, adjust), (layout.array(),))
    row = _adjust_rows([], cfg.num_ranks, cfg, layout.model_cfg.vocab_size)
    shapes = AdjustRow(*(layout.array(*array.shape[1:], dtype=array.dtype) for array in row))
    padding = {1: AdjustRow(*(array[:1] for array in row))}
    yield layout.per_rank(Key("adjust"), adjust_body, (adjust, shapes), donated=(0,), padding=padding)


def _sampler(layout: Layout, rows: int, width: int, sampler: Sampler) -> ProgramSpec:
    adjust = adjust_shapes(layout) if sampler.variant == FULL else None
    donated = (0, 1) if sampler.variant == FULL else (0,)
    words = bitmask_words(layout.model_cfg.vocab_size)
    masks = [layout.array(rows, width, words, dtype=jnp.uint32)] if sampler.is_constrained else []
    arguments = (layout.state, adjust, layout.scores(rows, width), layout.array(rows), *masks)
    speculative = layout.cfg.speculative
    chances = () if speculative is None else speculative.synthetic_chances[: width - 1]
    body = functools.partial(sample_body, layout.functions.vocabulary, sampler.variant)
    details = TOKENS_ALONE
    if sampler.returns_details:
        details = Details(MAX_LOGPROBS * _returns_processed(layout), layout.cfg.enable_return_sampling_mask)
    body = functools.partial(body, chances=chances, adaptive=sampler.adaptive, details=details)
    padding = {3: layout.padding_slot, 4: ALL}
    return layout.per_rank(_key(sampler, rows, width), body, arguments, donated, gathered="last", padding=padding)


def _key(sampler: Sampler, rows: int, width: int) -> Key:
    kind = _DETAILED if sampler.returns_details else NAME
    return Key(f"constrained {kind}" if sampler.is_constrained else kind, rows, sampler.variant, width)


def adjust_shapes(layout: Layout) -> AdjustState:
    """Returns the shapes of the adjustments' state."""
    return layout.sharded(device_state.adjust_state_shapes(layout.cfg, layout.model_cfg.vocab_size))


def _zeros(shapes: AdjustState, _: jax.Array) -> AdjustState:
    return jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), shapes)


_EXPERTS = "routed_experts"


def expert_programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields the programs that gather the experts of a step's tokens in an instance of several processes.

    The leader alone cannot read what the devices of others have chosen.
    """
    cfg, model_cfg = layout.cfg, layout.model_cfg
    if not (layout.spans_processes and cfg.enable_return_routed_experts):
        return
    chosen = (model_cfg.num_moe_layers, model_cfg.num_experts_per_tok)
    batches = [(size,) for size in cfg.prefill_buckets] + [(size, cfg.width(size)) for size in cfg.decode_buckets]
    for tokens in batches:
        ids = layout.array(*tokens, *chosen, dtype=id_dtype(model_cfg.n_routed_experts))
        yield layout.per_rank(_experts_key(tokens), lambda each: each, (ids,), gathered="all")


def _experts_key(tokens: tuple[int, ...]) -> Key:
    return Key(_EXPERTS, tokens[0], width=tokens[1] if len(tokens) > 1 else 0)


def copy_experts(devices: Devices, routed_experts: jax.Array) -> jax.Array:
    """Starts to copy the experts `[ranks, tokens..., L, K]` of a forward pass to the host, of all processes' ranks."""
    if devices.layout.spans_processes:
        routed_experts = devices.programs.get(_experts_key(routed_experts.shape[1:-2]))(routed_experts)
    routed_experts.copy_to_host_async()
    return routed_experts


def launch_sampler(
    devices: Devices, forward: Forward, command: SampleCommand
) -> tuple[Forward | None, tuple[jax.Array, ...]]:
    """Launches the sampler on the results of a forward program.

    Returns what a drafter needs, if there is one, and the results, whose copies to the host have been started.
    """
    layout, scores, slots = devices.layout, forward.scores, forward.slots
    for i in range(command.adjust_launches):
        _set_adjustments(devices, command.adjustments, i)
    rows, width = scores.shape[2:4]
    processed = command.logprobs and _returns_processed(layout)
    detailed = processed or command.sampling_masks
    sampler = sampler_for(layout, command.variant, command.masks is not None, detailed)
    adjust = _adjust_state(devices) if sampler.variant == FULL else None
    masks = [devices.put(_masks(command.masks, layout, rows, width))] if sampler.is_constrained else []
    program = devices.programs.get(_key(sampler, rows, width))
    devices.state, adjust, drawn, *of_all = program(devices.state, adjust, scores, slots, *masks)
    if sampler.variant == FULL:
        devices.adjust = adjust
    tokens, everything = drawn[0] if detailed else drawn, of_all[0] if of_all else drawn
    results, kept = tuple(everything) if detailed else (everything,), ()
    if detailed and layout.cfg.enable_return_sampling_mask:
        results, kept = results[:-1], results[-1:]
    if command.logprobs and not processed:
        results += devices.programs.get(Key("logprobs", rows, width=width))(scores, tokens)
    if command.sampling_masks:
        results += kept
    for array in results:
        array.copy_to_host_async()
    return forward._replace(scores=None, tokens=tokens) if layout.cfg.speculative is not None else None, results


def _masks(masks: RowMasks | None, layout: Layout, rows: int, width: int) -> np.ndarray:
    """Returns bitmasks `[ranks here, B, S, words]`; rows without one in `masks` allow every token."""
    shape = (layout.num_local_ranks, rows, width, bitmask_words(layout.model_cfg.vocab_size))
    return _no_masks(shape) if masks is None else masks.whole(*shape)


@functools.lru_cache(maxsize=16)
def _no_masks(shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, ALL, np.uint32)


def _set_adjustments(devices: Devices, adjustments: list[Adjustment], turn: int) -> None:
    """Applies the `turn`-th adjustment of each rank."""
    by_rank: dict[int, list[Adjustment]] = {}
    for adjustment in adjustments:
        by_rank.setdefault(adjustment.rank, []).append(adjustment)
    mine = [waiting[turn] for waiting in by_rank.values() if turn < len(waiting)]
    layout = devices.layout
    row = _adjust_rows(mine, layout.num_local_ranks, layout.cfg, layout.model_cfg.vocab_size)
    program = devices.programs.get(Key("adjust"))
    devices.adjust = program(_adjust_state(devices), AdjustRow(*map(devices.put, row)))


def _adjust_state(devices: Devices) -> Any:
    """Returns the adjustments' state, allocated at its first use: it takes 5 bytes per slot and vocabulary entry."""
    if devices.adjust is None:
        ranks = devices.put(np.zeros(devices.layout.num_local_ranks, np.int32))
        devices.adjust = devices.programs.get(Key("new_adjust"))(ranks)
    return devices.adjust


class Details(NamedTuple):
    """What a sampler returns beside tokens: so many processed `logprobs`, and the `kept` tokens as bits."""

    logprobs: int = 0
    kept: bool = False


TOKENS_ALONE = Details()
About = tuple[jax.Array, ...]
"""The details of tokens: their processed log-probabilities, and the most likely tokens with theirs; then bits."""
Draw = Callable[[AdjustState | None, jax.Array, int], tuple[jax.Array, About]]
"""Samples position i of each row: from the adjust state so far, the slots `[B]` and i, to tokens `[B]`."""


def sample_body(
    vocabulary: Vocabulary,
    variant: int,
    state: DecodeState,
    adjust: AdjustState | None,
    scores: jax.Array,
    slots: jax.Array,
    masks: jax.Array | None = None,
    *,
    chances: tuple[float, ...] = (),
    adaptive: bool = False,
    details: Details = TOKENS_ALONE,
) -> tuple[DecodeState, AdjustState | None, Any]:
    """Samples rows `slots` `[B]` from `scores` `[Xn, B, S, W / Xn]`, for one rank, verifies drafts, advances the state.

    If devices share the vocabulary, greedy sampling exchanges each device's best token. All else gathers the logits
    of all tokens.

    Tokens without a bit in `masks` `[B, S, words]` are not drawn. Column i of the state's tokens is compared with the
    token sampled at position i - 1: a row continues while they are equal. With synthetic `chances` of drafts, for
    benchmarks, a coin replaces the sampled token in front of each. `adaptive` checks at run time which filters the rows
    use.

    Returns state, adjust state and tokens `[B, S]`: `NOTHING` or `UNDRAFTED` behind the accepted ones and in rows that
    do not sample, `NOT_FINITE` where the logits were not finite (the state then gets token 0, and the row ends). With
    `details` a tuple: the tokens, their processed log-probabilities `[B, S]`, the so many most likely tokens `[B, S,
    logprobs]` with theirs, and `sampling.kept_words` `[B, S, words]`.
    """
    _, rows, width, words = scores.shape
    vocab_size = words * vocabulary.ranks
    if variant == GREEDY and vocabulary.ranks > 1:
        best, top = best_tokens(vocabulary, scores)
        greedy = jnp.where(jnp.isfinite(top), best, NOT_FINITE)
        return _advance(state, adjust, slots, width, lambda _, __, i: (greedy[:, i], ()), chances, vocab_size)
    logits = vocabulary.whole(scores)
    logits = logits if masks is None else apply_bitmask(logits, masks)
    sample = functools.partial(_sample_rows, variant, state, adaptive=adaptive, details=details)

    def one_position(adjust: AdjustState | None, slots: jax.Array, i: int) -> tuple[jax.Array, About]:
        return sample(adjust, logits[:, i], slots, i)

    def drawn_before(adjust: AdjustState | None, slots: jax.Array, i: int) -> tuple[jax.Array, About]:
        return jax.tree.map(lambda array: array[:, i], every)

    draw: Draw = one_position
    if adjust is None:  # what is drawn at a position changes nothing for the next: all at once
        repeated = jnp.repeat(existing(state, slots), width)
        offsets = jnp.tile(jnp.arange(width), rows)
        every = sample(None, logits.reshape(rows * width, vocab_size), repeated, offsets)
        every = jax.tree.map(lambda array: array.reshape(rows, width, *array.shape[1:]), every)
        draw = drawn_before
    return _advance(state, adjust, slots, width, draw, chances, vocab_size)


def _advance(
    state: DecodeState,
    adjust: AdjustState | None,
    slots: jax.Array,
    width: int,
    draw: Draw,
    chances: tuple[float, ...],
    vocab_size: int,
) -> tuple[DecodeState, AdjustState | None, Any]:
    """Samples `width` tokens of each row by `draw`; returns as `sample_body` does."""
    num_slots = state.tokens.shape[0]
    rows = existing(state, slots)
    drafts = state.tokens[rows]
    going = slots < num_slots
    last, columns, details = drafts[:, 0], [], []
    for i in range(width):
        drawn, about = draw(adjust, rows, i)
        details.append(about)
        if i < len(chances):
            controls = controls_at(state, rows, i)
            drawn = sampling.force_acceptance(drawn, drafts[:, i + 1], controls, chances[i], vocab_size)
        adjust = _count_tokens(adjust, drawn, jnp.where(going, slots, num_slots))
        columns.append(jnp.where(going, drawn, jnp.where(drafts[:, i] == NO_DRAFT, UNDRAFTED, NOTHING)))
        last = jnp.where(going, jnp.maximum(drawn, 0), last)
        if i + 1 < width:
            going &= (drawn >= 0) & (drawn == drafts[:, i + 1])
    tokens = jnp.stack(columns, axis=1)
    state = dataclasses.replace(
        state,
        tokens=state.tokens.at[slots, 0].set(last, mode="drop"),
        lengths=state.lengths.at[slots].add((tokens > NOTHING).sum(axis=1, dtype=jnp.int32), mode="drop"),
    )
    if not details[0]:
        return state, adjust, tokens
    return state, adjust, (tokens, *(jnp.stack(each, axis=1) for each in zip(*details, strict=True)))


def _sample_rows(
    variant: int,
    state: DecodeState,
    adjust: AdjustState | None,
    logits: jax.Array,
    slots: jax.Array,
    offset: int | jax.Array,
    *,
    adaptive: bool,
    details: Details,
) -> tuple[jax.Array, About]:
    """Samples from each row of logits `[n, W]`, `offset` behind the length of its slot in `slots` `[n]`."""
    own = logits
    about: About = ()
    if adjust is not None:
        logits = sampling.apply_adjustments(logits, adjustments_at(state, adjust, slots, offset))
    if variant == GREEDY:
        drawn = sampling.greedy(logits)
    else:
        controls, how = controls_at(state, slots, offset), {"filters": variant >= FILTERED, "adaptive": adaptive}
        drawn = sampling.sample(logits, controls, **how)
        if details.logprobs:
            about = sampling.processed_logprobs(logits, drawn, controls, details.logprobs, **how)
        if details.kept:
            about += (sampling.kept_words(logits, drawn, controls, **how),)
    drawn = sampling.replace_invalid(logits, drawn, NOT_FINITE)
    # A NaN of a token that `min_tokens` forbids is still in the log-probabilities.
    return sampling.replace_invalid(own, drawn, NOT_FINITE), about


def _count_tokens(adjust: AdjustState | None, drawn: jax.Array, slots: jax.Array) -> AdjustState | None:
    """Counts the tokens `drawn` for the requests in `slots`, where some request needs the counts."""
    if adjust is None:
        return None
    counts = adjust.counts.at[slots, jnp.maximum(drawn, 0)].add(1, mode="drop")
    return dataclasses.replace(adjust, counts=counts)


def logprobs_body(
    vocabulary: Vocabulary, scores: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the log-probabilities of `tokens` `[B, S]` and of the 20 best, of the model's own distribution.

    `scores` are `[Xn, B, S, W / Xn]`.
    """
    return sampling.log_probabilities(vocabulary.whole(scores), tokens, MAX_LOGPROBS)


def adjust_body(adjust: AdjustState, row: AdjustRow) -> AdjustState:
    """Sets one slot's row: tokens behind the prompt count as the answer's, the others as the prompt's."""
    vocab_size, index = adjust.counts.shape[-1], jnp.arange(row.tokens.shape[0])
    in_answer = (index >= row.prompt_length) & (index < row.length)
    counts = jnp.zeros(vocab_size, jnp.int32).at[row.tokens].add(in_answer.astype(jnp.int32), mode="drop")
    prompt_ids = jnp.where(index < row.prompt_length, row.tokens, vocab_size)
    in_prompt = jnp.zeros(vocab_size, jnp.bool).at[prompt_ids].set(True, mode="drop")
    return AdjustState(
        counts=adjust.counts.at[row.slot].set(counts, mode="drop"),
        in_prompt=adjust.in_prompt.at[row.slot].set(in_prompt, mode="drop"),
        bias_ids=adjust.bias_ids.at[row.slot].set(row.bias_ids, mode="drop"),
        bias=adjust.bias.at[row.slot].set(row.bias, mode="drop"),
        forbidden_ids=adjust.forbidden_ids.at[row.slot].set(row.forbidden_ids, mode="drop"),
    )
