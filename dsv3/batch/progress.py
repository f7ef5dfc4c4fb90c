"""Shows a batch's progress: a bar on a terminal, a line per minute in a log."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from dsv3.batch.run import BatchProgress

LOG_SECONDS = 60.0


class ProgressDisplay:
    """A progress display; use it as a context. `update` is cheap enough to be called for every line."""

    def __init__(self, console: Console):
        self._console = console
        columns = (
            TextColumn("answering"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:,.0f} tokens/s"),
            TextColumn("{task.fields[failed]} failed"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Bar(*columns, console=console, refresh_per_second=4, disable=not console.is_terminal)
        self._task = self._bar.add_task("answering", total=None, rate=0.0, failed=0)
        self._logged_s = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, progress: BatchProgress) -> None:
        """Shows the newest counts; tokens/s is the mean since the start of this run."""
        now, rate = time.monotonic(), progress.tokens_per_s
        if not self._bar.disable:
            self._bar.update(
                self._task, total=progress.total, completed=progress.answered, rate=rate, failed=progress.failed
            )
        elif now - self._logged_s > LOG_SECONDS:
            self._logged_s = now
            self._console.print(
                f"{progress.answered} of {progress.total} lines, {progress.failed} failed, {rate:,.0f} tokens/s",
                highlight=False,
            )
