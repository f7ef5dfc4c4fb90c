"""Sampling, the second half of a forward job: one token for each row, or several where a row brought drafts.

A row of S tokens holds its last token and S - 1 drafts of those to come. Tokens are sampled at every position by the
same rule as without drafts, with a random number that depends on seed and position alone; they count as long as the
draft at their place was right. So the text is the same with any drafts and with none.

Rows may be held to grammars: masks take from the sampler the tokens that may not come next. The command of such a
sampler is made when the results of the step before are in. The forward program of the step has been launched by then:
the devices work while the host computes masks, and the look-ahead stays. Masks are an argument of the sampler: a
program of their own would cost a launch and one more pass over the logits.
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
from dsv3.engine.device.sampling import best_words, masked, num_words
from dsv3.engine.device.state import NO_DRAFT, AdjustState, DecodeState, adjustments_at, controls_at
from dsv3.engine.job import Command
from dsv3.model.vocabulary import Vocabulary
from dsv3.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS
from dsv3.scheduler.batch_slots import NOT_FINITE, NOTHING, UNDRAFTED, BatchRows, BatchSlots
from dsv3.scheduler.request import StepOutputs
from dsv3.scheduler.sequence import DRAWN, FILTERED, FULL, GREEDY, Chunk, Sequence
from dsv3.scheduler.structured_output import ALL, Masks


class Sampler(NamedTuple):
    """A compiled sampler: the greatest variant that it serves, and whether it takes masks.

    One that `looks` finds out while it runs which filters its rows ask for.
    """

    variant: int
    is_held: bool = False
    looks: bool = False


def samplers(layout: Layout) -> tuple[Sampler, ...]:
    """Returns the samplers of each batch size, those first that cost the least per step.

    A CPU looks, so three serve all its steps in place of seven, six of which take 1.2 to 2.3 s to compile. A held row
    has the state of adjustments there, and a row with adjustments has masks. What that costs a step, and what looking
    saves, `benchmarks.sampler_programs` measures. A GPU would wait for its host when it looked.
    """
    if layout.platform == "cpu":
        return Sampler(GREEDY), Sampler(FILTERED, looks=True), Sampler(FULL, layout.takes_grammars, looks=True)
    free = tuple(map(Sampler, (GREEDY, DRAWN, FILTERED, FULL)))
    # Batches of greedy rows that are held take the one that draws, as those that are mixed do: one program less.
    held = tuple(Sampler(variant, is_held=True) for variant in (DRAWN, FILTERED, FULL))
    return free + held if layout.takes_grammars else free


def sampler_for(layout: Layout, variant: int, is_held: bool) -> Sampler:
    """Returns the sampler of a step whose rows need `variant`, some of which may be held to grammars."""
    return next(s for s in samplers(layout) if s.variant >= variant and s.is_held >= is_held)


NAME = "sample"
_HELD = "held sample"  # samplers with masks


class Adjustment(Command, frozen=True):
    """What a request that changes its logits writes into its slot when it starts, or starts again."""

    rank: int
    slot: int  # within the rank
    prompt_length: int
    tokens: np.ndarray  # [n] int32, prompt and answer so far
    bias_ids: np.ndarray  # int32
    bias: np.ndarray  # float32
    forbidden_ids: np.ndarray  # int32, tokens that `min_tokens` forbids


class RowMasks(Command, frozen=True):
    """Masks of rows of a batch, by rank and row: those that may not take every token."""

    places: np.ndarray  # [n, 2] int32
    masks: np.ndarray  # [n, S, words] uint32

    def part(self, ranks: range) -> "RowMasks":
        """Returns the masks of `ranks`."""
        mine = (self.places[:, 0] >= ranks.start) & (self.places[:, 0] < ranks.stop)
        return RowMasks(self.places[mine] - np.array([ranks.start, 0], np.int32), self.masks[mine])

    def whole(self, ranks: int, rows: int, width: int, words: int) -> np.ndarray:
        """Returns the masks of all rows of a batch, `[ranks, B, S, words]`."""
        masks = np.full((ranks, rows, width, words), ALL, np.uint32)
        masks[self.places[:, 0], self.places[:, 1]] = self.masks
        return masks


class SampleCommand(Command, frozen=True, tag=1, omit_defaults=True):
    """Samples the rows that a forward program has left. `variant` is the sampler's.

    `adjustments` are made before, at most one per rank in each of `adjust_launches`. With `masks` some rows are held to
    a grammar.
    """

    variant: int
    logprobs: bool = False
    adjustments: list[Adjustment] = msgspec.field(default_factory=list)
    adjust_launches: int = 0
    masks: RowMasks | None = None

    def part(self, ranks: range) -> "SampleCommand":
        """Returns the command with the adjustments and masks of `ranks` only."""
        if not self.adjustments and self.masks is None:
            return self
        mine = [_moved(a, ranks.start) for a in self.adjustments if a.rank in ranks]
        masks = None if self.masks is None else self.masks.part(ranks)
        return SampleCommand(self.variant, self.logprobs, mine, self.adjust_launches, masks)


class ForwardContext(NamedTuple):
    """What a planner of a forward job keeps until its results come.

    These are the rows that sample, how much room each had (`scheduler.accept.Room`), and a prefill's chunks by rank.
    """

    rows: BatchRows
    factor: int
    chunks: list[list[Chunk]]


class ForwardResults(NamedTuple):
    """What a forward job gives the host: arrays on their way to it, and numpy arrays once they are fetched.

    `slots` `[ranks here, B]` say whether there was room (`Layout.sampling`), and are what to wait for where nothing is
    sampled; None where neither is needed. `prompt` are log-probabilities of prompts (`jobs.prompt_logprobs`), `sampled`
    what `dsv3.scheduler.results` takes in, the same in every process of an instance.
    """

    slots: Any = None
    prompt: tuple[Any, ...] = ()
    sampled: tuple[Any, ...] = ()


def _moved(adjustment: Adjustment, first: int) -> Adjustment:
    fields = {name: getattr(adjustment, name) for name in adjustment.__struct_fields__}
    return Adjustment(**(fields | {"rank": adjustment.rank - first}))


def sampler_of(
    slots: BatchSlots, mine: np.ndarray, starting: Iterable[Sequence] = (), max_num_seqs: int = 0
) -> tuple[SampleCommand, bool]:
    """Returns the command for what the requests in slots `mine` need together, and whether one is held to a grammar.

    Those in `starting` have just got their slot, of `max_num_seqs` per rank.
    """
    adjustments = [_adjustment(sequence, max_num_seqs) for sequence in starting if sequence.variant == FULL]
    ranks = [a.rank for a in adjustments]
    variant, wants_logprobs = int(slots.variant[mine].max()), bool(slots.wants_logprobs[mine].any())
    command = SampleCommand(variant, wants_logprobs, adjustments, max(map(ranks.count, ranks), default=0))
    return command, bool(slots.held[mine].any())


def masked_later(
    masks: Masks | None, command: SampleCommand, rows: BatchRows, width: int
) -> Callable[[StepOutputs], SampleCommand]:
    """Returns what makes the command of a sampler some of whose `rows`, of `width` tokens, are held to grammars.

    A mask depends on a row's last token, which the host sees one step late.
    """
    assert masks is not None  # else no request is held

    def make(outputs: StepOutputs) -> SampleCommand:
        return msgspec.structs.replace(command, masks=RowMasks(*masks.of(rows, width, outputs)))

    return make


def _adjustment(sequence: Sequence, max_num_seqs: int) -> Adjustment:
    rank, slot = divmod(sequence.slot, max_num_seqs)
    bias = sequence.sampling.logit_bias
    # An answer that is held to a grammar has its end forbidden by its masks, as far as these leave anything else.
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
        body = functools.partial(logprobs_body, layout.functions.vocabulary)
        arguments = (layout.scores(rows, width), layout.array(rows, width))
        yield layout.per_rank(Key("logprobs", rows, width=width), body, arguments, gathered="all")
    adjust = adjust_shapes(layout)
    yield layout.per_rank(Key("new_adjust"), functools.partial(_zeros, adjust), (layout.array(),))
    row = _adjust_rows([], cfg.num_ranks, cfg, layout.model_cfg.vocab_size)
    shapes, padding = AdjustRow(*map(layout.like, row)), {1: AdjustRow(*(array[:1] for array in row))}
    yield layout.per_rank(Key("adjust"), adjust_body, (adjust, shapes), donated=(0,), padding=padding)


def _sampler(layout: Layout, rows: int, width: int, sampler: Sampler) -> ProgramSpec:
    """Returns the program of a sampler."""
    adjust = adjust_shapes(layout) if sampler.variant == FULL else None
    donated = (0, 1) if sampler.variant == FULL else (0,)
    words = num_words(layout.model_cfg.vocab_size)
    masks = [layout.array(rows, width, words, dtype=jnp.uint32)] if sampler.is_held else []
    arguments = (layout.state, adjust, layout.scores(rows, width), layout.array(rows), *masks)
    speculative = layout.cfg.speculative
    chances = () if speculative is None else speculative.synthetic_chances[: width - 1]
    body = functools.partial(sample_scores_body, layout.functions.vocabulary, sampler.variant)
    body = functools.partial(body, chances=chances, looks=sampler.looks)
    padding = {3: layout.no_slot, 4: ALL}
    return layout.per_rank(_key(sampler, rows, width), body, arguments, donated, gathered="last", padding=padding)


def _key(sampler: Sampler, rows: int, width: int) -> Key:
    return Key(_HELD if sampler.is_held else NAME, rows, sampler.variant, width)


def adjust_shapes(layout: Layout) -> AdjustState:
    """Returns the shapes of what requests need that change their logits."""
    return layout.sharded(device_state.adjust_state_shapes(layout.cfg, layout.model_cfg.vocab_size))


def _zeros(shapes: AdjustState, _: jax.Array) -> AdjustState:
    return jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), shapes)


def launch_sampler(
    devices: Devices, forward: Forward, command: SampleCommand
) -> tuple[Forward | None, tuple[jax.Array, ...]]:
    """Launches the sampler on what a forward program has left.

    Returns what is left of that for a drafter, if there is one, and the results, whose copies to the host are under
    way.
    """
    layout, scores, slots = devices.layout, forward.scores, forward.slots
    for i in range(command.adjust_launches):
        _set_adjustments(devices, command.adjustments, i)
    rows, width = scores.shape[2:4]
    sampler = sampler_for(layout, command.variant, command.masks is not None)
    adjust = _adjust_state(devices) if sampler.variant == FULL else None
    masks = [devices.put(_masks(command.masks, layout, rows, width))] if sampler.is_held else []
    program = devices.programs.get(_key(sampler, rows, width))
    devices.state, adjust, tokens, *of_all = program(devices.state, adjust, scores, slots, *masks)
    if sampler.variant == FULL:
        devices.adjust = adjust
    results = tuple(of_all) or (tokens,)
    if command.logprobs:
        results += devices.programs.get(Key("logprobs", rows, width=width))(scores, tokens)
    for array in results:
        array.copy_to_host_async()
    return forward._replace(scores=None, tokens=tokens) if layout.cfg.speculative is not None else None, results


def _masks(masks: RowMasks | None, layout: Layout, rows: int, width: int) -> np.ndarray:
    """Returns masks `[ranks here, B, S, words]`: with `masks` those of its rows, and such as allow every token."""
    shape = (layout.num_local_ranks, rows, width, num_words(layout.model_cfg.vocab_size))
    return _no_masks(shape) if masks is None else masks.whole(*shape)


@functools.lru_cache(maxsize=16)
def _no_masks(shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, ALL, np.uint32)


def _set_adjustments(devices: Devices, adjustments: list[Adjustment], turn: int) -> None:
    """Makes the `turn`-th adjustment of each rank."""
    by_rank: dict[int, list[Adjustment]] = {}
    for adjustment in adjustments:
        by_rank.setdefault(adjustment.rank, []).append(adjustment)
    mine = [waiting[turn] for waiting in by_rank.values() if turn < len(waiting)]
    layout = devices.layout
    row = _adjust_rows(mine, layout.num_local_ranks, layout.cfg, layout.model_cfg.vocab_size)
    program = devices.programs.get(Key("adjust"))
    devices.adjust = program(_adjust_state(devices), AdjustRow(*map(devices.put, row)))


def _adjust_state(devices: Devices) -> Any:
    """Makes it when first needed: it takes 5 bytes per slot and vocabulary entry."""
    if devices.adjust is None:
        ranks = devices.put(np.zeros(devices.layout.num_local_ranks, np.int32))
        devices.adjust = devices.programs.get(Key("new_adjust"))(ranks)
    return devices.adjust


Draw = Callable[[AdjustState | None, jax.Array, int], jax.Array]
"""Samples position i of each row: from the adjust state so far, the slots `[B]` and i, to tokens `[B]`."""


def sample_scores_body(
    vocabulary: Vocabulary,
    variant: int,
    state: DecodeState,
    adjust: AdjustState | None,
    scores: jax.Array,
    slots: jax.Array,
    masks: jax.Array | None = None,
    *,
    chances: tuple[float, ...] = (),
    looks: bool = False,
) -> tuple[DecodeState, AdjustState | None, jax.Array]:
    """Does what `sample_body` does, from scores `[Xn, B, S, W / Xn]`.

    Where devices share the words, greedy sampling asks each for its best one. All else takes the logits of all words.
    """
    if variant != GREEDY or vocabulary.ranks == 1:
        whole = vocabulary.whole(scores)
        return sample_body(variant, state, adjust, whole, slots, masks, chances=chances, looks=looks)
    words, top = best_words(vocabulary, scores)
    drawn = jnp.where(jnp.isfinite(top), words, NOT_FINITE)
    vocab_size = scores.shape[-1] * vocabulary.ranks
    return _advanced(state, adjust, slots, drawn.shape[1], lambda adjust, held, i: drawn[:, i], chances, vocab_size)


def sample_body(
    variant: int,
    state: DecodeState,
    adjust: AdjustState | None,
    logits: jax.Array,
    slots: jax.Array,
    masks: jax.Array | None = None,
    *,
    chances: tuple[float, ...] = (),
    looks: bool = False,
) -> tuple[DecodeState, AdjustState | None, jax.Array]:
    """Samples the rows `slots` `[B]` from `logits` `[B, S, W]`, for one rank, and advances their state.

    Where rows are held to grammars, tokens without a bit in `masks` `[B, S, words]` are not drawn.
    Column i of the state's tokens is compared with what is sampled at position i - 1: a row goes on while they agree.
    Where a benchmark gives the `chances` of the drafts, a coin overrules what was sampled in front of each.
    What `looks` finds out while it runs which filters the rows ask for.

    Returns state, adjust state and tokens `[B, S]`: `NOTHING` or `UNDRAFTED` behind the accepted ones and in rows that
    shall not sample, `NOT_FINITE` where the logits were not finite (the state then gets token 0, and the row ends).
    """
    logits = logits if masks is None else masked(logits, masks)

    rows, width, vocab_size = logits.shape
    sample = functools.partial(_sample_rows, variant, state, looks=looks)

    def one_position(adjust: AdjustState | None, held: jax.Array, i: int) -> jax.Array:
        return sample(adjust, logits[:, i], held, i)

    def drawn_before(adjust: AdjustState | None, held: jax.Array, i: int) -> jax.Array:
        return drawn[:, i]

    draw: Draw = one_position
    if adjust is None:  # what is drawn at a position changes nothing for the next: all at once
        held = jnp.repeat(jnp.minimum(slots, state.tokens.shape[0] - 1), width)
        offsets = jnp.tile(jnp.arange(width), rows)
        drawn = sample(None, logits.reshape(rows * width, vocab_size), held, offsets).reshape(rows, width)
        draw = drawn_before
    return _advanced(state, adjust, slots, width, draw, chances, vocab_size)


def _advanced(
    state: DecodeState,
    adjust: AdjustState | None,
    slots: jax.Array,
    width: int,
    draw: Draw,
    chances: tuple[float, ...],
    vocab_size: int,
) -> tuple[DecodeState, AdjustState | None, jax.Array]:
    """Samples `width` tokens of each row by `draw`; returns as `sample_body` does."""
    num_slots = state.tokens.shape[0]
    held = jnp.minimum(slots, num_slots - 1)
    drafts = state.tokens[held]
    going = slots < num_slots
    last, columns = drafts[:, 0], []
    for i in range(width):
        drawn = draw(adjust, held, i)
        if i < len(chances):
            controls = controls_at(state, held, i)
            drawn = sampling.overrule(drawn, drafts[:, i + 1], controls, chances[i], vocab_size)
        adjust = _counted(adjust, drawn, jnp.where(going, slots, num_slots))
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
    return state, adjust, tokens


def _sample_rows(
    variant: int,
    state: DecodeState,
    adjust: AdjustState | None,
    logits: jax.Array,
    held: jax.Array,
    offset: int | jax.Array,
    *,
    looks: bool,
) -> jax.Array:
    """Samples from each row of logits `[n, W]`, `offset` behind the length of its slot in `held` `[n]`, padding one."""
    own = logits
    if adjust is not None:
        logits = sampling.adjusted(logits, adjustments_at(state, adjust, held, offset))
    if variant == GREEDY:
        drawn = sampling.greedy(logits)
    else:
        controls = controls_at(state, held, offset)
        drawn = sampling.sample(logits, controls, filters=variant >= FILTERED, looks=looks)
    drawn = sampling.guard(logits, drawn, NOT_FINITE)
    return sampling.guard(own, drawn, NOT_FINITE)  # a NaN that `min_tokens` forbids is in the log-probabilities


def _counted(adjust: AdjustState | None, drawn: jax.Array, slots: jax.Array) -> AdjustState | None:
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
    """Sets one slot's row: tokens behind the prompt are counted as the answer's, the others noted as the prompt's."""
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
