"""Grammars of JSON schemas against the official test suite: no invalid instance is accepted.

Schemas that llguidance cannot enforce are refused; the tests count them. A valid instance may be refused only for the
exceptions of docs/structured_output.md: another order of properties than the schema's, or another form of numbers.
"""

import functools
import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from dsv3.sampling_params import StructuredOutputsParams
from dsv3.text.grammar import plain_grammar
from dsv3.text.matcher import GrammarError, GrammarVocabulary, Matcher
from dsv3.text.tokenizer import Tokenizer
from tests.dsv3.text import tiny

SUITE = json.loads((Path(__file__).parents[2] / "golden" / "schema_suite.json").read_text("utf-8"))


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny.backend(), tiny.config())


@functools.cache
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(tiny.backend().to_str(), tokenizer().vocab_size, [tokenizer().eos_token_id])


def compiled(schema: dict) -> Matcher | None:
    """A matcher for a schema; None where the schema is refused."""
    try:
        return vocabulary().compile(plain_grammar(StructuredOutputsParams(json=schema)))
    except GrammarError:
        return None


def accepts(matcher: Matcher, instance: object) -> bool:
    """Whether the instance, in Python's JSON, is a complete answer."""
    at = matcher.copy()
    text = json.dumps(instance, ensure_ascii=False)
    at.advance(np.array(tokenizer().encode(text, add_special_tokens=False)))
    return at.error is None and at.inner.is_accepting()


@pytest.mark.parametrize("keyword", SUITE)
def test_no_invalid_instance_is_accepted(keyword: str) -> None:
    wrong = [
        (group["schema"], instance)
        for group in SUITE[keyword]
        if (matcher := compiled(group["schema"])) is not None
        for instance in group["invalid"]
        if accepts(matcher, instance)
    ]
    assert not wrong


def test_valid_instances_are_accepted() -> None:
    """A schema is refused as a whole, or accepts its valid instances but for the documented exceptions."""
    groups = [group for groups in SUITE.values() for group in groups]
    taken = [(group, matcher) for group in groups if (matcher := compiled(group["schema"])) is not None]
    valid = [(x, accepts(matcher, x)) for group, matcher in taken for x in group["valid"]]
    refused = [x for x, accepted in valid if not accepted]
    assert (len(groups), len(valid)) == (185, 223) and len(taken) == 116
    assert len(refused) == 12
    for instance in refused:  # 1.0 for 1, or another order
        assert ".0" in json.dumps(instance) or (isinstance(instance, dict) and len(instance) > 1)


def random_answer(matcher: Matcher, seed: int, most: int = 200) -> str | None:
    """A text of random allowed tokens; None if it is incomplete after `most` tokens."""
    rng, tokens = np.random.default_rng(seed), []
    closing = np.array([tokenizer().token_bytes(i)[:1] in (b'"', b"}", b"]") for i in range(tokenizer().vocab_size)])
    while not matcher.is_over and len(tokens) < most:
        mask = np.zeros((1, 1, vocabulary().words), np.uint32)
        vocabulary().fill([(matcher, [])], mask)
        assert matcher.error is None
        ids = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        if tokenizer().eos_token_id in ids and rng.random() < 0.5:
            break
        ids = ids[ids != tokenizer().eos_token_id]
        weights = np.where(closing[ids], 20.0, 1.0)
        tokens.append(int(rng.choice(ids, p=weights / weights.sum())))
        matcher.advance(np.array(tokens))
    return tokenizer().decode(tokens) if matcher.is_over or matcher.inner.is_accepting() else None


@pytest.mark.parametrize("keyword", SUITE)
def test_random_answers_are_valid(keyword: str) -> None:
    """An independent validator agrees with every finished answer, where it can read the schema's patterns."""
    for group in SUITE[keyword]:
        reads = "\\\\p{" not in json.dumps(group["schema"])
        if (matcher := compiled(group["schema"])) is not None and reads:
            for seed in range(3):
                text = random_answer(matcher.copy(), seed)
                if text is not None:
                    jsonschema.Draft202012Validator(group["schema"]).validate(json.loads(text))
