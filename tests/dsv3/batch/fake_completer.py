"""A completer without a model, and a program that runs a batch with it, for tests that kill it."""

import asyncio
import json
import pathlib
import sys

from dsv3.batch.journal import Journal, summarize_input
from dsv3.batch.run import BatchProgress, Reply, run


class FakeCompleter:
    """Answers {"prompt": text} with the text reversed; each character of it takes `char_s`."""

    def __init__(self, char_s: float = 0.0, die_after: int | None = None):
        self.concurrency = 4
        self._char_s, self._die_after = char_s, die_after
        self.running = self.most_running = self.completed = self.cancelled = 0

    async def complete(self, url, body):
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._complete(json.loads(body).get("prompt"))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _complete(self, prompt):
        if not isinstance(prompt, str):
            return Reply(400, "", {"error": {"message": "prompt: text expected"}})
        await asyncio.sleep(self._char_s * len(prompt))
        if self.completed == self._die_after:
            raise RuntimeError("the engine died")
        self.completed += 1
        if prompt == "explodes":
            return Reply(500, "r", {"error": {"message": "engine error"}})
        return Reply(200, "r", {"text": prompt[::-1]}, output_tokens=len(prompt))


def run_batch(source, output, completer=None, *, concurrency=4, model="fake", stop_when=None) -> BatchProgress:
    """Runs a batch to its end, or until `stop_when(progress)` holds."""
    source, output = pathlib.Path(source), pathlib.Path(output)
    journal = Journal.open(output, summarize_input(source), model)
    completer = completer or FakeCompleter()
    completer.concurrency = concurrency

    async def batch():
        task = asyncio.current_task()

        def on_progress(progress):
            if stop_when is not None and stop_when(progress):
                task.cancel()

        return await run(source, journal, completer, on_progress=on_progress)

    try:
        return asyncio.run(batch())
    finally:
        journal.close()


if __name__ == "__main__":
    print(run_batch(sys.argv[1], sys.argv[2], FakeCompleter(char_s=0.001)).answered)
