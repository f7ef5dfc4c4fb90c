"""Conversations derived from docstrings."""

from pathlib import Path

from training import chat_pairs, corpus


def test_pairs_of_a_documented_function(library: Path) -> None:
    doc = corpus.Document("package/shapes.py", (library / "module3.py").read_text())
    pairs = dict(chat_pairs.chat_pairs([doc]))
    assert pairs["What does package.shapes.scale_3 do?"] == "Return value times factor."
    assert "```python\ndef scale_3(value, factor=3)\n```" in pairs.values()
    assert "Module 3 of the library." in pairs.values()


def test_private_names_and_undocumented_functions_are_left_out() -> None:
    text = 'def _hidden():\n    "Doc."\n\n\ndef bare():\n    pass\n'
    pairs = chat_pairs.chat_pairs([corpus.Document("thing.py", text)])
    about = [answer for question, answer in pairs if "thing" in question]
    assert all("_hidden" not in answer and answer.startswith("```python\ndef bare") for answer in about)


def test_builtins_are_described() -> None:
    assert dict(chat_pairs.chat_pairs([]))["What does len do?"] == "Return the number of items in a container."


def test_a_long_paragraph_ends_at_a_sentence() -> None:
    sentence = "This sentence has a few words. "
    short = chat_pairs.first_paragraph(sentence * 40)
    assert len(short) <= chat_pairs.MAX_ANSWER
    assert short.endswith("words.")
    assert chat_pairs.first_paragraph("One\nline.\n\nMore.") == "One line."
