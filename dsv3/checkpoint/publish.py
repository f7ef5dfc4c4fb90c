"""Directories that appear whole or not at all, even if the process or the machine dies half-way."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yields a directory to write into. It becomes `target` when the block ends, and vanishes if the block raises.

    Raises `FileExistsError` at once unless `target` is absent or an empty directory.
    """
    partial = partial_path(target)
    check_free(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    publish(partial, target)


def partial_path(target: Path) -> Path:
    """Returns the directory beside `target` that holds its files until all are written."""
    return target.absolute().parent / f".{target.absolute().name}.partial"


def check_free(target: Path) -> None:
    """Raises `FileExistsError` unless `target` is absent or an empty directory, which a rename may replace."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not empty; remove it or choose another directory")


def publish(partial: Path, target: Path) -> None:
    """Syncs `partial` to the disk and renames it to `target`."""
    for directory, _, names in os.walk(partial):
        for name in names:
            sync(Path(directory) / name)
        sync(Path(directory))
    os.rename(partial, target)
    sync(target.absolute().parent)


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file's content at once: a kill or a loss of power leaves the old content or the new, never a mix."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(content)
    sync(new)
    os.replace(new, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Returns when a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
