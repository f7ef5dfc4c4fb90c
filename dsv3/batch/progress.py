"""Shows a batch's progress: a bar on a terminal, a line per minute in a log."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from dsv3.batch.run import BatchProgress

LOG_SECONDS = 60.0


@contextlib.contextmanager
def progress_display(console: Console) -> Iterator[Callable[[BatchProgress], None]]:
    """Yields a function that shows the newest counts; it is cheap enough to be called for every line.

    tokens/s is the mean since the start of this run.
    """
    columns = (
        TextColumn("answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    bar = Bar(*columns, console=console, refresh_per_second=4, disable=not console.is_terminal)
    task, logged_s = bar.add_task("answering", total=None, rate=0.0, failed=0), time.monotonic()

    def show(progress: BatchProgress) -> None:
        nonlocal logged_s
        now, rate = time.monotonic(), progress.tokens_per_s
        if not bar.disable:
            bar.update(task, total=progress.total, completed=progress.answered, rate=rate, failed=progress.failed)
        elif now - logged_s > LOG_SECONDS:
            logged_s = now
            text = f"{progress.answered} of {progress.total} lines, {progress.failed} failed, {rate:,.0f} tokens/s"
            console.print(text, highlight=False)

    with bar:
        yield show
