"""What guided decoding costs: tokens per second of the bundled model with constrained requests, over those without.

    JAX_PLATFORMS=cpu python -m benchmarks.structured [--rounds 7] [--tokens 192]

It serves 16 requests by one engine, in turns: all free, half of them and all held to a schema, and half to a pattern
that any text matches. Each gets as many tokens, whatever it says, so the steps are as many. The schema has the parts of
real ones, and is long enough not to end. But other texts take other experts, which changes what a step computes. Where
any text matches, the texts are those of free requests, so the difference is what masks cost. Ratios are tokens per
second over the free turn before, by wall time and by the processor time of all threads, which says more on a busy
machine.
"""

from typing import Any

import numpy as np

from benchmarks.engines import answer, bundled_engine
from benchmarks.record import Report, arguments, run, spread
from dsv3 import SamplingParams, StructuredOutputsParams
from dsv3.engine.engine import Engine

REQUESTS, PROMPT = 16, 64
LIMITS: dict[str, Any] = {}
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{6}$"},
        "status": {"enum": ["open", "paid", "shipped", "returned"]},
        "created": {"type": "string", "format": "date-time"},
        "customer": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 80},
                "email": {"type": "string", "format": "email"},
                "vip": {"type": "boolean"},
            },
            "required": ["name", "email"],
            "additionalProperties": False,
        },
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "minItems": 1, "maxItems": 50},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["id", "status", "customer", "lines"],
    "additionalProperties": False,
}
LINE = {
    "type": "object",
    "properties": {
        "sku": {"type": "string"},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 999},
        "price": {"type": "number", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["sku", "quantity", "price"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ORDER, "minItems": 1000, "$defs": {"line": LINE}}
CONSTRAINTS = {"schema": StructuredOutputsParams(json=SCHEMA), "any text": StructuredOutputsParams(regex="(.|\n)*")}


def main(report: Report) -> None:
    given = arguments(__doc__, rounds=7, tokens=192)
    rounds, tokens = given.rounds, given.tokens
    engine = bundled_engine(max_num_seqs=REQUESTS, max_model_len=PROMPT + tokens, **LIMITS)
    kinds = [("schema", REQUESTS // 2), ("any text", REQUESTS // 2), ("schema", REQUESTS)]
    for kind, held in kinds:
        _seconds(engine, tokens, held, kind)
    ratios = np.array([
        [_seconds(engine, tokens, 0, kind) / _seconds(engine, tokens, held, kind) for kind, held in kinds]
        for _ in range(rounds)
    ])  # fmt: skip
    rows = ([held, kind, *map(spread, ratios[:, i].T)] for i, (kind, held) in enumerate(kinds))
    title = f"Tokens per second over those of {REQUESTS} free requests"
    report.table(title, ["requests held", "to", "wall time", "processor time"], rows)


def _seconds(engine: Engine, tokens: int, held: int, kind: str) -> np.ndarray:
    """Returns how long the requests take, `held` of them held to `CONSTRAINTS[kind]`: wall and processor seconds."""
    how: dict[str, Any] = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}
    constraints = [CONSTRAINTS[kind] if i < held else None for i in range(REQUESTS)]
    sampling = (SamplingParams(seed=i, structured_outputs=each, **how) for i, each in enumerate(constraints))
    prompts = np.random.default_rng(0).integers(300, 3000, (REQUESTS, PROMPT)).tolist()
    found = answer(engine, prompts, *sampling)
    assert all(len(each) == tokens for each in found.tokens), "an answer has ended"
    return np.array(found[1:])


if __name__ == "__main__":
    run(main)
