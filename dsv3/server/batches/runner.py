"""Runs the batches that clients have created, in API server 0, at a lower priority than all other requests.

One batch per tenant runs at a time, of up to four tenants; together they send the engine at most twice the lines that
it runs. Each answer is written to a journal (`dsv3.batch.journal`) before the next is looked at, so the server may be
killed at any moment: the next one continues with the unanswered lines. A file's lines are validated before its batch
starts; the answers are split into output and errors when it ends.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec

from dsv3.batch.formats import open_private
from dsv3.batch.journal import (
    SYNC_SECONDS,
    BadLine,
    BatchError,
    Journal,
    LineParser,
    RequestLine,
    answered_number,
    bad_line,
    model_identity,
    numbered_lines,
    parse_failure,
    summarize_input,
)
from dsv3.batch.run import BatchProgress, run
from dsv3.scheduler.request import BATCH_PRIORITY
from dsv3.server.batches.completer import ServiceCompleter
from dsv3.server.batches.store import (
    ENDED,
    MAX_LINES,
    Batch,
    BatchStore,
    Errors,
    LineError,
    NotFound,
    RequestCounts,
    Status,
    new_file_id,
)
from dsv3.server.serving.service import Service

MAX_TENANTS_AT_ONCE = 4
_POLL_S = 0.25
_SWEEP_S = 60.0
_RETRY_S = 30.0  # after an error of the disk
_log = logging.getLogger("dsv3.batches")
_replace = msgspec.structs.replace
_DELETED = LineError("file_not_found", "the input file was deleted", "input_file_id")


@contextlib.asynccontextmanager
async def running_batches(service: Service, directory: str | None, model_dir: Path) -> AsyncIterator[None]:
    """Runs the batches of a directory, if there is one, until the end of the `async with`.

    Raises ValueError where another server uses the directory or it cannot be made.
    """
    if directory is None:
        yield
        return
    try:
        store = BatchStore(Path(directory))
    except OSError as error:
        raise ValueError(f"batch_dir: {directory}: {error.strerror}") from None
    with store.lock():
        task = asyncio.create_task(Runner(service, store, model_dir).run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


class Runner:
    """Runs all open batches of `store` until cancelled."""

    def __init__(self, service: Service, store: BatchStore, model_dir: Path):
        self._service, self._store, self._model_dir = service, store, model_dir
        self._running: dict[str, asyncio.Task[None]] = {}
        self._pauses: dict[str, float] = {}  # failed batches, and when to retry them
        self._permits = asyncio.Semaphore(1)
        self._swept = -math.inf
        self._model = ""

    async def run(self) -> None:
        """Polls for open batches; when cancelled, it aborts the lines in flight."""
        await self._service.engine.settled.wait()
        self._permits = asyncio.Semaphore(ServiceCompleter(self._service).concurrency)
        try:
            while self._service.status in ("ok", "restarting"):
                pause_s = _POLL_S
                try:
                    if not self._model:
                        self._model = await asyncio.to_thread(self._begin)
                    await self._sweep()
                    await self._start_batches()
                except OSError as error:
                    _log.error("%s: %s", error.filename or self._store.directory, error.strerror)
                    pause_s = _RETRY_S
                except Exception:
                    _log.exception("%s: batches are paused for %g s", self._store.directory, _RETRY_S)
                    pause_s = _RETRY_S
                await asyncio.sleep(pause_s)
        finally:
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> str:
        """Returns the model's identity, computed once: files that change later are not being served."""
        self._store.mark_open()
        return model_identity(self._model_dir, self._service.config.model_names[0])

    async def _sweep(self) -> None:
        """Deletes unfinished files of killed API servers, once a minute."""
        now = asyncio.get_running_loop().time()
        if now - self._swept > _SWEEP_S:
            self._swept = now
            await asyncio.to_thread(self._store.sweep)

    async def _start_batches(self) -> None:
        self._running = {tenant: task for tenant, task in self._running.items() if not task.done()}
        if len(self._running) >= MAX_TENANTS_AT_ONCE:
            return
        now = asyncio.get_running_loop().time()
        self._pauses = {batch_id: until for batch_id, until in self._pauses.items() if until > now}
        for tenant, batch_id in await asyncio.to_thread(self._store.open_batches):
            is_free = tenant not in self._running and batch_id not in self._pauses
            if is_free and len(self._running) < MAX_TENANTS_AT_ONCE:
                self._running[tenant] = asyncio.create_task(self._run_batch(tenant, batch_id))

    async def _run_batch(self, tenant: str, batch_id: str) -> None:
        """Runs one batch; one that an engine failure stops is retried later, or by the next server."""
        try:
            await _OneBatch(self._service, self._store, tenant, batch_id, self._permits, self._model).run()
            return
        except NotFound:
            pass  # its record is unreadable: the store has logged why
        except BatchError as error:
            _log.warning("batch %s is retried in %g s: %s", batch_id, _RETRY_S, error)
        except OSError as error:
            _log.error("batch %s is retried in %g s: %s", batch_id, _RETRY_S, error.strerror)
        except Exception:
            _log.exception("batch %s failed; it is retried in %g s", batch_id, _RETRY_S)
        self._pauses[batch_id] = asyncio.get_running_loop().time() + _RETRY_S


