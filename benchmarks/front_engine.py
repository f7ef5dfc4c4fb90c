"""An engine without a model for `benchmarks.front`: each request gets a token per step, `rate` steps per second.

The token of step n has the text "n " (four digits, modulo 10,000), and when the step was made stands at place n of a
shared file. So a client can tell whether a token is missing, and how long each was on its way.
"""

import json
import time
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dsv3.engine.step_log import EngineSnapshot, StepLog
from dsv3.scheduler.request import EngineOutput, RequestRules, StepOutputs, Tokens
from dsv3.server.engine.messages import EngineInfo

STEPS = 10_000
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB = len(_ALPHABET) + STEPS
MAX_MODEL_LEN = 65_536


def write_model(directory: Path) -> None:
    """Writes the tokenizer and the chat template, and the file with the times of steps."""
    vocab = {token: i for i, token in enumerate([*_ALPHABET, *(f"{step:04d}Ġ" for step in range(STEPS))])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}</think>"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    np.zeros(STEPS).tofile(directory / "steps")


def step_times(directory: Path) -> np.ndarray:
    """Returns the times of the steps, by `time.monotonic`: [STEPS] float64, shared with the engine."""
    return np.memmap(directory / "steps", np.float64, "r+")


class EmptyEngine:
    """What `dsv3.server.engine.process` needs of an engine."""

    failure = None
    room = 2**20

    def __init__(self, times: np.ndarray, rate: float):
        self._times, self._period = times, 1 / rate
        self._waiting: list = []
        self._ids = np.zeros(0, np.int64)
        self._left = np.zeros(0, np.int64)
        self._steps = 0
        self._next_at = time.monotonic()
        self._host_times = [0] * 10
        self.log = StepLog()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or len(self._ids))

    def submit(self, request) -> None:
        self._waiting.append(request)

    def abort(self, request_id: int) -> None:
        self._waiting = [request for request in self._waiting if request.request_id != request_id]
        self._keep(self._ids != request_id)

    def step(self) -> StepOutputs:
        self._next_at = max(self._next_at + self._period, time.monotonic())
        time.sleep(max(0.0, self._next_at - time.monotonic()))
        self._steps += 1
        place = self._steps % STEPS
        token = len(_ALPHABET) + place
        self._times[place] = time.monotonic()
        last = self._left == 1
        outputs = [self._detail(request_id, token, "length") for request_id in self._ids[last].tolist()]
        self._keep(~last)
        columns = Tokens(self._ids, np.ones(len(self._ids), np.int64), np.full(len(self._ids), token, np.int32))
        self._left = self._left - 1
        outputs += [self._detail(request.request_id, token, None) for request in self._waiting]
        self._ids = np.concatenate([self._ids, np.array([r.request_id for r in self._waiting], np.int64)])
        left = [r.max_length - len(r.prompt) - 1 for r in self._waiting]
        self._left = np.concatenate([self._left, np.array(left, np.int64)])
        self._waiting = []
        return StepOutputs([columns] if len(columns) else [], outputs)

    def stats(self) -> dict[str, object]:
        return {
            "running": len(self._ids),
            "waiting": len(self._waiting),
            "pages_in_use": len(self._ids),
            "cache_usage": 0.0,
            "steps": self._steps,
            "host_time_counts": self._host_times,
        }

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(self.log.snapshot(), None)

    def _keep(self, live: np.ndarray) -> None:
        if not live.all():
            self._ids, self._left = self._ids[live], self._left[live]

    def _detail(self, request_id: int, token: int, reason) -> EngineOutput:
        return EngineOutput(request_id=request_id, token_ids=[token], finish_reason=reason, queue_seconds=0.0)


def make(start, host):
    """The factory that the server is given."""
    options = start.factory_options
    engine = EmptyEngine(step_times(Path(start.model_dir)), options["rate"])
    rules = RequestRules(vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN)
    return engine, EngineInfo(rules, max_num_seqs=options["max_num_seqs"], num_pages=1)
