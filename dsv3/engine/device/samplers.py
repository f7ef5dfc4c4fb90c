"""Which samplers are compiled for each batch size, and which of them serves a step."""

from typing import NamedTuple

from dsv3.engine.device.layout import Layout
from dsv3.scheduler.sequence import DRAWN, FILTERED, FULL, GREEDY


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
