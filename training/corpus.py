"""The training text: the sources of Python's standard library on this machine, and the language reference of `pydoc`.

Nothing is downloaded. A document is one source file, or one topic of the reference. The hash of a document's name
decides whether it is held out, so the split is the same on every machine.
"""

import ast
import dataclasses
import hashlib
import sysconfig
from pathlib import Path

SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# Character tables, and files that the interpreter's build writes: they hold paths of the build machine.
SKIPPED_PREFIXES = ("encodings/", "config-", "_sysconfigdata", "lib-dynload/")
TOPICS = "pydoc_data/topics.py"
HELD_OUT_PART = 0.025


@dataclasses.dataclass(frozen=True)
class Document:
    """A text, and the name that decides whether it is held out."""

    name: str
    text: str


def standard_library() -> Path:
    """Returns the directory of this interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(name: str) -> bool:
    """Returns whether document `name` is held out for validation, as 2.5 % of all names are."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < HELD_OUT_PART


def source_files(root: Path) -> list[Path]:
    """Lists Python files below `root` in a fixed order, without installed packages, tests and generated tables."""
    files = []
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if SKIPPED_DIRECTORIES.isdisjoint(relative.parts) and not relative.as_posix().startswith(SKIPPED_PREFIXES):
            files.append(path)
    return files


def documents(root: Path) -> list[Document]:
    """Returns all documents below `root` in a fixed order, without empty files."""
    found: list[Document] = []
    for path in source_files(root):
        name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8", errors="replace")
        if name == TOPICS:
            found.extend(_topics(text))
        elif text.strip():
            found.append(Document(name, text))
    return found


def split_documents(docs: list[Document]) -> tuple[list[Document], list[Document]]:
    """Returns the training documents and the held-out ones."""
    train = [d for d in docs if not is_held_out(d.name)]
    held_out = [d for d in docs if is_held_out(d.name)]
    return train, held_out


def _topics(source: str) -> list[Document]:
    """Returns the sections of the language reference, from the dictionary that `pydoc_data.topics` assigns."""
    assignment = next(node for node in ast.parse(source).body if isinstance(node, ast.Assign))
    topics = ast.literal_eval(assignment.value)
    return [Document(f"topics/{name}", text) for name, text in sorted(topics.items())]
