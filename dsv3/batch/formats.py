"""Files by name: local or under a URL, plain or compressed, lines or tables. Libraries of the extra load late."""

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
    """What a name says of a file: `kind`, `compression` and whether it is a URL."""

    kind: Literal["lines", "parquet", "csv"]
    compression: Literal["gzip", "zstd"] | None
    is_url: bool

    @property
    def is_plain(self) -> bool:
        """Whether the file can be read and appended to in its place."""
        return self.compression is None and not self.is_url


def format_of(name: str) -> FileFormat:
    """Returns what a name says; a name that says nothing is of lines, as OpenAI's batch files may be."""
    is_url = "://" in name
    path = PurePosixPath(name.partition("://")[2].partition("?")[0] if is_url else name)
    compression = _COMPRESSIONS.get(path.suffix.lower())
    kind = _KINDS.get((path.with_suffix("") if compression else path).suffix.lower(), "lines")
    return FileFormat(kind, compression if kind != "parquet" else None, is_url)


def need(module: str) -> Any:
    """Imports a library of the extra; raises BatchError that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BatchError(f"this needs {module.partition('.')[0]}: pip install 'dsv3[batch]' ({error})") from None


@contextlib.contextmanager
def reading(name: str) -> Iterator[BinaryIO]:
    """Opens a file to read what it holds, decompressed; raises BatchError where it cannot be."""
    form = format_of(name)
    with contextlib.ExitStack() as stack:
        with _told(name):
            file = stack.enter_context(_open(name, form.is_url, "rb"))
        if form.compression == "gzip":
            file = stack.enter_context(gzip.GzipFile(fileobj=file))
        elif form.compression == "zstd":
            reader = need("zstandard").ZstdDecompressor().stream_reader(file, read_across_frames=True)
            file = stack.enter_context(io.BufferedReader(reader))
        with _told(name):
            yield file


@contextlib.contextmanager
def writing(name: str) -> Iterator[BinaryIO]:
    """Opens a file to write what it shall hold, compressed as its name says.

    A local file takes its place at the end, whole; what happens to one under a URL is its file system's. Raises
    BatchError where it cannot be written.
    """
    form = format_of(name)
    part = f"{name}.part"
    with contextlib.ExitStack() as stack, _told(name):
        file = stack.enter_context(_open(name if form.is_url else part, form.is_url, "wb"))
        target = file
        if form.compression == "gzip":
            target = stack.enter_context(gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0))
        elif form.compression == "zstd":
            target = stack.enter_context(need("zstandard").ZstdCompressor().stream_writer(file, closefd=False))
        yield target
    if not form.is_url:
        with _told(name):
            os.replace(part, name)


def exists(name: str) -> bool:
    """Returns whether there is such a file."""
    if not format_of(name).is_url:
        return Path(name).exists()
    with _told(name):
        filesystem, path = need("fsspec").core.url_to_fs(name)
        return bool(filesystem.exists(path))


def _open(name: str, is_url: bool, mode: str) -> Any:
    return need("fsspec").open(name, mode) if is_url else open(name, mode, opener=_private)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Has what can go wrong with a file end the batch with its name."""
    try:
        yield
    except BatchError:
        raise
    except (OSError, EOFError) as error:
        raise BatchError(f"{name}: {getattr(error, 'strerror', None) or error}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in (
            "zlib",
            "zstd",
            "zstandard",
            "fsspec",
            "aiohttp",
            "pyarrow",
        ):
            raise
        raise BatchError(f"{name}: {error}") from error