class _OneBatch:
    """One batch and its state machine; steps that an earlier server has done are not repeated."""

    def __init__(
        self, service: Service, store: BatchStore, tenant: str, batch_id: str, permits: asyncio.Semaphore, model: str
    ):
        self._service, self._store, self._tenant, self._id = service, store, tenant, batch_id
        self._permits, self._model = permits, model
        self._record = store.record(tenant, batch_id)

    @property
    def _batch(self) -> Batch:
        return self._record.batch

    async def run(self) -> None:
        """Continues from the state on disk."""
        if self._batch.status == "validating":
            await self._validate()
        if self._batch.status == "in_progress":
            await self._answer()
        if self._batch.status == "finalizing":
            await asyncio.to_thread(self._finalize)
        if self._batch.status in ENDED:
            await asyncio.to_thread(self._clean_up)

    async def _validate(self) -> None:
        """Validates the input, unless the batch is cancelled or expired."""
        if (early := self._early_end()) is not None:
            await self._end_as(early)
            return
        try:
            path = self._store.content(self._tenant, self._batch.input_file_id)
        except NotFound:
            found = [_DELETED]
        else:
            found = await asyncio.to_thread(validate_input, path, self._batch.endpoint)
        if found:
            await self._fail(*found)
        else:
            await self._save(status="in_progress", in_progress_at=self._store.now())

    async def _fail(self, *errors: LineError) -> None:
        await self._save(status="failed", failed_at=self._store.now(), errors=Errors(errors))

    async def _answer(self) -> None:
        """Answers the lines until all are answered, or the batch is cancelled or expires."""
        try:
            path = self._store.content(self._tenant, self._batch.input_file_id)
        except NotFound:  # an API server has deleted it while another one made a batch of it
            await self._fail(_DELETED)
            return
        answers = self._store.answers(self._tenant, self._id)
        summary = await asyncio.to_thread(summarize_input, path)
        try:
            journal = await asyncio.to_thread(Journal.open, answers, summary, self._model, math.inf)
        except BatchError as error:  # mostly another model: later servers would refuse it too
            await self._fail(LineError("not_resumable", str(error)))
            return
        try:
            before = RequestCounts(summary.lines, journal.answered - journal.failed, journal.failed)
            await self._save(request_counts=before)
            early = self._early_end() or await self._work(path, journal, summary.lines)
        finally:
            journal.close()
        await self._end_as(early or "completed")

    async def _work(self, path: Path, journal: Journal, total: int) -> Status | None:
        """Answers lines until all are done (returns None), or returns the status of a batch that ends early."""
        now = BatchProgress(total)
        before = self._batch.request_counts

        def on_progress(progress: BatchProgress) -> None:
            now.succeeded, now.failed = progress.succeeded, progress.failed

        tenant = next((each for each in self._service.tenants.all if each.name == self._tenant), None)
        completer = ServiceCompleter(self._service, tenant, BATCH_PRIORITY, self._permits)
        work = asyncio.create_task(run(path, journal, completer, on_progress=on_progress))
        synced = saved = asyncio.get_running_loop().time()
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=_POLL_S)
                if (early := self._early_end()) is not None:
                    return early
                if (at := asyncio.get_running_loop().time()) - synced > SYNC_SECONDS:
                    synced = at
                    await asyncio.to_thread(journal.sync)
                if at - saved > 1.0:
                    saved = at
                    completed, failed = before.completed + now.succeeded, before.failed + now.failed
                    await self._save(request_counts=_replace(before, completed=completed, failed=failed))
            work.result()
            return None
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def _early_end(self) -> Status | None:
        if self._store.cancelled_at(self._id) is not None:
            return "cancelled"
        return "expired" if self._store.now() >= self._batch.expires_at else None

    async def _end_as(self, status: Status) -> None:
        """Saves the status "finalizing" and the ids of the files to be made."""
        record = _replace(self._record, ends_as=status, output_id=new_file_id(), error_id=new_file_id())
        self._record = record
        fields: dict[str, Any] = {"status": "finalizing", "finalizing_at": self._store.now()}
        if (at := self._store.cancelled_at(self._id)) is not None and status == "cancelled":
            fields["cancelling_at"] = at
        await self._save(**fields)

    def _finalize(self) -> None:
        """Makes the files and ends the batch; overwrites files of an attempt that was killed."""
        record, store, tenant = self._record, self._store, self._tenant
        assert record.ends_as is not None and record.output_id is not None and record.error_id is not None
        answers = store.answers(tenant, self._id)
        output, errors = store.scratch(tenant, record.output_id), store.scratch(tenant, record.error_id)
        num_answers, num_errors = sort_answers(answers, output, errors)
        if record.ends_as == "expired":
            with contextlib.suppress(NotFound):
                num_errors += append_expired(store.content(tenant, self._batch.input_file_id), answers, errors)
        files: dict[str, str | None] = {"output_file_id": None, "error_file_id": None}
        for field, count, path, file_id in (
            ("output_file_id", num_answers, output, record.output_id),
            ("error_file_id", num_errors, errors, record.error_id),
        ):
            if count:
                store.add_file(tenant, path, f"{self._id}_{field.removesuffix('_file_id')}.jsonl", file_id)
                files[field] = file_id
            else:
                path.unlink()
        total = max(self._batch.request_counts.total, num_answers + num_errors)
        counts = RequestCounts(total, num_answers, num_errors)
        times = {f"{record.ends_as}_at": store.now()}
        batch = _replace(self._batch, status=record.ends_as, request_counts=counts, **times, **files)
        self._record = _replace(record, batch=batch)
        store.save(tenant, self._record)

    def _clean_up(self) -> None:
        self._store.drop_answers(self._tenant, self._id)
        self._store.close_batch(self._id)

    async def _save(self, **fields: Any) -> None:
        self._record = _replace(self._record, batch=_replace(self._batch, **fields))
        await asyncio.to_thread(self._store.save, self._tenant, self._record)


