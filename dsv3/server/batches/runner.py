"""Runs the batches that clients have created, in the first front, as work that gives way to everybody else's.

The batches of one tenant run one after another, those of up to four tenants at the same time; together they send the
engine no more lines than fill it twice. Each answer is in a journal (`dsv3.batch.journal`) before the next is looked
at, so the server may be killed at any moment: the next one goes on with what is not answered. A file's lines are
checked before its batch begins; the answers are sorted into output and errors when it ends.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec

from dsv3.batch.journal import (
    SYNC_SECONDS,
    BadLine,
    BatchError,
    Journal,
    LineParser,
    RequestLine,
    answered_number,
    bad_line,
    failure_of,
    model_identity,
    numbered_lines,
    summarize_input,
)
from dsv3.batch.run import BatchProgress, run
from dsv3.scheduler.request import BATCH_PRIORITY
from dsv3.server.batches.completer import ServerCompleter
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
    private,
)
from dsv3.server.serving.service import Service
from dsv3.server.tenants import Tenant

MAX_TENANTS_AT_ONCE = 4
_POLL_S = 0.25
_SWEEP_S = 60.0
_RETRY_S = 30.0  # after an error of the disk
_log = logging.getLogger("dsv3.batches")
_replace = msgspec.structs.replace
_DELETED = LineError("file_not_found", "the input file was deleted", "input_file_id")


@contextlib.asynccontextmanager
async def running_batches(service: Service, directory: str | None, model_dir: Path) -> AsyncIterator[None]:
    """Runs the batches in a directory for the time of the `async with`, if there is one.

    Raises ValueError where another server uses it or it cannot be made.
    """
    if directory is None:
        yield
        return
    try:
        store = BatchStore(Path(directory))
    except OSError as error:
        raise ValueError(f"batch_dir: {directory}: {error.strerror}") from None
    with store.locked():
        task = asyncio.create_task(Runner(service, store, model_dir).run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


class Runner:
    """Takes up whatever is open in `store`, until it is cancelled."""

    def __init__(self, service: Service, store: BatchStore, model_dir: Path):
        self._service, self._store, self._model_dir = service, store, model_dir
        self._running: dict[str, asyncio.Task[None]] = {}
        self._pauses: dict[str, float] = {}  # batches that failed, and until when the tenant's others have their turn
        self._permits = asyncio.Semaphore(1)
        self._swept = -math.inf
        self._model = ""

    async def run(self) -> None:
        """Looks for open batches again and again; a cancelled one gives up the lines that are being answered."""
        await self._service.engine.settled.wait()
        self._permits = asyncio.Semaphore(self._num_lines())
        try:
            while self._service.status in ("ok", "restarting"):
                pause_s = _POLL_S
                try:
                    if not self._model:
                        self._model = await asyncio.to_thread(self._begin)
                    await self._sweep()
                    await self._snapshot()
                except OSError as error:
                    _log.error("%s: %s", error.filename or self._store.directory, error.strerror)
                    pause_s = _RETRY_S
                except Exception:
                    _log.exception("%s: batches go on later", self._store.directory)
                    pause_s = _RETRY_S
                await asyncio.sleep(pause_s)
        finally:
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> str:
        """Names the model whose answers may be gathered together, once: files that change later are not served yet."""
        self._store.mark_open()
        return model_identity(self._model_dir, self._service.config.model_names[0])

    def _num_lines(self) -> int:
        """Returns how many lines are answered at a time: as many as run, and as many that wait for their slots."""
        info = self._service.engine.info
        return 1 if info is None else 2 * info.max_num_seqs

    async def _sweep(self) -> None:
        """Deletes from time to time what fronts that were killed have left."""
        now = asyncio.get_running_loop().time()
        if now - self._swept > _SWEEP_S:
            self._swept = now
            await asyncio.to_thread(self._store.sweep)

    async def _snapshot(self) -> None:
        self._running = {tenant: task for tenant, task in self._running.items() if not task.done()}
        if len(self._running) >= MAX_TENANTS_AT_ONCE:
            return
        now = asyncio.get_running_loop().time()
        self._pauses = {batch_id: until for batch_id, until in self._pauses.items() if until > now}
        for tenant, batch_id in await asyncio.to_thread(self._store.open_batches):
            is_free = tenant not in self._running and batch_id not in self._pauses
            if is_free and len(self._running) < MAX_TENANTS_AT_ONCE:
                self._running[tenant] = asyncio.create_task(self._take(tenant, batch_id))

    async def _take(self, tenant: str, batch_id: str) -> None:
        """Runs one batch to its end, or as far as it goes now; an engine that stops leaves it to the next server."""
        try:
            await _OneBatch(self._service, self._store, tenant, batch_id, self._permits, self._model).run()
            return
        except NotFound:
            pass  # its record cannot be read: the store has logged why
        except BatchError as error:
            _log.warning("batch %s goes on later: %s", batch_id, error)
        except OSError as error:
            _log.error("batch %s goes on later: %s", batch_id, error.strerror)
        except Exception:
            _log.exception("batch %s failed", batch_id)
        self._pauses[batch_id] = asyncio.get_running_loop().time() + _RETRY_S


class _OneBatch:
    """One batch on its way from state to state; whatever the last server has done is not done again."""

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
        """Goes on from the state that is on the disk."""
        if self._batch.status == "validating":
            await self._validate()
        if self._batch.status == "in_progress":
            await self._answer()
        if self._batch.status == "finalizing":
            await asyncio.to_thread(self._finalize)
        if self._batch.status in ENDED:
            await asyncio.to_thread(self._clean_up)

    async def _validate(self) -> None:
        """Checks the input; a cancelled or expired batch is not begun."""
        if (early := self._asked_to_end()) is not None:
            await self._end_as(early)
            return
        try:
            path = self._store.content(self._tenant, self._batch.input_file_id)
        except NotFound:
            found = [_DELETED]
        else:
            found = await asyncio.to_thread(problems, path, self._batch.endpoint)
        if found:
            await self._fail(*found)
        else:
            await self._save(status="in_progress", in_progress_at=self._store.now())

    async def _fail(self, *errors: LineError) -> None:
        await self._save(status="failed", failed_at=self._store.now(), errors=Errors(errors))

    async def _answer(self) -> None:
        """Answers all lines, or as many as there is time for."""
        try:
            path = self._store.content(self._tenant, self._batch.input_file_id)
        except NotFound:  # one front has deleted it while another one made a batch of it
            await self._fail(_DELETED)
            return
        answers = self._store.answers(self._tenant, self._id)
        summary = await asyncio.to_thread(summarize_input, path)
        try:
            journal = await asyncio.to_thread(Journal.open, answers, summary, self._model, math.inf)
        except BatchError as error:  # another model, above all: no later server would take it either
            await self._fail(LineError("not_resumable", str(error)))
            return
        try:
            before = RequestCounts(summary.lines, journal.answered - journal.failed, journal.failed)
            await self._save(request_counts=before)
            early = self._asked_to_end() or await self._work(path, journal, summary.lines)
        finally:
            journal.close()
        await self._end_as(early or "completed")

    async def _work(self, path: Path, journal: Journal, total: int) -> Status | None:
        """Moves lines until all are answered; returns the state of a batch that ends before."""
        now = BatchProgress(total)
        before = self._batch.request_counts

        def note(progress: BatchProgress) -> None:
            now.succeeded, now.failed = progress.succeeded, progress.failed

        completer = ServerCompleter(self._service, self._find_tenant(), BATCH_PRIORITY, self._permits)
        work = asyncio.create_task(
            run(path, journal, completer, concurrency=2 * self._max_num_seqs, total=total, on_progress=note)
        )
        synced = saved = asyncio.get_running_loop().time()
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=_POLL_S)
                if (early := self._asked_to_end()) is not None:
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

    @property
    def _max_num_seqs(self) -> int:
        info = self._service.engine.info
        return 1 if info is None else info.max_num_seqs

    def _find_tenant(self) -> Tenant | None:
        """Returns the tenant as it is now, so that its cached prefixes and counts are its own."""
        return next((tenant for tenant in self._service.tenants.all if tenant.name == self._tenant), None)

    def _asked_to_end(self) -> Status | None:
        if self._store.cancelled_at(self._id) is not None:
            return "cancelled"
        return "expired" if self._store.now() >= self._batch.expires_at else None

    async def _end_as(self, status: Status) -> None:
        """Begins to finalize, with the ids of the files that are about to be made."""
        record = _replace(self._record, ends_as=status, output_id=new_file_id(), error_id=new_file_id())
        self._record = record
        fields: dict[str, Any] = {"status": "finalizing", "finalizing_at": self._store.now()}
        if (at := self._store.cancelled_at(self._id)) is not None and status == "cancelled":
            fields["cancelling_at"] = at
        await self._save(**fields)

    def _finalize(self) -> None:
        """Makes the files and ends the batch. What a kill has left of an earlier attempt is written over."""
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
                store.add_output(tenant, path, file_id, f"{self._id}_{field.removesuffix('_file_id')}.jsonl")
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


def problems(path: Path, endpoint: str) -> list[LineError]:
    """Lists what keeps a file from being a batch for `endpoint`, up to 100 entries; OpenAI refuses it as a whole."""
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
    """Writes the answers with status 200 to one file and the others to another; returns how many went to each."""
    written = [0, 0]
    with open(output, "wb", opener=private) as good, open(errors, "wb", opener=private) as bad:
        if answers.exists():
            with answers.open("rb") as file:
                for line in file:
                    is_bad = failure_of(line) is not None
                    written[is_bad] += 1
                    (bad if is_bad else good).write(line)
    return written[0], written[1]


def append_expired(source: Path, answers: Path, errors: Path) -> int:
    """Writes an error for each line without an answer; returns how many there are."""
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
