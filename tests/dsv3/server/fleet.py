"""API servers without processes, over an engine that dies of requests: plays what `Lives` decides."""

import array

from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineRequest, PreparedRequest, RequestRules, prepare
from dsv3.server.engine.live import Lives

RULES = RequestRules(vocab_size=9, max_model_len=2000, fingerprint="print")


def prepared(request_id: int, n: int = 1) -> PreparedRequest:
    """Returns a request of one token."""
    asked = EngineRequest(request_id=request_id, prompt_token_ids=[5], sampling=SamplingParams(n=n))
    return prepare(asked, RULES)


class Fleet:
    """Fronts without processes, over an engine that dies of requests once they have so many tokens."""

    def __init__(self, fronts: int, max_restarts: int, fatal: dict[int, int]):
        self.fronts = [Lives(max_restarts) for _ in range(fronts)]
        self.fatal, self.deaths = fatal, 0
        self.ended: dict[int, str] = {}
        self._turns: list[Lives] = []

    def add(self, request_id: int) -> None:
        """Sends a request through one of the fronts."""
        lives = self.fronts[request_id % len(self.fronts)]
        lives.add([prepared(request_id)], [object()])  # type: ignore[list-item]  # a sink that nothing comes to
        lives.by_id[request_id].is_there = True

    def step(self, num_tokens: int) -> None:
        """Gives every sequence that is there a token, or has the engine die before anybody gets one."""
        there = {i: live for lives in self.fronts for i, live in lives.by_id.items() if live.is_there}
        if any(self.fatal.get(i, num_tokens) <= len(live.tokens) for i, live in there.items()):
            self.deaths += 1
            self._die()
            return
        for i, live in there.items():
            live.tokens.extend(array.array("i", [0]))
            if len(live.tokens) >= num_tokens:
                next(lives for lives in self.fronts if i in lives.by_id).pop(i)
        for lives in self.fronts:
            if lives.trial_is_over:
                self._try_next(lives)

    def _die(self) -> None:
        self._bury()
        self._turns = [lives for lives in self.fronts if lives.suspects]
        if self._turns:
            self._try_next(self._turns[0])

    def _bury(self) -> None:
        for lives in self.fronts:
            for live, error in lives.bury():
                self.ended[live.request.request_id] = str(error)
            for _, live in lives.take_waiting():
                live.is_there = True

    def _try_next(self, lives: Lives) -> None:
        if (found := lives.next_suspect()) is not None:
            found[1].is_there = True
            return
        self._turns.remove(lives)
        if self._turns:
            self._try_next(self._turns[0])

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return sum(map(len, self.fronts))
