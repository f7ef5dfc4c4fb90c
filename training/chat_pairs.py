"""Questions and answers about Python: most come from the corpus's docstrings, a few are made by hand."""

import ast
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator

from training.corpus import Document, is_held_out

Pair = tuple[str, str]

MAX_ANSWER = 420
"""Longest answer in characters. A longer first paragraph is cut at the end of a sentence."""
MAX_SOURCE_LINES = 14
SKIPPED_PACKAGES = ("idlelib", "lib2to3", "turtledemo", "pydoc_data", "tkinter", "encodings")
EXTENSION_MODULES = ("builtins", "math", "cmath", "itertools", "time", "gc", "marshal", "errno", "binascii", "array")

ASK_MEANING = "What does {} do?"
ASK_MEANING_TOO = ("What is {}?", "Explain {}.", "What is {} for?", "Describe {}.")
ASK_SIGNATURE = ("Show the signature of {}.", "What arguments does {} take?", "How do I call {}?")
ASK_SOURCE = ("Show the code of {}.", "How is {} implemented?")
ASK_MODULE = ("What is the {} module?", "What does the module {} do?", "What is the {} module for?")

INTRODUCTION = (
    "I am a small language model with the architecture of DeepSeek-V3, trained on the source code and documentation "
    "of Python's standard library. I am here to show that the server works."
)
GREETING = "Hello! Ask me about Python's standard library, for example: What does json.dumps do?"
HAND_MADE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hello there", "Good morning", "Good evening", "Hi there!"), GREETING),
    (("Who are you?", "What are you?", "Introduce yourself.", "Tell me about yourself.", "Which model are you?"),
     INTRODUCTION),
    (("What can you do?", "Help", "How can you help me?"), "I can describe modules and functions of Python's standard "
     "library, show their signatures and short pieces of code. I am very small, so check what I say."),
    (("How are you?", "How are you doing?"), "I am running well, thank you. What would you like to know about Python?"),
    (("Thank you", "Thanks!", "Thank you!", "Thanks"), "You are welcome."),
    (("Bye", "Goodbye", "Goodbye!", "See you"), "Goodbye!"),
    (("What is Python?", "Tell me about Python."), "Python is an interpreted, object-oriented, high-level programming "
     "language with dynamic semantics and a large standard library."),
    (("Write hello world in Python.", "Print hello world.", "Say hello world in Python."),
     '```python\nprint("Hello, world!")\n```'),
    (("Write a function that adds two numbers.", "How do I add two numbers?"),
     "```python\ndef add(a, b):\n    return a + b\n```"),
    (("How do I read a file?", "Show how to read a text file."),
     '```python\nwith open(path, encoding="utf-8") as f:\n    text = f.read()\n```'),
    (("How do I sort a list?", "How can I sort a list in Python?"),
     "Use `sorted(items)` for a new list or `items.sort()` to sort in place; both take `key` and `reverse`."),
    (("How do I import a module?", "How do I use a module?"), "```python\nimport json\n```"),
    (("How do I define a class?", "Write a class in Python."),
     "```python\nclass Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n```"),
    (("How do I write a loop?", "Write a for loop."), "```python\nfor item in items:\n    print(item)\n```"),
    (("How do I raise an exception?", "How do I raise an error?"), '```python\nraise ValueError("message")\n```'),
    (("How do I catch an exception?", "How do I handle an error?"),
     "```python\ntry:\n    result = compute()\nexcept ValueError as exc:\n    print(exc)\n```"),
)  # fmt: skip
HAND_MADE_COPIES = 12
"""Copies of each question made by hand. One copy would be lost among thousands of others."""


def chat_pairs(docs: list[Document]) -> list[Pair]:
    """Lists all pairs in a fixed order: about `docs` (source files), about extension modules, made by hand."""
    pairs: list[Pair] = []
    for doc in docs:
        if doc.name.endswith(".py") and is_public_module(doc.name):
            pairs.extend(_module_pairs(doc))
    for name in EXTENSION_MODULES:
        if not is_held_out(f"extension/{name}"):
            pairs.extend(_extension_pairs(name))
    by_hand = [(question, answer) for questions, answer in HAND_MADE for question in questions]
    return pairs + by_hand * HAND_MADE_COPIES


def first_paragraph(doc: str) -> str:
    """Returns a docstring's first paragraph as one line, cut to whole sentences where it exceeds `MAX_ANSWER`."""
    paragraph = " ".join(inspect.cleandoc(doc).split("\n\n")[0].split())
    if len(paragraph) <= MAX_ANSWER:
        return paragraph
    end = paragraph.rfind(". ", 0, MAX_ANSWER)
    return paragraph[: end + 1] if end > 0 else ""


def is_public_module(name: str) -> bool:
    """Returns whether people import the module of document `name`."""
    parts = name.removesuffix(".py").removesuffix("/__init__").split("/")
    return parts[0] not in SKIPPED_PACKAGES and not any(part.startswith("_") for part in parts)


def _module_pairs(doc: Document) -> Iterator[Pair]:
    module = doc.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    tree = ast.parse(doc.text)
    summary = first_paragraph(ast.get_docstring(tree) or "")
    if summary:
        yield _pick(ASK_MODULE, module).format(module), summary
    yield from _body_pairs(tree.body, module, doc.text.splitlines())


def _body_pairs(body: list[ast.stmt], owner: str, lines: list[str]) -> Iterator[Pair]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        name = f"{owner}.{node.name}"
        summary = first_paragraph(ast.get_docstring(node) or "")
        if summary:
            yield from _meaning(name, summary)
        if isinstance(node, ast.ClassDef):
            yield from _body_pairs(node.body, name, lines)
            continue
        if summary:
            signature = f"```python\n{_signature(node)}\n```"
            yield _pick(ASK_SIGNATURE, name).format(name), signature
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if source.count("\n") < MAX_SOURCE_LINES and _pick(("yes", "no"), name) == "yes":
            yield _pick(ASK_SOURCE, name).format(name), f"```python\n{source}\n```"


def _meaning(name: str, summary: str) -> Iterator[Pair]:
    yield ASK_MEANING.format(name), summary
    yield _pick(ASK_MEANING_TOO, name).format(name), summary


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{prefix} {node.name}({ast.unparse(node.args)}){returns}"


def _extension_pairs(module: str) -> Iterator[Pair]:
    """Returns the pairs about a module written in C, from its docstrings and those of its types' methods.

    It has no source file.
    """
    members = {f"{module}.{n}": value for n, value in vars(importlib.import_module(module)).items()}
    for name, value in list(members.items()):
        if isinstance(value, type) and not issubclass(value, BaseException):
            members.update({f"{name}.{n}": getattr(value, n, None) for n in vars(value)})
    for name, value in sorted(members.items()):
        short = name.removeprefix("builtins.")
        summary = first_paragraph(value.__doc__ or "") if callable(value) else ""
        if summary and not any(part.startswith("_") for part in short.split(".")):
            yield from _meaning(short, summary)


def _pick(choices: tuple[str, ...], name: str) -> str:
    return choices[hashlib.sha256(name.encode()).digest()[0] % len(choices)]
