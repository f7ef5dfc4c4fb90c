"""A completer without a model, and a program that runs a batch with it, to be killed by the tests."""

import json
import pathlib
import sys
import threading
import time

from dsv3.batch.journal import Journal, summarize_input
from dsv3.batch.run import Answer, Progress, Refused, run


class FakeCompleter:
    """Answers {"prompt": text} with the text reversed, after as many steps as the text is long, `room` at a time."""

    def __init__(self, room: int = 4, step_s: float = 0.0, fail_at_step: int | None = None):
        self._room, self._step_s, self._fail_at_step = room, step_s, fail_at_step
        self._running: dict[int, list] = {}
        self.steps = self.most_running = 0
        self.aborted: list[int] = []
        self.prepared = 0

    def prepare(self, url, body):
        self.prepared += 1
        fields = json.loads(body)
        if not isinstance(fields.get("prompt"), str):
            raise Refused(400, {"error": {"message": "prompt: text expected"}})
        return fields["prompt"]

    def has_room(self):
        return len(self._running) < self._room

    def start(self, number, prepared):
        if prepared == "too long":
            raise Refused(400, {"error": {"message": "longer than the model allows"}})
        self._running[number] = [len(prepared), prepared]
        self.most_running = max(self.most_running, len(self._running))

    def step(self):
        self.steps += 1
        if self.steps == self._fail_at_step:
            raise RuntimeError("the engine died")
        time.sleep(self._step_s)
        for state in self._running.values():
            state[0] -= 1
        ended = [number for number, (left, _) in self._running.items() if left <= 0]
        return [self._answer(number, self._running.pop(number)[1]) for number in ended]

    def _answer(self, number, text):
        if text == "explodes":
            return Answer(number, 500, f"r{number}", {"error": {"message": "engine error"}})
        return Answer(number, 200, f"r{number}", {"text": text[::-1]}, output_tokens=len(text))

    def abort(self):
        self.aborted = list(self._running)
        self._running.clear()


def run_batch(source, output, completer=None, model="fake", stop=None, on_progress=lambda progress: None) -> Progress:
    source, output = pathlib.Path(source), pathlib.Path(output)
    summary = summarize_input(source)
    journal = Journal.open(output, summary, model)
    try:
        return run(
            source,
            journal,
            completer or FakeCompleter(),
            total=summary.lines,
            stop=stop or threading.Event(),
            on_progress=on_progress,
        )
    finally:
        journal.close()


if __name__ == "__main__":
    done = run_batch(sys.argv[1], sys.argv[2], FakeCompleter(step_s=0.001))
    print(done.answered)
