"""Compiles the grammars of constrained requests in a worker process, before the engine gets them, and caches them.

`GrammarPool` runs in the API server, `python -m dsv3.server.grammars` (this file) is the worker. It compiles with the
engine's limits, so that a grammar which takes too much time or memory fails there and not in the engine.
"""

import dataclasses
import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dsv3.processes import frames
from dsv3.scheduler.request import RequestRules
from dsv3.server.limits import WAIT_S, WorkerQueue
from dsv3.server.worker_process import PoisonRequest, WorkerProcess, serve_requests
from dsv3.text.call_grammar import AnswerConstraints, answer_grammar
from dsv3.text.dialects import DIALECTS
from dsv3.text.matcher import GrammarError, GrammarVocabulary, VocabularyError

# llguidance builds the largest public schemas in under a second.
DEADLINE_S = 5.0
MAX_CACHED = 1024
MAX_CACHED_CHARS = 2**25
# How long a timeout or crash is cached: it may be due to the load of the machine.
FAILURE_TTL_S = 60.0
# Bounds the address space, of which threads reserve more than they use.
_MAX_MEMORY_BYTES = 4 * 2**30


class GrammarSetup(msgspec.Struct, frozen=True, tag=True):
    """First message to the worker: the arguments of `GrammarVocabulary`, the tokenizer as a path.

    `dialect` is the format of the model's tool calls, "" for none; `marker_ids` are its markers that are tokens.
    """

    tokenizer: str
    vocab_size: int
    end_ids: tuple[int, ...]
    dialect: str
    marker_ids: dict[str, int]


class CompileGrammar(msgspec.Struct, frozen=True, tag=True):
    """Generate and compile the grammar of an answer."""

    wanted: AnswerConstraints


class CompiledGrammar(msgspec.Struct, frozen=True, tag=True):
    """The response: the grammar, or the `error` of the grammar or of the vocabulary."""

    grammar: str = ""
    error: str | None = None


_to_process = msgspec.msgpack.Decoder(GrammarSetup | CompileGrammar)
_from_process = msgspec.msgpack.Decoder(CompiledGrammar)


@dataclasses.dataclass(frozen=True)
class _CachedResult:
    """A cached response, valid `until` a time of `time.monotonic`."""

    result: CompiledGrammar
    until: float = float("inf")


class GrammarPool:
    """One worker process that generates and compiles grammars for the `tokenizer.json` at a path, started on first use.

    Clients' schemas are processed only there, since the time is not linear in their size. `dialect` is the format of
    the model's tool calls, `marker_ids` are its markers that are tokens. A request waits at most `wait_s`.
    """

    def __init__(
        self,
        tokenizer: Path,
        wait_s: float | None = WAIT_S,
        deadline_s: float = DEADLINE_S,
        dialect: str | None = None,
        marker_ids: Mapping[str, int] | None = None,
    ):
        self._tokenizer, self._deadline_s = tokenizer, deadline_s
        self._dialect, self._marker_ids = dialect or "", dict(marker_ids or {})
        self._worker: WorkerProcess | None = None
        self._workers = WorkerQueue([self], wait_s)
        self._cache: OrderedDict[bytes, _CachedResult] = OrderedDict()
        self._num_chars = 0

    async def compile(self, wanted: AnswerConstraints, rules: RequestRules) -> str:
        """Returns the grammar of an answer for an engine with these rules.

        Raises GrammarError if it cannot be compiled, VocabularyError if no grammar can; WorkersBusy and WorkerDied if a
        retry may succeed.
        """
        try:
            frame = frames.encode(CompileGrammar(wanted))
        except (OverflowError, ValueError, TypeError, RecursionError, frames.FrameError):
            raise GrammarError("it contains a value that cannot be encoded as a grammar") from None
        key = hashlib.sha256(frame).digest()
        cached = self._cache.get(key)
        if cached is None or cached.until < time.monotonic():
            cached = await self._workers.run(len(frame), lambda pool: pool._compile(frame, rules))
        self._store(key, cached)
        if cached.result.error is not None:
            raise GrammarError(cached.result.error)
        return cached.result.grammar

    async def close(self) -> None:
        await self._workers.close()
        if self._worker is not None:
            await self._worker.stop()

    def _store(self, key: bytes, cached: _CachedResult) -> None:
        """Caches a result as the most recently used one, and evicts the least recently used ones."""
        if (old := self._cache.pop(key, None)) is not None:
            self._num_chars -= len(old.result.grammar)
        self._cache[key] = cached
        self._num_chars += len(cached.result.grammar)
        while len(self._cache) > MAX_CACHED or self._num_chars > MAX_CACHED_CHARS:
            self._num_chars -= len(self._cache.popitem(last=False)[1].result.grammar)

    async def _compile(self, frame: bytearray, rules: RequestRules) -> _CachedResult:
        """Returns the worker's result; a timeout or crash is cached for `FAILURE_TTL_S`."""
        if self._worker is None:
            vocabulary = str(self._tokenizer), rules.vocab_size, rules.eos_token_ids
            setup = frames.encode(GrammarSetup(*vocabulary, self._dialect, self._marker_ids))
            deadline_s = self._deadline_s
            self._worker = WorkerProcess(
                "dsv3.server.grammars", "compiles grammars", setup, deadline_s, _raise_if_invalid
            )
        await self._worker.start()
        try:
            return _CachedResult(_from_process.decode(await self._worker.call(frame)))
        except TimeoutError:
            error = f"takes longer than {self._deadline_s:g} s to compile; make it smaller"
        except PoisonRequest:
            error = "cannot be compiled: it needs too much memory"
        return _CachedResult(CompiledGrammar(error=error), time.monotonic() + FAILURE_TTL_S)


def _raise_if_invalid(body: bytes) -> None:
    """Raises VocabularyError if grammars cannot use the vocabulary."""
    if (error := _from_process.decode(body).error) is not None:
        raise VocabularyError(error)


class _GrammarCompiler:
    """The worker's side: compiles grammars for one vocabulary."""

    def __init__(self) -> None:
        self._setup: GrammarSetup | None = None
        self._vocabulary: GrammarVocabulary | None = None

    def handle(self, body: bytes) -> bytearray:
        try:
            return frames.encode(CompiledGrammar(self._compile(_to_process.decode(body))))
        except (ValueError, OSError) as problem:  # including GrammarError and VocabularyError
            error = str(problem)
        except (MemoryError, RecursionError):
            error = "too large, or nested too deeply, for a grammar; make it smaller"
        except Exception as problem:
            error = f"cannot be compiled to a grammar ({type(problem).__name__})"
        return frames.encode(CompiledGrammar(error=error))

    def _compile(self, message: GrammarSetup | CompileGrammar) -> str:
        if isinstance(message, GrammarSetup):
            self._setup = message
            self._vocabulary = GrammarVocabulary.from_file(Path(message.tokenizer), message.vocab_size, message.end_ids)
            return ""
        assert self._setup is not None and self._vocabulary is not None  # by the first message
        grammar = answer_grammar(message.wanted, DIALECTS.get(self._setup.dialect), self._setup.marker_ids.get)
        self._vocabulary.compile(grammar)
        return grammar


if __name__ == "__main__":
    serve_requests(_GrammarCompiler().handle, _MAX_MEMORY_BYTES)
