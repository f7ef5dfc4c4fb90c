"""Conversations with short answers: the first sentence of a docstring, often for what people ask about most."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

from training.chat_pairs import EXTENSION_MODULES, HAND_MADE, Pair, first_paragraph, is_public_module
from training.corpus import Document, is_held_out
from training.how_to import HOW_TO

KNOWN_MODULES = (
    *EXTENSION_MODULES[:5], "argparse", "asyncio", "bisect", "collections", "contextlib", "copy", "csv", "dataclasses",
    "datetime", "enum", "functools", "glob", "hashlib", "heapq", "io", "json", "logging", "operator", "os", "os.path",
    "pathlib", "pickle", "random", "re", "shutil", "socket", "statistics", "string", "struct", "subprocess", "sys",
    "tempfile", "textwrap", "threading", "urllib.parse", "uuid",
)  # fmt: skip
"""Modules whose members are asked about in several ways, some of them written in C."""
ASK = ("What does {} do?", "What is {}?", "Explain {}.", "What is {} for?", "What does {} do", "Describe {}.")
ASK_MODULE = ("What is the {} module?", "What does the module {} do?", "What is the {} module for?", "What is {}?")
KNOWN_COPIES = 3
"""Copies of "What does X do?" where the member's module is known, beside one of each other way to ask."""
BY_HAND_COPIES = 20
SIGNATURES = re.compile(r"\A([\w.]+\(.*\)( *-+> *.*)?\n)+|\A[\w.]+\(.*\)( *-+> *.*)?\Z")
"""The lines with which many docstrings of functions in C begin."""
MAX_ANSWER = 200
"""Characters of the longest first sentence."""


def short_pairs(docs: list[Document]) -> list[Pair]:
    """Lists all pairs in a fixed order: about known modules, about functions and classes of `docs`, made by hand."""
    pairs = [pair for name in KNOWN_MODULES if not _source_is_held_out(name) for pair in _known(name)]
    for doc in docs:
        if doc.name.endswith(".py") and is_public_module(doc.name):
            pairs.extend(_documented(doc))
    answered = {question for questions, _ in HOW_TO for question in questions}
    by_hand = [(q, answer) for questions, answer in (*HAND_MADE, *HOW_TO) for q in questions]
    others = [pair for pair in by_hand[: _count(HAND_MADE)] if pair[0] not in answered]
    return pairs + (others + by_hand[_count(HAND_MADE) :]) * BY_HAND_COPIES


def first_sentence(doc: str) -> str:
    """Returns a docstring's first sentence as one line, without signatures before it.

    Returns nothing where it is longer than `MAX_ANSWER`, or an example.
    """
    paragraph = first_paragraph(SIGNATURES.sub("", inspect.cleandoc(doc)).lstrip())
    end = paragraph.find(". ")
    sentence = paragraph if end < 0 else paragraph[: end + 1]
    return sentence if len(sentence) <= MAX_ANSWER and not sentence.startswith(">>>") else ""


def _count(groups: tuple[tuple[tuple[str, ...], str], ...]) -> int:
    return sum(len(questions) for questions, _ in groups)


def _source_is_held_out(module: str) -> bool:
    path = module.replace(".", "/")
    return any(is_held_out(name) for name in (f"{path}.py", f"{path}/__init__.py", f"extension/{module}"))


def _known(name: str) -> Iterator[Pair]:
    module = importlib.import_module(name)
    summary = first_sentence(module.__doc__ or "")
    if summary and name != "builtins":
        yield from ((question.format(name), summary) for question in ASK_MODULE for _ in range(KNOWN_COPIES))
    for member, doc in sorted(_members(module)):
        answer = first_sentence(doc)
        if answer:
            asked = f"{name}.{member}".removeprefix("builtins.")
            yield from ((question.format(asked), answer) for question in (ASK[0],) * KNOWN_COPIES + ASK[1:])


def _members(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Returns names and docstrings of a module's public functions and classes, and of its classes' own methods."""
    for name, value in vars(module).items():
        public, home = name in getattr(module, "__all__", [name]), str(getattr(value, "__module__", ""))
        borrowed = home == "builtins" != module.__name__ and isinstance(value, type)
        if name.startswith("_") or not public or not callable(value) or borrowed or _source_is_held_out(home):
            continue
        own_error = isinstance(value, type) and issubclass(value, BaseException)
        if not own_error and isinstance(value.__doc__, str):
            yield name, value.__doc__
        if isinstance(value, type) and not own_error:
            methods = ((n, getattr(m, "__doc__", None)) for n, m in vars(value).items() if not n.startswith("_"))
            yield from ((f"{name}.{n}", doc) for n, doc in methods if isinstance(doc, str))


def _documented(doc: Document) -> Iterator[Pair]:
    """Returns a pair for each documented function and class at the top of a module, and one for the module."""
    module = doc.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if module in KNOWN_MODULES:
        return
    tree = ast.parse(doc.text)
    summary = first_sentence(ast.get_docstring(tree) or "")
    if summary:
        yield ASK_MODULE[0].format(module), summary
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            answer = first_sentence(inspect.cleandoc(ast.get_docstring(node) or ""))
            if answer:
                yield ASK[0].format(f"{module}.{node.name}"), answer
