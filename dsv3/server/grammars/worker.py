"""The process that makes grammars for a front: one frame in, one frame out, on its standard streams.

It writes them of what clients ask for, and compiles what the engine will compile, within the same limits. What takes
too long, or too much memory, or ends the process, does so here.
"""

from pathlib import Path

from dsv3.processes import frames
from dsv3.server.asking import answer_questions
from dsv3.server.grammars import messages
from dsv3.text.answer_grammar import answer_grammar
from dsv3.text.dialects import DIALECTS
from dsv3.text.matcher import Vocabulary

# The vocabulary takes 0.1 GB at 129k tokens; threads reserve addresses beside what they use.
_MAX_MEMORY_BYTES = 4 * 2**30


class _Maker:
    """Writes and compiles for one vocabulary."""

    def __init__(self) -> None:
        self._setup: messages.MakeSetup | None = None
        self._vocabulary: Vocabulary | None = None

    def answer(self, body: bytes) -> bytearray:
        """Returns the frame of the answer."""
        try:
            return frames.encode(messages.Made(self._made(messages.to_worker.decode(body))))
        except (ValueError, OSError) as problem:  # GrammarError and VocabularyError are such
            error = str(problem)
        except (MemoryError, RecursionError):
            error = "too large, or nested too deeply, to be made a grammar of"
        except Exception as problem:
            error = f"no grammar can be made of it ({type(problem).__name__})"
        return frames.encode(messages.Made(error=error))

    def _made(self, message: messages.ToWorker) -> str:
        if isinstance(message, messages.MakeSetup):
            self._setup = message
            self._vocabulary = Vocabulary.from_file(Path(message.tokenizer), message.vocab_size, message.end_ids)
            return ""
        assert self._setup is not None and self._vocabulary is not None  # the first message was one
        grammar = answer_grammar(message.wanted, DIALECTS.get(self._setup.dialect), self._setup.marker_ids.get)
        self._vocabulary.compile(grammar)
        return grammar


if __name__ == "__main__":
    answer_questions(_Maker().answer, _MAX_MEMORY_BYTES)
