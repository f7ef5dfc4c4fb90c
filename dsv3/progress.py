"""Progress bars for terminals and notebooks; imports no jax."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

Update = Callable[[int, int, str], None]
"""Called with the number of finished items, their total, and a description of the current one."""

_BAR_CHARS = 20
_PAUSE_S = 0.1  # between two updates of a notebook's line: each is a message to the browser


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[Update]:
    """Shows a bar for the time of the `with`, and yields the function that updates it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    if console.is_jupyter:
        with notebook_bar(description, sys.stdout) as update:
            yield update
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=f"{description}: {what}"
        )


@contextlib.contextmanager
def notebook_bar(description: str, out: TextIO) -> Iterator[Update]:
    """Shows a bar as one line that overwrites itself.

    JupyterLab handles a carriage return but erases nothing, so each line is padded to the widest one before it.
    """
    begun, shown, width, last = time.monotonic(), -1.0, 0, ""

    def show(line: str) -> None:
        nonlocal width, shown
        width, shown = max(width, len(line)), time.monotonic()
        out.write(f"\r{line:<{width}}")
        out.flush()

    def update(done: int, total: int, what: str) -> None:
        nonlocal last
        filled = _BAR_CHARS * done // total if total else _BAR_CHARS
        seconds = int(time.monotonic() - begun)
        bar = "#" * filled + "-" * (_BAR_CHARS - filled)
        head = f"{description}: {what}" if what else description
        last = f"{head} [{bar}] {done}/{total} {seconds // 60}:{seconds % 60:02}"
        if time.monotonic() - shown > _PAUSE_S:
            show(last)

    try:
        yield update
    finally:
        if last:
            show(last)
            out.write("\n")
            out.flush()