_MAX_ERRORS = 100
EXPIRED = "batch_expired"
_EXPIRED_TEXT = "the batch's completion window ended before this line was answered"


def validate_input(path: Path, endpoint: str) -> list[LineError]:
    """Returns up to 100 errors of an input for `endpoint`; any error refuses the file, as OpenAI does."""
    found: list[LineError] = []
    number = count = 0
    for number, line in _lines(path):
        count += 1
        if isinstance(line, BadLine):
            found.append(LineError(line.code, line.message, line=number))
        elif line.url != endpoint:
            text = f"the batch is for {endpoint}, this line for {line.url}"
            found.append(LineError("mismatched_url", text, "url", number))
        if len(found) == _MAX_ERRORS:
            break
        if count > MAX_LINES:
            return [LineError("too_many_lines", f"more than {MAX_LINES} lines", line=number)]
    return found if count else [LineError("empty_file", "the file has no lines")]


def _lines(path: Path) -> Iterator[tuple[int, RequestLine | BadLine]]:
    parser = LineParser()
    with path.open("rb") as file:
        for number, raw in numbered_lines(file):
            yield number, parser.parse(number, raw)


def sort_answers(answers: Path, output: Path, errors: Path) -> tuple[int, int]:
    """Splits the answers: status 200 to `output`, the others to `errors`; returns how many went to each."""
    written = [0, 0]
    with open(output, "wb", opener=open_private) as good, open(errors, "wb", opener=open_private) as bad:
        if answers.exists():
            with answers.open("rb") as file:
                for line in file:
                    is_bad = parse_failure(line) is not None
                    written[is_bad] += 1
                    (bad if is_bad else good).write(line)
    return written[0], written[1]


def append_expired(source: Path, answers: Path, errors: Path) -> int:
    """Appends an error for each unanswered line; returns how many there are."""
    done = set()
    if answers.exists():
        with answers.open("rb") as file:
            done = {answered_number(line) for line in file}
    count = 0
    with errors.open("ab") as bad:
        for number, line in _lines(source):
            if number not in done:
                bad.write(bad_line(BadLine(number, line.custom_id, EXPIRED, _EXPIRED_TEXT)))
                count += 1
    return count
