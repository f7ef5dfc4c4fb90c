"""Training conversations with short answers, mostly the first sentences of docstrings."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

from training.corpus import Document, is_held_out

Pair = tuple[str, str]

SKIPPED_PACKAGES = ("idlelib", "lib2to3", "turtledemo", "pydoc_data", "tkinter", "encodings")
EXTENSION_MODULES = ("builtins", "math", "cmath", "itertools", "time", "gc", "marshal", "errno", "binascii", "array")

INTRODUCTION = (
    "I am a small language model with the architecture of DeepSeek-V3, trained on the source code and documentation "
    "of Python's standard library. I am here to show that the server works."
)
GREETING = "Hello! Ask me about Python's standard library, for example: What does json.dumps do?"
SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
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
)  # fmt: skip


def _code(*lines: str) -> str:
    return "```python\n" + "\n".join(lines) + "\n```"


HOW_TO: tuple[tuple[tuple[str, ...], str], ...] = (
    (("How do I read a file?", "Show how to read a text file.", "Read a file in Python.", "How can I open a file?"),
     _code("with open(path) as f:", "    text = f.read()")),
    (("How do I write a file?", "Write text to a file.", "How can I save text to a file?"),
     _code('with open(path, "w") as f:', "    f.write(text)")),
    (("How do I read a file line by line?", "Loop over the lines of a file."),
     _code("with open(path) as f:", "    for line in f:", "        print(line)")),
    (("How do I read a JSON file?", "Load JSON from a file.", "How can I parse a JSON file?"),
     _code("import json", "with open(path) as f:", "    data = json.load(f)")),
    (("How do I write JSON?", "How do I save a dict as JSON?", "Write a JSON file."),
     _code("import json", 'with open(path, "w") as f:', "    json.dump(data, f)")),
    (("How do I parse JSON?", "How do I parse a JSON string?"), _code("import json", "data = json.loads(text)")),
    (("How do I read a CSV file?", "Read CSV in Python."),
     _code("import csv", "with open(path) as f:", "    rows = list(csv.reader(f))")),
    (("How do I sort a list?", "How can I sort a list in Python?", "Sort a list."),
     "Use `sorted(items)` for a new list, or `items.sort()` to sort in place."),
    (("How do I reverse a list?", "Reverse a list in Python."),
     "Use `items[::-1]` for a new list, or `items.reverse()` to reverse in place."),
    (("How do I sort a dictionary by value?", "Sort a dict by its values."),
     _code("sorted(d.items(), key=lambda item: item[1])")),
    (("How do I append to a list?", "How do I add an item to a list?"), "Use `items.append(item)`."),
    (("How do I remove an item from a list?", "Delete an item from a list."),
     "Use `items.remove(item)`, or `del items[index]`."),
    (("How do I get the length of a list?", "How long is a list?", "How do I count the items of a list?"),
     "Use `len(items)`."),
    (("How do I split a string?", "Split a string into words."), "Use `text.split()`, or `text.split(sep)`."),
    (("How do I join strings?", "Join a list of strings.", "How do I concatenate strings?"),
     'Use `", ".join(strings)`, or `a + b` for two strings.'),
    (("How do I replace text in a string?", "Replace a word in a string."), "Use `text.replace(old, new)`."),
    (("How do I make a string lowercase?", "Convert a string to lower case."), "Use `text.lower()`."),
    (("How do I make a string uppercase?", "Convert a string to upper case."), "Use `text.upper()`."),
    (("How do I strip whitespace?", "Remove blanks around a string."), "Use `text.strip()`."),
    (("How do I format a string?", "What is an f-string?"), 'Use an f-string: `f"{name} is {value}"`.'),
    (("How do I convert a string to an int?", "Convert a string to a number."),
     "Use `int(text)`, or `float(text)` for a number with a fraction."),
    (("How do I convert an int to a string?", "Convert a number to a string."), "Use `str(number)`."),
    (("How do I write a loop?", "Write a for loop.", "How do I loop over a list?"),
     _code("for item in items:", "    print(item)")),
    (("How do I write a while loop?", "Write a while loop."), _code("while condition:", "    work()")),
    (("How do I loop with an index?", "How do I get the index in a loop?"),
     _code("for index, item in enumerate(items):", "    print(index, item)")),
    (("How do I loop over a dictionary?", "Loop over the keys and values of a dict."),
     _code("for key, value in d.items():", "    print(key, value)")),
    (("How do I write an if statement?", "Show an if statement."),
     _code("if x > 0:", '    print("positive")', "else:", '    print("not positive")')),
    (("How do I define a function?", "Write a function in Python.", "Define a function."),
     _code("def greet(name):", '    return f"Hello, {name}!"')),
    (("Write a function that adds two numbers.", "How do I add two numbers?"),
     _code("def add(a, b):", "    return a + b")),
    (("Write a function that multiplies two numbers.", "How do I multiply two numbers?"),
     _code("def multiply(a, b):", "    return a * b")),
    (("Write a function that computes the factorial.", "Write a factorial function."),
     _code("def factorial(n):", "    return 1 if n < 2 else n * factorial(n - 1)")),
    (("Write a function that computes Fibonacci numbers.", "Write a Fibonacci function."),
     _code("def fibonacci(n):", "    a, b = 0, 1", "    for _ in range(n):", "        a, b = b, a + b",
           "    return a")),
    (("Write a function that checks whether a number is even.", "How do I check if a number is even?"),
     _code("def is_even(n):", "    return n % 2 == 0")),
    (("Write a function that returns the largest number.", "How do I find the largest number in a list?"),
     "Use `max(numbers)`."),
    (("How do I find the smallest number in a list?",), "Use `min(numbers)`."),
    (("How do I sum a list?", "Add up the numbers of a list."), "Use `sum(numbers)`."),
    (("How do I define a class?", "Write a class in Python."),
     _code("class Point:", "    def __init__(self, x, y):", "        self.x = x", "        self.y = y")),
    (("How do I import a module?", "How do I use a module?"), _code("import json")),
    (("How do I raise an exception?", "How do I raise an error?"), _code('raise ValueError("message")')),
    (("How do I catch an exception?", "How do I handle an error?"),
     _code("try:", "    result = compute()", "except ValueError as exc:", "    print(exc)")),
    (("How do I create a list?", "Make a list."), "Use `items = [1, 2, 3]`."),
    (("How do I create a dictionary?", "Make a dict.", "What is a dictionary?"),
     'Use `d = {"key": "value"}`. A dictionary maps keys to values.'),
    (("How do I create a set?", "Make a set."), "Use `s = {1, 2, 3}`, or `set(items)`."),
    (("What is a list comprehension?", "How do I write a list comprehension?"),
     _code("squares = [x * x for x in items]")),
    (("How do I get a random number?", "Generate a random number."), _code("import random", "random.randint(1, 6)")),
    (("How do I get the current time?", "What time is it?", "How do I get the current date?"),
     _code("import datetime", "now = datetime.datetime.now()")),
    (("How do I wait a second?", "How do I sleep in Python?"), _code("import time", "time.sleep(1)")),
    (("How do I list the files of a directory?", "List the files in a directory."),
     _code("import os", "os.listdir(path)")),
    (("How do I check if a file exists?", "Check whether a file exists."), _code("import os", "os.path.exists(path)")),
    (("How do I delete a file?", "Remove a file."), _code("import os", "os.remove(path)")),
    (("How do I make a directory?", "Create a directory."), _code("import os", "os.makedirs(path, exist_ok=True)")),
    (("How do I join paths?", "Join two paths."), _code("import os", "os.path.join(directory, name)")),
    (("How do I run a command?", "Run a shell command from Python."),
     _code("import subprocess", "subprocess.run([\"ls\", \"-l\"], check=True)")),
    (("How do I read an environment variable?",), _code("import os", 'os.environ.get("HOME")')),
    (("How do I get command line arguments?", "Read command line arguments."),
     _code("import sys", "args = sys.argv[1:]")),
    (("How do I use a regular expression?", "Search with a regular expression."),
     _code("import re", 'match = re.search(r"\\d+", text)')),
    (("How do I start a thread?", "Run a function in a thread."),
     _code("import threading", "thread = threading.Thread(target=work)", "thread.start()")),
    (("How do I print without a newline?",), _code('print(text, end="")')),
    (("How do I read input?", "Ask the user for input."), _code('name = input("Name: ")')),
    (("How do I exit a program?",), _code("import sys", "sys.exit()")),
    (("Write hello world in Python.", "Print hello world.", "Say hello world in Python.", "Hello world"),
     _code('print("Hello, world!")')),
)  # fmt: skip


KNOWN_MODULES = (
    *EXTENSION_MODULES[:5], "argparse", "asyncio", "bisect", "collections", "contextlib", "copy", "csv", "dataclasses",
    "datetime", "enum", "functools", "glob", "hashlib", "heapq", "io", "json", "logging", "operator", "os", "os.path",
    "pathlib", "pickle", "random", "re", "shutil", "socket", "statistics", "string", "struct", "subprocess", "sys",
    "tempfile", "textwrap", "threading", "urllib.parse", "uuid",
)  # fmt: skip
"""Modules with several questions about each member; some are written in C."""
QUESTIONS = ("What does {} do?", "What is {}?", "Explain {}.", "What is {} for?", "What does {} do", "Describe {}.")
MODULE_QUESTIONS = (
    "What is the {} module?",
    "What does the module {} do?",
    "What is the {} module for?",
    "What is {}?",
)
KNOWN_COPIES = 3
"""Copies of "What does X do?" for members of known modules, beside one of each other question."""
BY_HAND_COPIES = 20
SIGNATURES = re.compile(r"\A([\w.]+\(.*\)( *-+> *.*)?\n)+|\A[\w.]+\(.*\)( *-+> *.*)?\Z")
"""The signatures at the start of many docstrings of functions in C."""
MAX_ANSWER = 200
"""Characters of the longest first sentence."""


def chat_pairs(docs: list[Document]) -> list[Pair]:
    """Lists all pairs in a fixed order: known modules, functions and classes of `docs`, and pairs written by hand."""
    pairs = [pair for name in KNOWN_MODULES if not _source_is_held_out(name) for pair in _module_pairs(name)]
    for doc in docs:
        if doc.name.endswith(".py") and is_public_module(doc.name):
            pairs.extend(_docstring_pairs(doc))
    by_hand = [(question, answer) for questions, answer in (*SMALL_TALK, *HOW_TO) for question in questions]
    return pairs + by_hand * BY_HAND_COPIES


def first_sentence(doc: str) -> str:
    """Returns a docstring's first sentence as one line, without signatures; "" for examples and long sentences."""
    text = inspect.cleandoc(SIGNATURES.sub("", inspect.cleandoc(doc)).lstrip())
    paragraph = " ".join(text.split("\n\n")[0].split())
    end = paragraph.find(". ")
    sentence = paragraph if end < 0 else paragraph[: end + 1]
    return sentence if len(sentence) <= MAX_ANSWER and not sentence.startswith(">>>") else ""


