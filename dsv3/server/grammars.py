"""Makes grammars for the event loop before the engine gets them, in a process that can be killed; remembers the last.

`GrammarPool` is the side of an API server. The process is this file too: `python -m dsv3.server.grammars`.
It writes grammars of what clients ask for, and compiles what the engine will compile, within the same limits. What
takes too long, or too much memory, or ends the process, does so there.
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
from dsv3.server.limits import WAIT_S, Workers
from dsv3.server.worker_process import PoisonRequest, WorkerProcess, answer_questions
from dsv3.text.call_grammar import Wanted, answer_grammar
from dsv3.text.dialects import DIALECTS
from dsv3.text.matcher import GrammarError, GrammarVocabulary, VocabularyError

# llguidance builds the largest public schemas in under a second.
DEADLINE_S = 5.0
MAX_REMEMBERED = 1024
MAX_REMEMBERED_CHARS = 2**25
# What a process has died of may be the machine's fault: its memory was full, or its processor slow.
DOUBT_S = 60.0
_DOES = "makes grammars"
# The vocabulary takes 0.1 GB at 129k tokens; threads reserve addresses beside what they use.
_MAX_MEMORY_BYTES = 4 * 2**30


class MakeSetup(msgspec.Struct, frozen=True, tag=True):
    """First message to the process: what a `GrammarVocabulary` is made of, the tokenizer as a path.

    `dialect` names that of the model's calls, "" for none; `marker_ids` has its markers that are tokens.
    """

    tokenizer: str
    vocab_size: int
    end_ids: tuple[int, ...]
    dialect: str
    marker_ids: dict[str, int]


class Make(msgspec.Struct, frozen=True, tag=True):
    """An answer whose grammar is to be written and compiled."""

    wanted: Wanted


class Made(msgspec.Struct, frozen=True, tag=True):
    """The answer: the grammar, or an `error` that says why none, or no vocabulary, can be used."""

    grammar: str = ""
    error: str | None = None


_to_process = msgspec.msgpack.Decoder(MakeSetup | Make)
_from_process = msgspec.msgpack.Decoder(Made)


@dataclasses.dataclass(frozen=True)
class _Known:
    """What came of something wanted: a grammar, or what is wrong with it; that counts `until` then."""

    made: Made
    until: float = float("inf")


class GrammarPool:
    """One process that writes and compiles grammars over the `tokenizer.json` at a path, started when first used.

    Whatever a client sends is turned into a grammar there and nowhere else: much of that is not linear in its bytes.
    `dialect` names that of the model's calls, and `marker_ids` has its markers that are tokens. A request waits at most
    `wait_s` for the process.
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
        self._workers = Workers([self], wait_s)
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._num_chars = 0

    async def make(self, wanted: Wanted, rules: RequestRules) -> str:
        """Returns the grammar of an answer, which an engine of these rules can use.

        Raises GrammarError with the reason where there is none; VocabularyError says that there never is. WorkersBusy
        and WorkerDied say that the same may be made later.
        """
        try:
            frame = frames.encode(Make(wanted))
        except (OverflowError, ValueError, TypeError, RecursionError, frames.FrameError):
            raise GrammarError("it holds a value that no grammar can be made of") from None
        key = hashlib.sha256(frame).digest()
        known = self._known.get(key)
        if known is None or known.until < time.monotonic():
            known = await self._workers.run(len(frame), lambda pool: pool._make(frame, rules))
        self._remember(key, known)
        if known.made.error is not None:
            raise GrammarError(known.made.error)
        return known.made.grammar

    async def close(self) -> None:
        """Ends the process."""
        await self._workers.close()
        if self._worker is not None:
            await self._worker.stop()

    def _remember(self, key: bytes, known: _Known) -> None:
        """Keeps what came of something wanted, as the last one that was used."""
        if (old := self._known.pop(key, None)) is not None:
            self._num_chars -= len(old.made.grammar)
        self._known[key] = known
        self._num_chars += len(known.made.grammar)
        while len(self._known) > MAX_REMEMBERED or self._num_chars > MAX_REMEMBERED_CHARS:
            self._num_chars -= len(self._known.popitem(last=False)[1].made.grammar)

    async def _make(self, frame: bytearray, rules: RequestRules) -> _Known:
        """Returns what comes of something wanted; that the process died of it counts for a while."""
        if self._worker is None:
            self._worker = self._process(rules)
        await self._worker.start()
        try:
            return _Known(_from_process.decode(await self._worker.ask(frame)))
        except TimeoutError:
            error = f"takes longer than {self._deadline_s:g} s to compile; make it smaller"
        except PoisonRequest:
            error = "cannot be compiled: it needs too much memory"
        return _Known(Made(error=error), time.monotonic() + DOUBT_S)

    def _process(self, rules: RequestRules) -> WorkerProcess:
        setup = MakeSetup(str(self._tokenizer), rules.vocab_size, rules.eos_token_ids, self._dialect, self._marker_ids)
        frame = frames.encode(setup)
        return WorkerProcess("dsv3.server.grammars", _DOES, frame, self._deadline_s, _require_vocabulary)


def _require_vocabulary(body: bytes) -> None:
    """Raises VocabularyError where no grammar can be run over the vocabulary."""
    if (error := _from_process.decode(body).error) is not None:
        raise VocabularyError(error)


class _Maker:
    """Writes and compiles for one vocabulary."""

    def __init__(self) -> None:
        self._setup: MakeSetup | None = None
        self._vocabulary: GrammarVocabulary | None = None

    def answer(self, body: bytes) -> bytearray:
        """Returns the frame of the answer."""
        try:
            return frames.encode(Made(self._made(_to_process.decode(body))))
        except (ValueError, OSError) as problem:  # GrammarError and VocabularyError are such
            error = str(problem)
        except (MemoryError, RecursionError):
            error = "too large, or nested too deeply, to be made a grammar of"
        except Exception as problem:
            error = f"no grammar can be made of it ({type(problem).__name__})"
        return frames.encode(Made(error=error))

    def _made(self, message: MakeSetup | Make) -> str:
        if isinstance(message, MakeSetup):
            self._setup = message
            self._vocabulary = GrammarVocabulary.from_file(Path(message.tokenizer), message.vocab_size, message.end_ids)
            return ""
        assert self._setup is not None and self._vocabulary is not None  # the first message was one
        grammar = answer_grammar(message.wanted, DIALECTS.get(self._setup.dialect), self._setup.marker_ids.get)
        self._vocabulary.compile(grammar)
        return grammar


if __name__ == "__main__":
    answer_questions(_Maker().answer, _MAX_MEMORY_BYTES)
