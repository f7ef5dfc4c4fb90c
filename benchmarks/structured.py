"""What guided decoding costs: tokens per second of the bundled model, and a row's mask at 129k tokens.

    JAX_PLATFORMS=cpu python -m benchmarks.structured [--rounds 7] [--tokens 192] [--only speed]

The first table serves 16 requests by one engine, in turns: all free, half of them and all held to a schema, and half to
a pattern that any text matches. Each gets as many tokens, whatever it says, so the steps are as many. The schema has
the parts of real ones, and is long enough not to end. But other texts take other experts, which changes what a step
computes. Where any text matches, the texts are those of free requests, so the difference is what masks cost. Ratios are
tokens per second over the free turn before, by wall time and by the processor time of all threads, which says more on
a busy machine.

The second table makes a vocabulary of 129,280 tokens out of the standard library's text, and walks through the schema
along tokens drawn by chance: how long a mask takes.
"""

import itertools
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.engines import answer, bundled_engine
from benchmarks.record import Report, arguments, elapsed, run, spread
from dsv3 import SamplingParams, StructuredOutputsParams
from dsv3.engine.engine import Engine
from dsv3.text.grammar import plain_grammar
from dsv3.text.matcher import GrammarVocabulary, Matcher
from training.corpus import documents, standard_library

REQUESTS, PROMPT = 16, 64
LIMITS: dict[str, Any] = {}
VOCAB_SIZE, END = 129_280, "<end>"
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
    args = arguments(__doc__, rounds=7, tokens=192, only=None)
    if args.only != "masks":
        _compare(report, args.rounds, args.tokens)
    if args.only != "speed":
        _masks(report)


def _compare(report: Report, rounds: int, tokens: int) -> None:
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


def _masks(report: Report) -> None:
    backend = _large_vocabulary()
    end = backend.token_to_id(END)
    vocabulary = GrammarVocabulary(backend.to_str(), VOCAB_SIZE, [end])
    started = time.perf_counter()
    matcher = vocabulary.compile(plain_grammar(StructuredOutputsParams(json=SCHEMA)))
    compiled = time.perf_counter() - started
    walks = {name: [seconds for seed in range(answers) for seconds in _walk(vocabulary, matcher.copy(), end, seed)]
             for name, answers in (("of the first 16 answers", 16), ("of 64 later answers", 64))}  # fmt: skip
    rows, masks = [(matcher.copy(), []) for _ in range(64)], np.zeros((64, 1, vocabulary.words), np.uint32)
    walks["of 64 rows at once, per row"] = [elapsed(lambda: vocabulary.fill(rows, masks)) / 64 for _ in range(20)]
    title = f"Masks of {VOCAB_SIZE:,} tokens; the schema compiles in {compiled * 1e3:.0f} ms"
    at = (50, 90, 99, 100)
    lines = ([name, *np.percentile(np.array(times) * 1e6, at)] for name, times in walks.items())
    report.table(title, ["masks", "median (us)", "p90", "p99", "longest"], lines)


def _walk(vocabulary: GrammarVocabulary, matcher: Matcher, end: int, seed: int, steps: int = 100) -> Iterator[float]:
    """Yields how long each mask takes along an answer drawn by chance."""
    rng, tokens = np.random.default_rng(seed), []
    mask = np.zeros((1, 1, vocabulary.words), np.uint32)
    for _ in range(steps):
        yield elapsed(lambda: vocabulary.fill([(matcher, [])], mask))
        ids = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        tokens.append(int(rng.choice(ids[ids != end])))
        matcher.advance(np.array(tokens))


def _large_vocabulary() -> tokenizers.Tokenizer:
    """Returns a tokenizer of pieces of words, with a space in front or none, and all bytes."""
    pieces = dict.fromkeys(pre_tokenizers.ByteLevel.alphabet())
    words = re.compile(r" ?[A-Za-z]+| ?[0-9]{1,3}|[ \n]+|[!-/:-@[-`{-~]{1,4}")
    for document in documents(standard_library()):
        for word in dict.fromkeys(words.findall(document.text)):
            written = word[:12].replace(" ", "Ġ").replace("\n", "Ċ")
            pieces.update(dict.fromkeys(written[start:stop] for start, stop in itertools.combinations(range(13), 2)))
        if len(pieces) > VOCAB_SIZE:
            break
    pieces.pop("", None)
    vocab = {piece: i for i, piece in enumerate(itertools.islice(pieces, VOCAB_SIZE - 1))}
    assert len(vocab) == VOCAB_SIZE - 1, "the text is too short"
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([tokenizers.AddedToken(END, special=True)])
    return backend


if __name__ == "__main__":
    run(main)
