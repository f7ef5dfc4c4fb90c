"""API servers without processes, over an engine that dies of requests: plays what `InFlightRequests` decides."""

import array

from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineRequest, PreparedRequest, RequestRules, prepare
from dsv3.server.engine.in_flight import InFlightRequests

RULES = RequestRules(vocab_size=9, max_model_len=2000, fingerprint="print")


def prepared(request_id: int, n: int = 1) -> PreparedRequest:
    """Returns a request of one token."""
    request = EngineRequest(request_id=request_id, prompt_token_ids=[5], sampling=SamplingParams(n=n))
    return prepare(request, RULES)


class Fleet:
    """API servers without processes, over an engine that requests crash once they have so many tokens."""

    def __init__(self, api_servers: int, max_restarts: int, fatal: dict[int, int]):
        self.api_servers = [InFlightRequests(max_restarts) for _ in range(api_servers)]
        self.fatal, self.deaths = fatal, 0
        self.ended: dict[int, str] = {}
        self._turns: list[InFlightRequests] = []

    def add(self, request_id: int) -> None:
        """Sends a request through one of the API servers."""
        in_flight = self.api_servers[request_id % len(self.api_servers)]
        in_flight.add([prepared(request_id)], [object()])  # type: ignore[list-item]  # a stream that gets no output
        in_flight.by_id[request_id].in_engine = True

    def step(self, num_tokens: int) -> None:
        """Gives every sequence that is there a token, or ends the engine before any gets one."""
        there = {i: live for in_flight in self.api_servers for i, live in in_flight.by_id.items() if live.in_engine}
        if any(self.fatal.get(i, num_tokens) <= len(live.tokens) for i, live in there.items()):
            self.deaths += 1
            self._die()
            return
        for i, live in there.items():
            live.tokens.extend(array.array("i", [0]))
            if len(live.tokens) >= num_tokens:
                next(in_flight for in_flight in self.api_servers if i in in_flight.by_id).pop(i)
        for in_flight in self.api_servers:
            if in_flight.quarantine_passed:
                self._try_next(in_flight)

    def _die(self) -> None:
        self._on_engine_death()
        self._turns = [in_flight for in_flight in self.api_servers if in_flight.quarantined]
        if self._turns:
            self._try_next(self._turns[0])

    def _on_engine_death(self) -> None:
        for in_flight in self.api_servers:
            for live, error in in_flight.on_engine_death():
                self.ended[live.request.request_id] = str(error)
            for _, live in in_flight.pop_waiting():
                live.in_engine = True

    def _try_next(self, in_flight: InFlightRequests) -> None:
        if (found := in_flight.next_quarantined()) is not None:
            found[1].in_engine = True
            return
        self._turns.remove(in_flight)
        if self._turns:
            self._try_next(self._turns[0])

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended."""
        return sum(len(in_flight.by_id) for in_flight in self.api_servers)
