"""DeepSeek's published day (open-infra-index, day 6: 27 to 28 February 2025, noon to noon UTC+8), as data.

Published in numbers are the tokens, the mean context, the prices, the lease, and `PUBLISHED`. The nodes over the day
are published as a picture, read here to a quarter of an hour: their mean is the published one. Steps of 30 and 60 nodes
have one division into instances of 4 and of 18 nodes: that the two kinds were started and stopped so is inferred.
How the *traffic* was spread over the day is not published in numbers: it is taken in proportion to the nodes.
"""

from tools.capacity.instances import KINDS, published
from tools.capacity.staffing import Fleet, Staffed, Terms
from tools.capacity.traffic import Prices, Traffic, requests_of, spread

INPUT, CACHED, OUTPUT, CONTEXT = 608e9, 342e9, 168e9, 4989
GPU_HOUR = 2.0
CHART = (
    (12.0, 29, 9),
    (1.25, 23, 7),
    (0.75, 20, 6),
    (0.75, 17, 5),
    (0.25, 14, 4),
    (0.5, 11, 3),
    (3.0, 8, 2),
    (0.5, 11, 3),
    (0.5, 14, 4),
    (0.5, 20, 6),
    (0.5, 23, 7),
    (3.5, 29, 9),
)
"""Hours, prefill instances of 4 nodes, decode instances of 18: 278 nodes at the most, 68 at the least."""

DAY6 = Traffic(
    name="day6",
    spans=spread([(hours, 4 * p + 18 * d) for hours, p, d in CHART], INPUT, CACHED, OUTPUT),
    requests=requests_of(INPUT, OUTPUT, CONTEXT) / 86_400,
    note="DeepSeek's published day; its spread over the hours is taken from the picture of nodes",
    prices=Prices(input=0.55, cached=0.14, output=2.19),
)
PUBLISHED = {
    "nodes": 226.75,
    "peak_nodes": 278,
    "cost": 87_072,
    "income": 562_027,
    "margin": 5.45,
    "input_per_node": 73_700,
    "output_per_node": 14_800,
}
"""The figures that a plan of this day is held against, under the names of `Fleet`'s and `Traffic`'s properties."""

KNOWN_ERRORS = (
    "planned: the rates of --rates=fleet are themselves means of this day, so rounding up to whole instances is what "
    "remains; the peak and the load over the day rest on traffic in proportion to the picture's nodes",
    "the picture of income per hour reads as some 8 % more per node at the peak and 10 % less at night",
    "as in the picture: nodes are given, not computed; tokens are published to a billion, so income is within 0.3 %",
)


def as_charted(terms: Terms) -> Fleet:
    """Returns the day with the published instances and, in place of planned ones, as many as the picture has."""
    pairs = zip(DAY6.spans, CHART, strict=True)
    staffed = tuple(Staffed(span, prefill, decode) for span, (_, prefill, decode) in pairs)
    prefill, decode = (published(kind, "fleet") for kind in KINDS)
    return Fleet(DAY6, prefill, decode, terms, staffed)
