"""The server tests' fake engine, which dies as the real one does: every request ends with an error first."""

from dsv3.scheduler.request import EngineOutput, StepOutputs
from tests.dsv3.server import fake_engine
from tests.dsv3.server.fake_engine import FAIL_STEP


class DyingEngine(fake_engine.FakeEngine):
    """A prompt with FAIL_STEP in it fails the engine, as an exception in a step of `dsv3.engine.Engine` does."""

    def step(self):
        sequences = [*self._running, *self._waiting]
        if not any(FAIL_STEP in sequence.prompt for sequence in sequences):
            return super().step()
        self.failure = FloatingPointError("overflow")
        self._running, self._waiting = [], self._waiting.__class__()
        error = "the engine has failed: FloatingPointError"
        ids = [sequence.request.request_id for sequence in sequences]
        return StepOutputs(
            [], [EngineOutput(request_id=i, token_ids=[], finish_reason="error", error=error) for i in ids]
        )


def make(start, host):
    """The engine factory of the completer under test."""
    engine, info = fake_engine.make(start, host)
    engine.__class__ = DyingEngine
    return engine, info
