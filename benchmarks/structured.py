"""What holding answers to a grammar costs: tokens per second of the bundled model, and a row's mask at 129k tokens.

    JAX_PLATFORMS=cpu python -m benchmarks.structured [--rounds 7] [--tokens 192] [--only speed]

The first part serves 16 requests by one engine, in turns: none held, half of them and all held to a schema, and half to
a pattern that any text matches. Each gets as many tokens, whatever it says, so the steps are as many. The schema has
the parts of real ones, and is long enough not to end. But other texts take other experts, which changes what a step
computes. Where any text matches, the texts are those of free requests, so the difference is what masks cost.
It prints tokens per second over that of the turn before in which none was held: the median of the rounds, and each;
and the same of processor time, all threads together, which says more on a busy machine.

The second part makes a vocabulary of 129,280 tokens out of the standard library's text, and walks through the schema
along tokens drawn by chance. It prints how long masks take, alone and 64 rows at once, and what a grammar costs that
stands for one long text, with its spelling forced and without (`dsv3.text.grammar` has it so).
"""

import argparse
import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dsv3 import SamplingParams, StructuredOutputsParams
from dsv3.config.options import EngineOptions
from dsv3.engine.build import build_engine, bundled_model
from dsv3.engine.engine import Engine
from dsv3.scheduler.request import EngineRequest
from dsv3.text.grammar import plain_grammar
from dsv3.text.matcher import GrammarVocabulary, Matcher
from training.corpus import documents, standard_library

REQUESTS, PROMPT = 16, 64
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
LONG_TEXT = 'start: b{1000}\nb: c{1000}\nc: "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--only", choices=["speed", "masks"])
    args = parser.parse_args()
    if args.only != "masks":
        _compare(args.rounds, args.tokens)
    if args.only != "speed":
        _masks()


def _compare(rounds: int, tokens: int) -> None:
    engine = build_engine(
        bundled_model(), EngineOptions(max_num_seqs=REQUESTS, max_model_len=PROMPT + tokens), progress=False
    )
    engine.warm_up()
    kinds = [("schema", REQUESTS // 2), ("any text", REQUESTS // 2), ("schema", REQUESTS)]
    for kind, held in kinds:
        _seconds(engine, tokens, held, kind)
    speeds: dict[tuple[str, int], list[np.ndarray]] = {kind: [] for kind in kinds}
    before = engine.stats()
    for _ in range(rounds):
        for (kind, held), ratios in speeds.items():
            free = _seconds(engine, tokens, 0, kind)
            ratios.append(free / _seconds(engine, tokens, held, kind))
    stats = engine.stats()
    for (kind, held), ratios in speeds.items():
        for name, column in zip(("wall", "processor"), np.array(ratios).T, strict=True):
            each = ", ".join(f"{ratio:.3f}" for ratio in sorted(column))
            print(f"{held} of {REQUESTS} held ({kind}), {name} time: tokens/s {np.median(column):.3f} of none ({each})")
    masks, earlier = stats.jobs["mask"], before.jobs["mask"]
    rows, seconds = masks.num_rows - earlier.num_rows, masks.seconds - earlier.seconds
    print(
        f"{rows} rows masked, {seconds / rows * 1e6:.0f} us of the host per row; recompilations {stats.recompilations}"
    )


def _seconds(engine: Engine, tokens: int, held: int, kind: str) -> np.ndarray:
    """Returns how long the requests take, `held` of them held to `CONSTRAINTS[kind]`: wall and processor seconds."""
    rng = np.random.default_rng(0)
    for i in range(REQUESTS):
        constraint = CONSTRAINTS[kind] if i < held else None
        sampling = SamplingParams(
            temperature=1.0, seed=i, max_tokens=tokens, ignore_eos=True, structured_outputs=constraint
        )
        prompt = rng.integers(300, 3000, PROMPT).tolist()
        engine.add(EngineRequest(request_id=i, prompt_token_ids=prompt, sampling=sampling))
    count, started = 0, np.array([time.perf_counter(), time.process_time()])
    while engine.has_work:
        count += sum(len(output.token_ids) for output in engine.step())
    seconds = np.array([time.perf_counter(), time.process_time()]) - started
    assert count == REQUESTS * tokens, "an answer has ended"
    return seconds


def _masks() -> None:
    backend = _large_vocabulary()
    started = time.perf_counter()
    end = backend.token_to_id(END)
    vocabulary = GrammarVocabulary(backend.to_str(), VOCAB_SIZE, [end])
    seconds = time.perf_counter() - started
    print(f"vocabulary of {VOCAB_SIZE}: {seconds:.2f} s to load, {4 * vocabulary.words} bytes per mask")
    started = time.perf_counter()
    matcher = vocabulary.compile(plain_grammar(StructuredOutputsParams(json=SCHEMA)))
    print(f"the schema: {(time.perf_counter() - started) * 1e3:.1f} ms to compile")
    for name, rows in (("the first", 16), ("later", 64)):
        times = [seconds for seed in range(rows) for seconds in _walk(vocabulary, matcher.copy(), end, seed)]
        at = np.percentile(np.array(times) * 1e6, [50, 90, 99, 100])
        print(
            f"masks of {name} {rows} answers: median {at[0]:.0f} us, p90 {at[1]:.0f}, p99 {at[2]:.0f}, most {at[3]:.0f}"
        )
    rows = [(matcher.copy(), []) for _ in range(64)]
    masks = np.zeros((64, 1, vocabulary.words), np.uint32)
    times = [_timed(lambda: vocabulary.fill(rows, masks)) for _ in range(20)]
    print(f"64 rows at once: {statistics.median(times) / 64 * 1e6:.1f} us per row")
    for name, grammar in (("forced", LONG_TEXT), ("free", '%llguidance {"no_forcing": true}\n' + LONG_TEXT)):
        long = vocabulary.compile(grammar)
        seconds = _timed(lambda long=long: vocabulary.fill([(long, [])], masks[:1]))
        print(f"a long text of few characters, its spelling {name}: {seconds * 1e3:.2f} ms per mask")


def _walk(vocabulary: GrammarVocabulary, matcher: Matcher, end: int, seed: int, steps: int = 100) -> Iterator[float]:
    """Yields how long each mask takes along an answer drawn by chance."""
    rng, tokens = np.random.default_rng(seed), []
    mask = np.zeros((1, 1, vocabulary.words), np.uint32)
    for _ in range(steps):
        yield _timed(lambda: vocabulary.fill([(matcher, [])], mask))
        ids = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        tokens.append(int(rng.choice(ids[ids != end])))
        matcher.advance(np.array(tokens))


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


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
    main()