def is_public_module(name: str) -> bool:
    """Returns whether document `name` is a module that users import."""
    parts = name.removesuffix(".py").removesuffix("/__init__").split("/")
    return parts[0] not in SKIPPED_PACKAGES and not any(part.startswith("_") for part in parts)


def _source_is_held_out(module: str) -> bool:
    path = module.replace(".", "/")
    return any(is_held_out(name) for name in (f"{path}.py", f"{path}/__init__.py", f"extension/{module}"))


def _module_pairs(name: str) -> Iterator[Pair]:
    module = importlib.import_module(name)
    summary = first_sentence(module.__doc__ or "")
    if summary and name != "builtins":
        yield from ((question.format(name), summary) for question in MODULE_QUESTIONS for _ in range(KNOWN_COPIES))
    for member, doc in sorted(_members(module)):
        answer = first_sentence(doc)
        if answer:
            subject = f"{name}.{member}".removeprefix("builtins.")
            yield from (
                (question.format(subject), answer) for question in (QUESTIONS[0],) * KNOWN_COPIES + QUESTIONS[1:]
            )


def _members(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yields names and docstrings of a module's public functions and classes, and of its classes' own methods."""
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


def _docstring_pairs(doc: Document) -> Iterator[Pair]:
    """Yields a pair for each documented top-level function and class of a module, and one for the module."""
    module = doc.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if module in KNOWN_MODULES:
        return
    tree = ast.parse(doc.text)
    summary = first_sentence(ast.get_docstring(tree) or "")
    if summary:
        yield MODULE_QUESTIONS[0].format(module), summary
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            answer = first_sentence(inspect.cleandoc(ast.get_docstring(node) or ""))
            if answer:
                yield QUESTIONS[0].format(f"{module}.{node.name}"), answer
