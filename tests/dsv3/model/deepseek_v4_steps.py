"""A small engine for DeepSeek-V4's steps: it gives pages and slots to requests, and takes them back full of NaN."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.model import ModelConfig
from dsv3.kv_cache import layout
from dsv3.model import DecodeBatch, PrefillBatch, decode, logits, prefill
from dsv3.model.decoder import DecoderLayer, LayerContext, Places, Stack, scan_layers
from dsv3.model.params import Params
from dsv3.model.schedules import PLAIN, Schedule
from pallas_kernels import invariance

T, CHUNKS, TABLE = 280, 3, 3  # rows and chunks of a prefill step, pages of a request
ROWS = 3  # requests of a decode step
PAGES, WINDOW_PAGES, SLOTS = 10, 8, 4
COUNTS = {"context": PAGES, "window": WINDOW_PAGES, "request": SLOTS}


@functools.partial(jax.jit, static_argnames=("cfg", "schedule"), donate_argnames="pool")
def step(
    params: Params, cfg: ModelConfig, batch: PrefillBatch | DecodeBatch, pool: layout.Pool, schedule: Schedule = PLAIN
) -> tuple[Any, Any]:
    """Returns the logits `[T, W]` of a prefill step or `[B, S, W]` of a decode step, and the pool."""
    out = (prefill if isinstance(batch, PrefillBatch) else decode)(params, cfg, batch, pool, schedule=schedule)
    return logits(params, cfg, out.hidden), out.pages


@functools.partial(
    jax.jit,
    static_argnames=("cfg", "schedule"),
    donate_argnames="pool",
    compiler_options=dict(invariance.CPU_OPTIONS),
)
def invariant_step(
    params: Params, cfg: ModelConfig, batch: Any, pool: layout.Pool, schedule: Schedule = PLAIN
) -> tuple[Any, Any]:
    """Returns what `step` does, as `batch_invariant` computes it on a CPU."""
    with invariance.batch_invariant():
        return step(params, cfg, batch, pool, schedule)


def _run_in_turn(stack: Stack, contexts: tuple[LayerContext, ...], x: tuple[Any, ...], state: Any) -> Any:
    """Runs each layer of the later micro-batch, which is number 0, behind that of the earlier one."""

    def body(carry: Any, places: Places) -> Any:
        (place,), (later, earlier, state) = places, carry
        earlier, state, first = DecoderLayer(stack, place, contexts[1]).run(earlier, state)
        later, state, second = DecoderLayer(stack, place, contexts[0]).run(later, state)
        return (later, earlier, state), jax.tree.map(jnp.add, first, second)

    (*x, state), router_stats = scan_layers(stack, contexts[0].cfg, body, (*x, state))
    return tuple(x), state, router_stats


IN_TURN = Schedule("in turn", 2, _run_in_turn, _run_in_turn)
"""Two micro-batches with experts on this device, in the order in which overlapped layers attend in prefill."""


def first_window_page(cfg: ModelConfig, tokens: int) -> int:
    """The first page of the window that a request still needs, whatever the last step has drafted."""
    return max(0, tokens - layout.window_size(cfg)) // cfg.page_size


def junk(dtype: jnp.dtype) -> Any:
    """NaN, in FP8 rows too."""
    return jnp.array(0xFF if dtype == jnp.uint8 else jnp.nan, dtype)


@jax.jit
def emptied(array: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.where(rows[:, None, None], junk(array.dtype), array)


@dataclasses.dataclass
class Request:
    """A request as the engine knows it, or a parked prefix, which has no slot; -1 is no page."""

    slot: int
    length: int = 0
    page_table: np.ndarray = dataclasses.field(default_factory=lambda: np.full(TABLE, -1, np.int32))
    window_table: np.ndarray = dataclasses.field(default_factory=lambda: np.full(TABLE, -1, np.int32))
    first_window_page: int = 0  # what is before it in the table means nothing


class Engine:
    """Runs steps on a pool. What no request has is NaN, and pages and slots are given in an order of chance."""

    prefill_schedule = PLAIN
    prefill_rows = T

    def __init__(self, params: Params, cfg: ModelConfig, seed: int, cache_dtype: str = "float32") -> None:
        self.params, self.cfg, self.rng = params, cfg, np.random.default_rng(seed)
        shapes = layout.pool(cfg, cache_dtype, PAGES, WINDOW_PAGES, SLOTS)
        self.pool = {name: jnp.full(a.shape, junk(a.dtype), a.dtype) for name, a in shapes.items()}
        self.holders = {kind: np.zeros(count, int) for kind, count in COUNTS.items()}

    def begin(self, parked: Request | None = None) -> Request:
        """A new request, with the pages of a `parked` prefix if any."""
        request = Request(-1) if parked is None else self.park(parked, parked.length)
        request.slot = self._take("request")
        return request

    def park(self, request: Request, length: int) -> Request:
        """The first tokens of a request, kept beyond its end: all their pages, and the last one of the window."""
        last, rest = divmod(length, self.cfg.page_size)
        assert rest == 0 and last > 0 and request.window_table[last - 1] >= 0
        pages, windows = np.full((2, TABLE), -1, np.int32)
        pages[:last], windows[last - 1] = request.page_table[:last], request.window_table[last - 1]
        for kind, table in (("context", pages), ("window", windows)):
            self.holders[kind][table[table >= 0]] += 1
        return Request(-1, length, pages, windows, last - 1)

    def end(self, request: Request) -> None:
        """Takes everything back that nothing else has."""
        self._give_back("context", request.page_table)
        self._give_back("window", request.window_table[request.first_window_page :])
        self._give_back("request", np.array([request.slot]))

    def prefill(self, chunks: list[tuple[Request, np.ndarray]], *, release: bool = True) -> list[np.ndarray]:
        """The logits `[n, W]` of each chunk. Without `release` all pages of the window are kept, to be parked."""
        tokens, positions = np.full(self.prefill_rows, 3, np.int32), np.full(self.prefill_rows, 7, np.int32)
        cu = np.cumsum([0] + [len(new) for _, new in chunks] + [0] * (CHUNKS - len(chunks))).astype(np.int32)
        contexts, (tables, windows, slots) = np.zeros(CHUNKS, np.int32), self._tables(CHUNKS)
        for b, (request, new) in enumerate(chunks):
            tokens[cu[b] : cu[b + 1]] = new
            positions[cu[b] : cu[b + 1]] = request.length + np.arange(len(new))
            contexts[b] = request.length
            self._extend(request, len(new), release)
            tables[b], windows[b], slots[b] = request.page_table, request.window_table, request.slot
        batch = PrefillBatch(tokens, positions, cu, contexts, tables, window_table=windows, slots=slots)
        out = self._run(batch)
        for request, new in chunks:
            request.length += len(new)
            if release:
                self.release(request)
        return [out[cu[b] : cu[b + 1]] for b in range(len(chunks))]

    def decode(self, rows: list[tuple[Request, np.ndarray, int]]) -> list[np.ndarray]:
        """The logits `[S, W]` of S tokens of each request, the first of which, a number of them, are accepted."""
        S = len(rows[0][1])
        tokens, lengths = np.full((ROWS, S), 5, np.int32), np.zeros(ROWS, np.int32)
        tables, windows, slots = self._tables(ROWS)
        places = self.rng.permutation(ROWS)[: len(rows)]
        for b, (request, new, _) in zip(places, rows, strict=True):
            self._extend(request, S, release=False)
            tokens[b], lengths[b] = new, request.length + S
            tables[b], windows[b], slots[b] = request.page_table, request.window_table, request.slot
        out = self._run(DecodeBatch(tokens, lengths, tables, window_table=windows, slots=slots))
        for request, _, accepted in rows:
            request.length += accepted
            self.release(request)
        return [out[b] for b in places]

    def release(self, request: Request) -> None:
        """Takes the pages of the window back that the request does not reach any more."""
        first = first_window_page(self.cfg, request.length)
        self._give_back("window", request.window_table[request.first_window_page : first])
        request.window_table[:first] = self.rng.integers(-1, WINDOW_PAGES, first)
        request.first_window_page = first

    def move_window(self, request: Request) -> None:
        """Has the request's pages of the window leave the pool as values, and come back in other places."""
        groups, at = layout.groups_of(self.cfg, "float32", "window"), request.first_window_page
        old = request.window_table[at:][request.window_table[at:] >= 0]
        new = np.array([self._take("window") for _ in old], np.int32)
        values = layout.gather_pages(groups, self.pool, jnp.asarray(old))
        assert values.shape[1:] == layout.payload_shape(self.cfg, "float32", "window").shape
        self.pool, _ = layout.scatter_pages(groups, self.pool, jnp.asarray(new), values)
        self._give_back("window", old)
        request.window_table[at : at + len(new)] = new

    def _run(self, batch: PrefillBatch | DecodeBatch) -> np.ndarray:
        self.last_batch = jax.tree.map(jnp.asarray, batch)
        schedule = self.prefill_schedule if isinstance(batch, PrefillBatch) else PLAIN
        out, self.pool = invariant_step(self.params, self.cfg, self.last_batch, self.pool, schedule)
        return np.asarray(out)

    def _tables(self, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tables and slots of rows without a request: those of others, which must not be written."""
        pages, windows = (self.rng.integers(-1, COUNTS[kind], (rows, TABLE)) for kind in ("context", "window"))
        return *(a.astype(np.int32) for a in (pages, windows)), self.rng.integers(0, SLOTS, rows).astype(np.int32)

    def _extend(self, request: Request, count: int, release: bool) -> None:
        """Gives a request the pages for `count` more tokens; none of the window to those that it would `release`."""
        size, length = self.cfg.page_size, request.length + count
        first = first_window_page(self.cfg, length) if release else 0
        for page in range(request.length // size, -(-length // size)):
            if request.page_table[page] < 0:
                request.page_table[page] = self._take("context")
            if request.window_table[page] < 0 and page >= first:
                request.window_table[page] = self._take("window")

    def _take(self, kind: str) -> int:
        page = int(self.rng.choice(np.flatnonzero(self.holders[kind] == 0)))
        self.holders[kind][page] = 1
        return page

    def _give_back(self, kind: Any, pages: np.ndarray) -> None:
        held = self.holders[kind]
        held[pages[pages >= 0]] -= 1
        assert (held >= 0).all()
        for group in layout.groups_of(self.cfg, "float32", kind):
            free = np.tile(held == 0, len(group.layers))
            self.pool[group.name] = emptied(self.pool[group.name], free)
