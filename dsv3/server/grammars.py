"""Compiles the grammars of constrained requests in a worker process, before the engine gets them, and caches them.

`GrammarPool` runs in the API server, `python -m dsv3.server.grammars` (this file) is the worker. It compiles with the
engine's limits, so that a grammar which takes too much time or memory fails there and not in the engine.
"""

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from dsv3.processes import frames
from dsv3.scheduler.request import RequestRules
from dsv3.server.limits import WAIT_S, WorkerQueue
from dsv3.server.worker_process import PoisonRequest, WorkerProcess, WorkerReply, serve_requests
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


class GrammarSetup(msgspec.Struct, frozen=True):
    """First message to the worker: the arguments of `GrammarVocabulary`, the tokenizer as a path.

    Each later message is the `AnswerConstraints` of an answer.

    `dialect` is the format of the model's tool calls, "" for none; `marker_ids` are its markers that are tokens.
    """

    tokenizer: str
    vocab_size: int
    end_ids: tuple[int, ...]
    dialect: str
    marker_ids: dict[str, int]


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
        self._cache: OrderedDict[bytes, tuple[WorkerReply, float]] = OrderedDict()  # valid until a time of `monotonic`
        self._num_chars = 0

    async def compile(self, wanted: AnswerConstraints, rules: RequestRules) -> str:
        """Returns the grammar of an answer for an engine with these rules.

        Raises GrammarError if it cannot be compiled, VocabularyError if no grammar can; WorkersBusy and WorkerDied if a
        retry may succeed.
        """
        try:
            frame = frames.encode(wanted)
        except (OverflowError, ValueError, TypeError, RecursionError, frames.FrameError):
            raise GrammarError("it contains a value that cannot be encoded as a grammar") from None
        key = hashlib.sha256(frame).digest()
        if (reply := self._cached(key)) is None:
            reply = await self._workers.run(len(frame), lambda pool: pool._compile(key, frame, rules))
        if reply.error is not None:
            raise GrammarError(reply.error)
        return reply.text

    async def close(self) -> None:
        await self._workers.close()
        if self._worker is not None:
            await self._worker.stop()

    def _cached(self, key: bytes) -> WorkerReply | None:
        """Returns a cached result, which becomes the most recently used one; None where there is none."""
        reply, until = self._cache.get(key, (None, 0.0))
        if reply is None or until < time.monotonic():
            return None
        self._cache.move_to_end(key)
        return reply

    def _store(self, key: bytes, reply: WorkerReply, until: float) -> None:
        """Caches a result until a time of `monotonic`, and evicts the least recently used ones."""
        old, _ = self._cache.pop(key, (WorkerReply(), 0.0))
        self._cache[key] = reply, until
        self._num_chars += len(reply.text) - len(old.text)
        while len(self._cache) > MAX_CACHED or self._num_chars > MAX_CACHED_CHARS:
            self._num_chars -= len(self._cache.popitem(last=False)[1][0].text)

    async def _compile(self, key: bytes, frame: bytearray, rules: RequestRules) -> WorkerReply:
        """Returns the worker's result, or that of an equal request that was before this one in the queue.

        It is cached, though its client may have gone; that of a timeout or crash for `FAILURE_TTL_S`.
        """
        if (found := self._cached(key)) is not None:
            return found
        if self._worker is None:
            vocabulary = str(self._tokenizer), rules.vocab_size, rules.eos_token_ids
            setup = frames.encode(GrammarSetup(*vocabulary, self._dialect, self._marker_ids))
            self._worker = WorkerProcess(
                "dsv3.server.grammars", "compiles grammars", setup, self._deadline_s, VocabularyError
            )
        until = math.inf
        try:
            reply = await self._worker.call(frame)
        except (TimeoutError, PoisonRequest) as error:
            text = "cannot be compiled: it needs too much memory"
            if isinstance(error, TimeoutError):
                text = f"takes longer than {self._deadline_s:g} s to compile; make it smaller"
            reply, until = WorkerReply(error=text), time.monotonic() + FAILURE_TTL_S
        self._store(key, reply, until)
        return reply


def _make_compiler(body: bytes) -> Callable[[bytes], str]:
    """Returns the worker's compiler for the vocabulary of a `GrammarSetup`; raises VocabularyError and OSError."""
    setup = msgspec.msgpack.decode(body, type=GrammarSetup)
    vocabulary = GrammarVocabulary.from_file(Path(setup.tokenizer), setup.vocab_size, setup.end_ids)
    requests = msgspec.msgpack.Decoder(AnswerConstraints)

    def compile_grammar(body: bytes) -> str:
        grammar = answer_grammar(requests.decode(body), DIALECTS.get(setup.dialect), setup.marker_ids.get)
        vocabulary.compile(grammar)
        return grammar

    return compile_grammar


def _explain(error: Exception) -> str:
    match error:
        case ValueError() | OSError():  # including GrammarError and VocabularyError
            return str(error)
        case MemoryError() | RecursionError():
            return "too large, or nested too deeply, for a grammar; make it smaller"
    return f"cannot be compiled to a grammar ({type(error).__name__})"


if __name__ == "__main__":
    serve_requests(_make_compiler, _explain, _MAX_MEMORY_BYTES)
