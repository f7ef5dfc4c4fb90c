"""Answers a table, or a file of requests in OpenAI's batch format, as many at a time as the model's engine holds.

  python -m launch.batch requests.jsonl answers.jsonl
  python -m launch.batch requests.jsonl answers.jsonl --model /models/DeepSeek-V2-Lite
  python -m launch.batch questions.parquet answers.parquet --prompt_column question
  python -m launch.batch s3://data/questions.csv.gz answers.jsonl.zst --server http://a:8000,http://b:8000

Tables are Parquet, CSV or lines of JSON, local or under a URL; a column `messages` holds conversations. Servers that
run already may answer, several together. Otherwise the engine runs on one host, and without options on one device;
docs/batch.md has the options for DeepSeek-V3.
Answers are appended as they come, in any order. After ^C, SIGTERM, a crash or a kill the same command continues: no
line is lost and none is answered twice. docs/batch.md describes the format.
"""

import asyncio
import contextlib
import logging
import pathlib
import signal
import sys
from collections.abc import Callable

import uvloop
from rich.console import Console

from dsv3.batch.journal import BatchError, Journal, model_identity, summarize_input
from dsv3.batch.options import BatchOptions
from dsv3.batch.progress import progress_display
from dsv3.batch.run import BatchProgress, run
from dsv3.batch.servers import RemoteCompleter, remote_completer
from dsv3.batch.tables import StagedBatch, stage
from dsv3.config.options import EngineOptions
from dsv3.config.server_options import ServerOptions, ServiceOptions
from dsv3.server.batches.completer import ServiceCompleter, check_fields, service_completer
from dsv3.server.config import ServerConfig
from dsv3.server.http.http_server import raise_open_files_limit
from launch import cli, flags
from launch.catalog import model_dir, model_names

for _options in (BatchOptions, ServiceOptions, EngineOptions):
    cli.define(_options)

_Completer = contextlib.AbstractAsyncContextManager[ServiceCompleter | RemoteCompleter]


def main(source: str, output: str) -> int:
    """Runs the batch; exit status 0 when every line is answered, 128 + n after signal n.

    It is 1 after an error, and where every line has failed.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    options = cli.read(BatchOptions)
    raise_open_files_limit()  # of `--server`, which keeps thousands of connections
    config = None if options.server else _config()
    if pathlib.Path(source).resolve() == pathlib.Path(output).resolve():
        raise flags.UsageError("INPUT and OUTPUT are the same file")
    try:
        if config is not None and options.body is not None:
            check_fields(options.endpoint, options.body)
        staged = stage(source, output, options)
        summary = summarize_input(staged.lines)
        model = uvloop.run(_model_of(options)) if config is None else _identity(config.model_dir)
        with contextlib.closing(Journal.open(staged.answers, summary, model)) as journal:
            return _run(staged, journal, lambda: _completer(config, options))
    except BatchError as error:
        print(f"launch.batch: {error}", file=sys.stderr)
        return 1


def _completer(config: ServerConfig | None, options: BatchOptions) -> _Completer:
    return remote_completer(options) if config is None else service_completer(config)


async def _model_of(options: BatchOptions) -> str:
    """Returns the identity of the servers' model."""
    async with remote_completer(options) as completer:
        return f"{completer.model} (servers)"


def _identity(model_dir: pathlib.Path) -> str:
    try:
        return model_identity(model_dir)
    except OSError as error:
        raise BatchError(f"{error.filename or model_dir}: {error.strerror}") from error


def _config() -> ServerConfig:
    """Returns a server's configuration; those of its socket are not used."""
    options = cli.make(ServerOptions, cli.given(ServiceOptions))
    return ServerConfig(
        model_dir=model_dir(options),
        model_names=model_names(options),
        options=options,
        engine=cli.read(EngineOptions),
        notify=_print,
    )


def _run(staged: StagedBatch, journal: Journal, make: Callable[[], _Completer]) -> int:
    total = journal.source.lines
    if journal.answered == total:
        _print(f"all {total} lines are answered already")
        return _finish(staged, journal)
    if journal.answered:
        _print(f"resuming: {journal.answered} of {total} lines are answered already")
    so_far = "{} of {} lines are answered; run the same command to continue"
    try:
        progress, received = uvloop.run(_serve(staged.lines, journal, make))
    except BatchError:
        _print(so_far.format(journal.answered, total))
        raise
    if received is not None:
        _print(f"interrupted by {received.name}: {so_far.format(journal.answered, total)}")
        return 128 + received
    done = progress.succeeded + progress.failed
    _print(
        f"answered {done} lines in {progress.seconds:.1f} s; "
        f"{progress.output_tokens} tokens, {progress.tokens_per_s:,.0f} tokens/s"
    )
    return _finish(staged, journal)


def _finish(staged: StagedBatch, journal: Journal) -> int:
    """Writes the output and logs the errors in it, those of earlier runs included."""
    staged.finish()
    if journal.failed:
        _print(f"{journal.failed} of {journal.answered} lines have errors:")
        for failure in journal.failures:
            _print(f"  {failure}")
        if (more := journal.failed - len(journal.failures)) > 0:
            _print(f"  and {more} more")
    return 1 if journal.failed and journal.failed == journal.answered else 0


async def _serve(
    source: pathlib.Path, journal: Journal, make: Callable[[], _Completer]
) -> tuple[BatchProgress, signal.Signals | None]:
    """Runs the batch until it is done or a signal arrives; a second signal ends the process at once."""
    received: list[signal.Signals] = []
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def stop(number: signal.Signals) -> None:
        received.append(number)
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    progress = BatchProgress(total=journal.source.lines, resumed=journal.answered)
    # The signal may come while the model is loading.
    with contextlib.suppress(asyncio.CancelledError):
        async with make() as completer:
            with progress_display(Console(stderr=True)) as show:
                sorts = isinstance(completer, RemoteCompleter)
                progress = await run(source, journal, completer, sorts=sorts, on_progress=show)
    return progress, received[0] if received else None


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    flags.run(main, positional="INPUT OUTPUT")
