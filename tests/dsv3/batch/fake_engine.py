"""The server tests' engine without a model, dying as the real one does: every request ends with an error first."""

from dsv3.engine.request import EngineOutput
from tests.dsv3.api import fake_engine
from tests.dsv3.api.fake_engine import FAIL_STEP


class DyingEngine(fake_engine.FakeEngine):
    """A prompt with FAIL_STEP in it fails the engine, as an exception in a step of `dsv3.engine.Engine` does."""

    def step(self):
        requests = [sequence.request for sequence in (*self._running, *self._waiting)]
        if not any(FAIL_STEP in request.prompt_token_ids for request in requests):
            return super().step()
        self.failure = FloatingPointError("overflow")
        self._running, self._waiting = [], self._waiting.__class__()
        error = "the engine has failed: FloatingPointError"
        return [
            EngineOutput(request_id=request.request_id, token_ids=[], finish_reason="error", error=error)
            for request in requests
        ]


def make(start, host):
    """The factory that the completer under test is given."""
    engine, info = fake_engine.make(start, host)
    engine.__class__ = DyingEngine
    return engine, info
