"""Files by name: local or remote, plain or compressed, lines or tables. Optional libraries are imported when needed."""

import contextlib
import gzip
import importlib
import io
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple

from dsv3.batch.journal import BatchError

_KINDS: dict[str, Literal["lines", "parquet", "csv"]] = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".parquet": "parquet",
    ".csv": "csv",
}
_COMPRESSIONS: dict[str, Literal["gzip", "zstd"]] = {".gz": "gzip", ".zst": "zstd"}


class FileFormat(NamedTuple):
    """A file's format, from its name."""

    kind: Literal["lines", "parquet", "csv"]
    compression: Literal["gzip", "zstd"] | None
    is_url: bool

    @property
    def is_plain(self) -> bool:
        """Whether the file can be read and appended to in place."""
        return self.compression is None and not self.is_url


def detect_format(name: str) -> FileFormat:
    """Returns the format of a name; lines for unknown endings, as OpenAI's batch files may have any."""
    is_url = "://" in name
    path = PurePosixPath(name.partition("://")[2].partition("?")[0] if is_url else name)
    compression = _COMPRESSIONS.get(path.suffix.lower())
    kind = _KINDS.get((path.with_suffix("") if compression else path).suffix.lower(), "lines")
    return FileFormat(kind, compression if kind != "parquet" else None, is_url)


def require_module(module: str) -> Any:
    """Imports an optional library; raises BatchError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BatchError(f"{module.partition('.')[0]} is missing: pip install 'dsv3[batch]' ({error})") from None


@contextlib.contextmanager
def open_input(name: str) -> Iterator[BinaryIO]:
    """Opens a file for reading, decompressed; raises BatchError where it cannot be read."""
    form = detect_format(name)
    with contextlib.ExitStack() as stack:
        with _errors_named(name):
            file = stack.enter_context(_open(name, form.is_url, "rb"))
        if form.compression == "gzip":
            file = stack.enter_context(gzip.GzipFile(fileobj=file))
        elif form.compression == "zstd":
            arrow = require_module("pyarrow")
            with _errors_named(name):
                reader = arrow.CompressedInputStream(arrow.PythonFile(file, "r"), "zstd")
            file = stack.enter_context(io.BufferedReader(reader))
        with _errors_named(name):
            yield file


@contextlib.contextmanager
def open_output(name: str) -> Iterator[BinaryIO]:
    """Opens a file for writing, compressed as its name says.

    A local file is renamed into place at the end; a remote one follows its file system's rules. Raises BatchError where
    it cannot be written.
    """
    form = detect_format(name)
    part = f"{name}.part"
    with contextlib.ExitStack() as stack, _errors_named(name):
        file = stack.enter_context(_open(name if form.is_url else part, form.is_url, "wb"))
        target = file
        if form.compression == "gzip":
            target = stack.enter_context(gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0))
        elif form.compression == "zstd":
            arrow = require_module("pyarrow")
            target = stack.enter_context(arrow.CompressedOutputStream(arrow.PythonFile(file, "w"), "zstd"))
        yield target
    if not form.is_url:
        with _errors_named(name):
            os.replace(part, name)


def exists(name: str) -> bool:
    """Returns whether the file exists."""
    if not detect_format(name).is_url:
        return Path(name).exists()
    with _errors_named(name):
        filesystem, path = require_module("fsspec").core.url_to_fs(name)
        return bool(filesystem.exists(path))


def _open(name: str, is_url: bool, mode: str) -> Any:
    return require_module("fsspec").open(name, mode) if is_url else open(name, mode, opener=open_private)


def open_private(path: str, flags: int) -> int:
    """Opens a file with mode 0600; an `opener` for `open`."""
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def _errors_named(name: str) -> Iterator[None]:
    """Turns errors of files and their libraries into BatchError with the file's name."""
    try:
        yield
    except BatchError:
        raise
    except (OSError, EOFError) as error:
        raise BatchError(f"{name}: {getattr(error, 'strerror', None) or error}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("zlib", "fsspec", "aiohttp", "pyarrow"):
            raise
        raise BatchError(f"{name}: {error}") from error
