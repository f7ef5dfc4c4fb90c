"""A profile of steps as a Chrome trace for ui.perfetto.dev: what the host did, and when the devices had work.

Times are whole microseconds, and a span's length is what lies between its rounded ends. A span that ended a rounding
later than the one around it would overlap it, and Perfetto leaves such spans out. Fractions it cuts off after a product
in floats.
"""

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dsv3.engine.look import StepNote

_HOST, _DEVICES = 1, 2
_NAMES = {_HOST: "host", _DEVICES: "devices (at most: from launch, or the results before, to the results)"}


def write_trace(steps: Sequence[StepNote], path: Path) -> int:
    """Writes the trace as gzipped JSON; returns its size in bytes. Raises OSError, FileExistsError among them."""
    content = gzip.compress(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": list(events_of(steps))}))
    with path.open("xb") as file:
        return file.write(content)


def events_of(steps: Sequence[StepNote]) -> Iterator[dict[str, Any]]:
    """Yields the events: spans of the host and of the devices, and counters of requests. Times are microseconds."""
    for thread, name in _NAMES.items():
        yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": name}}
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "dsv3 engine"}}
    if not steps:
        return
    start = steps[0].began
    for note in steps:
        yield from _of_host(note, start)
        counts = {"running": note.running, "waiting": note.waiting}
        yield {"ph": "C", "pid": 1, "name": "requests", "ts": _us(note.ended - start), "args": counts}
    yield from _of_devices(steps, start)


def _of_host(note: StepNote, start: float) -> Iterator[dict[str, Any]]:
    """Yields the step, and its parts inside it."""
    about = {"launched step": note.launched, "took results of step": note.collected}
    about |= {job.kind: job.amount for job in note.jobs}
    yield _span(_HOST, f"step {note.launched or note.collected}", note.began - start, note.ended - start, about)
    began = note.began
    for part in note.parts:
        yield _span(_HOST, part.what, began - start, part.at - start)
        began = part.at


def _of_devices(steps: Sequence[StepNote], start: float) -> Iterator[dict[str, Any]]:
    """Yields for each step the time in which its jobs, and no others, were on the devices or before them."""
    launched = {note.launched: (at, note) for note in steps if (at := _at(note, "launch")) is not None}
    free = start
    for note in steps:
        done, (begun, cause) = _last(note, "wait"), launched.get(note.collected, (None, note))
        if begun is None or done is None:
            continue
        about = {job.kind: job.amount for job in cause.jobs}
        kinds = " + ".join(dict.fromkeys(job.kind for job in cause.jobs))
        yield _span(_DEVICES, kinds, max(begun, free) - start, done - start, {"step": note.collected} | about)
        free = done


def _at(note: StepNote, what: str) -> float | None:
    return next((part.at for part in note.parts if part.what == what), None)


def _last(note: StepNote, what: str) -> float | None:
    """Returns when the last such part ended; a step that was launched in two parts is waited for twice."""
    return next((part.at for part in reversed(note.parts) if part.what == what), None)


def _span(thread: int, name: str, start: float, end: float, about: dict[str, int] | None = None) -> dict[str, Any]:
    begins, ends = _us(start), _us(end)
    span = {"ph": "X", "pid": 1, "tid": thread, "name": name, "ts": begins, "dur": ends - begins}
    return span if about is None else span | {"args": about}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
