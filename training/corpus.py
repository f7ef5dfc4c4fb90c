"""The training text: sources and language reference of Python's standard library, and installed packages.

Nothing is downloaded. A document is one source file, one topic of `pydoc`'s language reference, or the description of
a package whose metadata names a permissive licence. The hash of a document's name decides whether it is held out, so
the split is equal on every machine. The bundled model was trained on this text.
"""

import ast
import dataclasses
import email
import hashlib
import importlib.metadata
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# Character tables, and generated files with paths of the machine that built the interpreter.
SKIPPED_PREFIXES = ("encodings/", "config-", "_sysconfigdata", "lib-dynload/")
TOPICS = "pydoc_data/topics.py"
HELD_OUT_PART = 0.025

PERMISSIVE = re.compile(r"\b(0BSD|Apache|BSD|ISC|MIT|PSF|Python Software Foundation)\b")
REFUSED = re.compile(r"GPL|MPL|Mozilla|EPL|Eclipse|Proprietary")
GENERATED = re.compile(r"_pb2(_grpc)?\.py$|(^|/)(test_[^/]*|[^/]*_test|conftest)\.py$")
NOT_THEIR_OWN = frozenset(
    {"_vendor", "vendor", "_vendored", "thirdparty_files", "third_party", "_thirdparty", "externals"}
)
MAX_BYTES = 150_000
"""Longer files are mostly tables."""
LONG_LINE = 30
"""Characters of a line that two texts are unlikely to share by chance."""
MAX_SHARED_LINES = 5


@dataclasses.dataclass(frozen=True)
class Document:
    """A text, and the name that decides whether it is held out."""

    name: str
    text: str


def standard_library() -> Path:
    """Returns the directory of this interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(name: str) -> bool:
    """Returns whether document `name` is held out for validation: 2.5 % of all names are."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < HELD_OUT_PART


def source_files(root: Path) -> list[Path]:
    """Lists Python files under `root` in a fixed order, without installed packages, tests and generated tables."""
    files = []
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if SKIPPED_DIRECTORIES.isdisjoint(relative.parts) and not relative.as_posix().startswith(SKIPPED_PREFIXES):
            files.append(path)
    return files


def documents(root: Path) -> list[Document]:
    """Returns all documents under `root` in a fixed order, without empty files."""
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
    """Returns the topics of the language reference from the dictionary in `pydoc_data.topics`."""
    assignment = next(node for node in ast.parse(source).body if isinstance(node, ast.Assign))
    topics = ast.literal_eval(assignment.value)
    return [Document(f"topics/{name}", text) for name, text in sorted(topics.items())]


def licence(package: str) -> str:
    """Returns the licence of an installed package from its metadata, in one line.

    Raises ValueError if the package is not installed, or the licence is not permissive.
    """
    try:
        metadata = importlib.metadata.metadata(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"{package} is not installed; install it, or remove it from the configuration") from error
    named = [metadata.get("License-Expression"), metadata.get("License")]
    lines = [text.strip().splitlines()[0] for text in named if text and text.strip()]
    lines += [c.split("::")[-1].strip() for c in metadata.get_all("Classifier") or [] if c.startswith("License ::")]
    found = next((line for line in lines if PERMISSIVE.search(line)), None)
    if found is None or any(REFUSED.search(line) for line in lines):
        raise ValueError(
            f"{package}: the licence {lines} is not known to be permissive; remove it from the configuration"
        )
    return found


def facts(package: str) -> dict[str, str]:
    """Returns the version and the licence of an installed package."""
    return {"version": importlib.metadata.version(package), "licence": licence(package)}


def package_texts(names: Iterable[str], held_out: list[Document]) -> dict[str, list[Document]]:
    """Returns the documents of each package without copies of held-out ones. Raises ValueError."""
    return {name: remove_copies(package_documents(name), held_out) for name in names}


def package_documents(package: str) -> list[Document]:
    """Returns a package's description and sources in a fixed order, without tests, tables and vendored packages.

    Raises ValueError as `licence` does.
    """
    licence(package)
    distribution = importlib.metadata.distribution(package)
    description = email.message_from_string(distribution.read_text("METADATA") or "").get_payload()
    found = [Document(f"{package}/README", description)] if isinstance(description, str) and description.strip() else []
    for file in sorted(distribution.files or [], key=str):
        if _is_source(file):
            text = Path(str(distribution.locate_file(file))).read_text(encoding="utf-8", errors="replace")
            if 0 < len(text.strip()) <= MAX_BYTES:
                found.append(Document(f"{package}/{file.as_posix()}", text))
    return found


def remove_copies(docs: Iterable[Document], held_out: Iterable[Document]) -> list[Document]:
    """Returns `docs` without those that share long lines with a held-out document, such as backports."""
    parts = [_long_lines(doc.text) for doc in held_out]
    return [
        doc for doc in docs if max((len(part & _long_lines(doc.text)) for part in parts), default=0) <= MAX_SHARED_LINES
    ]


def _long_lines(text: str) -> set[str]:
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= LONG_LINE}


def _is_source(file: PurePosixPath) -> bool:
    own = SKIPPED_DIRECTORIES.isdisjoint(file.parts) and NOT_THEIR_OWN.isdisjoint(file.parts)
    return file.suffix == ".py" and ".." not in file.parts and own and not GENERATED.search(file.as_posix())
