"""Which forward programs an engine has by the form of their attention, and which one a step takes.

Dense prefill after cached tokens is there in two forms, absorbed and expanded, and the host takes the cheaper one
(`crossover.py`). In sparse attention a query that sees more tokens than an indexer chooses must choose. A GPU's host
would wait in every layer to hear whether any query does. So each program is compiled twice, and the host, which knows
how long requests are, takes one. Prefill that chooses is there in both forms, masked and sparse, and again the host
takes one.
"""

from dsv3.config.engine import EngineConfig, ForwardProgram
from dsv3.engine import crossover
from dsv3.engine.device.layout import Layout

ANY_LENGTH = 2**31 - 1
"""Stands for a step of which nobody says how many tokens its queries see: any number."""

LOOKING = ("cpu",)
"""Platforms whose steps look while they run. It costs them nothing, and a second program takes seconds to compile."""


def choices(layout: Layout) -> tuple[bool | None, ...]:
    """Returns what `chooses` of a batch is in the engine's programs (see `dsv3.model.batch`)."""
    indexer = layout.model_cfg.indexer
    if indexer is None or layout.platform in LOOKING:
        return (None,)
    return (False, True) if layout.cfg.pages_per_seq * layout.cfg.page_size > indexer.topk else (False,)


def chooses(layout: Layout, longest: int) -> bool | None:
    """Returns that of `choices` for a step whose queries see `longest` tokens at most."""
    found, indexer = choices(layout), layout.model_cfg.indexer
    return found[0] if len(found) == 1 or indexer is None else longest > indexer.topk


def masked_room(layout: Layout, size: int) -> int:
    """Returns `expands` of the batches of the masked prefill program of bucket `size`; 0 where there is none."""
    if layout.platform in LOOKING:
        return 0
    cfg, tokens = layout.cfg, size // _micro_batches(layout, size)
    room = crossover.masked_room(layout.model_cfg, layout.peaks, cfg.cache_dtype, tokens, cfg.tensor_parallel_size)
    return min(room, _most(cfg, size))


def context_room(layout: Layout, size: int) -> int:
    """Returns `expands` of the batches of the dense, expanded program of bucket `size`; 0 where there is none."""
    if layout.platform in LOOKING:
        return 0
    cfg, tokens = layout.cfg, size // _micro_batches(layout, size)
    return min(
        crossover.context_room(layout.model_cfg, layout.peaks, tokens, cfg.tensor_parallel_size), _most(cfg, size)
    )


def context_pays(layout: Layout, size: int, pairs: int, keys: int) -> bool:
    """Returns whether a step of bucket `size` takes the expanded program; see `crossover.context_pays`."""
    room, split = context_room(layout, size), layout.cfg.tensor_parallel_size
    given = size, pairs, keys, room, split, _micro_batches(layout, size)
    return 0 < keys <= room and crossover.context_pays(layout.model_cfg, layout.peaks, *given)


def _micro_batches(layout: Layout, size: int) -> int:
    overlaps = layout.functions.overlaps
    return 2 if overlaps is not None and overlaps(ForwardProgram("prefill", size, size)) else 1


def _most(cfg: EngineConfig, size: int) -> int:
    """Returns the tokens of the longest requests that a batch may have, in whole blocks of keys."""
    most = cfg.prefill_rows(size) * cfg.pages_per_seq * cfg.page_size
    return -(-most // crossover.KEY_BLOCK) * crossover.KEY_BLOCK
