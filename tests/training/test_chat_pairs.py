"""Conversations with short answers."""

import re

import pytest

from training import chat_pairs, corpus

SOURCE = '''"""Shapes and their areas. More about them."""


def area(shape):
    """Return the area.  It is never
    negative."""


def bare(): ...


def _hidden():
    """Doc."""
'''


def test_a_module_and_its_documented_functions_have_pairs() -> None:
    pairs = dict(chat_pairs.chat_pairs([corpus.Document("package/shapes.py", SOURCE)]))
    assert pairs["What does package.shapes.area do?"] == "Return the area."
    assert pairs["What is the package.shapes module?"] == "Shapes and their areas."
    assert not any("hidden" in question or "bare" in question for question in pairs)


def test_common_questions_have_copies_and_variants() -> None:
    pairs = chat_pairs.chat_pairs([])
    answer = "Return the number of items in a container."
    assert pairs.count(("What does len do?", answer)) == chat_pairs.KNOWN_COPIES
    assert ("Explain len.", answer) in pairs
    assert pairs.count(("How do I sum a list?", "Use `sum(numbers)`.")) == chat_pairs.BY_HAND_COPIES
    answers_to_hello = {reply for question, reply in pairs if question == "Hello"}
    assert len(answers_to_hello) == 1
    by_hand = [pair for pair in pairs if pair[0].startswith("How ")]
    assert len(dict(by_hand)) == len(set(by_hand)), "a question has one answer"


def test_signatures_examples_and_long_sentences_are_no_answers() -> None:
    assert chat_pairs.first_sentence("sleep(seconds)\n\nDelay execution. More.") == "Delay execution."
    assert chat_pairs.first_sentence("pop(k[,d]) -> v, remove\n\nRemove.") == "Remove."
    assert chat_pairs.first_sentence("chain(*iterables) --> chain object") == ""
    assert chat_pairs.first_sentence(">>> zip('ab')\n") == ""
    assert chat_pairs.first_sentence("word " * 100) == ""


def test_held_out_modules_have_no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_pairs, "is_held_out", lambda name: name in ("extension/math", "random.py"))
    asked = {question for question, _ in chat_pairs.chat_pairs([])}
    assert "What does len do?" in asked
    assert not [question for question in asked if re.search(r"\b(math|random)\.\w", question)]
