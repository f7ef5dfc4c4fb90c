"""The process that tries out grammars for a front: one frame in, one frame out, on its standard streams.

It compiles what the engine will compile, within the same limits. A grammar that takes too long, or too much memory, or
ends the process, does so here.
"""

import contextlib
import resource
import signal
import sys
from pathlib import Path

from dsv3.api import frames
from dsv3.api.grammars import messages
from dsv3.text.matcher import GrammarError, Vocabulary, VocabularyError

# The vocabulary takes 0.1 GB at 129k tokens; threads reserve addresses beside what they use.
_MAX_MEMORY_BYTES = 4 * 2**30
# The parent kills a late worker much earlier; this ends one whose parent was itself killed.
_MAX_TRY_S = 60


def main() -> None:
    """Serves until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):  # macOS reserves more addresses than this and refuses the bound
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    vocabulary: Vocabulary | None = None
    while (body := frames.read_frame(sys.stdin.buffer)) is not None:
        signal.alarm(_MAX_TRY_S)
        message, error = messages.to_worker.decode(body), None
        try:
            if isinstance(message, messages.TrySetup):
                vocabulary = Vocabulary.from_file(Path(message.tokenizer), message.vocab_size, message.end_ids)
            elif vocabulary is not None:
                vocabulary.compile(message.grammar)
        except (GrammarError, VocabularyError, OSError) as problem:
            error = str(problem)
        signal.alarm(0)
        sys.stdout.buffer.write(frames.encode(messages.Tried(error)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
