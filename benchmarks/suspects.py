"""Counts the requests that end beside one that engines die of: with the trial of suspects, and without it.

  python -m benchmarks.suspects                    2,000 random schedules of 24 requests, one or two of them fatal
  python -m benchmarks.suspects --schedules 100

Each request wants 48 tokens; they arrive at random during as many steps. A fatal one ends each engine that it is sent
to, at its first token or at a random one. No process runs: only what fronts decide is played, over one engine.

`twice, then an error` ends what was there at two deaths and has got no further in between, as a router does with
instances. `without turns` has each front try its own suspects, whatever others try.
"""

import argparse
import array
import random

from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineRequest, PreparedRequest, RequestRules, prepare
from dsv3.server.engine.in_flight import InFlightRequests

RULES = RequestRules(vocab_size=9, max_model_len=2000, fingerprint="print")
COUNT, TOKENS = 24, 48
_MOST_STEPS = 100_000


def prepared(request_id: int, n: int = 1) -> PreparedRequest:
    """Returns a request of one token."""
    asked = EngineRequest(request_id=request_id, prompt_token_ids=[5], sampling=SamplingParams(n=n))
    return prepare(asked, RULES)


class Fleet:
    """Fronts without processes, over an engine that dies of requests once they have so many tokens."""

    def __init__(self, api_servers: int, max_restarts: int, fatal: dict[int, int]):
        self.api_servers = [InFlightRequests(max_restarts) for _ in range(api_servers)]
        self.fatal, self.deaths = fatal, 0
        self.ended: dict[int, str] = {}
        self._turns: list[InFlightRequests] = []

    def add(self, request_id: int) -> None:
        """Sends a request through one of the fronts."""
        in_flight = self.api_servers[request_id % len(self.api_servers)]
        in_flight.add([prepared(request_id)], [object()])  # type: ignore[list-item]  # a sink that nothing comes to
        in_flight.by_id[request_id].is_there = True

    def step(self, num_tokens: int) -> None:
        """Gives every sequence that is there a token, or has the engine die before anybody gets one."""
        there = {i: live for in_flight in self.api_servers for i, live in in_flight.by_id.items() if live.is_there}
        if any(self.fatal.get(i, num_tokens) <= len(live.tokens) for i, live in there.items()):
            self.deaths += 1
            self._die()
            return
        for i, live in there.items():
            live.tokens.extend(array.array("i", [0]))
            if len(live.tokens) >= num_tokens:
                next(in_flight for in_flight in self.api_servers if i in in_flight.by_id).pop(i)
        for in_flight in self.api_servers:
            if in_flight.quarantine_is_over:
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
            for _, live in in_flight.take_waiting():
                live.is_there = True

    def _try_next(self, in_flight: InFlightRequests) -> None:
        if (found := in_flight.next_quarantined()) is not None:
            found[1].is_there = True
            return
        self._turns.remove(in_flight)
        if self._turns:
            self._try_next(self._turns[0])

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return sum(map(len, self.api_servers))


class FleetWithoutTurns(Fleet):
    """Each front tries its own suspects."""

    def _die(self) -> None:
        self._on_engine_death()
        self._turns = list(self.api_servers)
        for in_flight in self.api_servers:
            super()._try_next(in_flight)

    def _try_next(self, in_flight: InFlightRequests) -> None:
        if (found := in_flight.next_quarantined()) is not None:
            found[1].is_there = True


class FleetWithoutTrial(Fleet):
    """What was there at two deaths ends."""

    def _die(self) -> None:
        self._on_engine_death()
        for in_flight in self.api_servers:
            for request_id in in_flight.quarantined:
                in_flight.pop(request_id)
                self.ended[request_id] = "it was there twice"
            in_flight.quarantined.clear()


SCHEMES = {
    "the trial of suspects": Fleet,
    "without turns": FleetWithoutTurns,
    "twice, then an error": FleetWithoutTrial,
}


def play(scheme: type[Fleet], api_servers: int, num_fatal: int, seed: int) -> tuple[int, int]:
    """Returns how many requests have ended that no engine dies of, and how many engines have died."""
    chosen = random.Random(seed)
    fatal = {i: chosen.choice([0, chosen.randrange(TOKENS)]) for i in chosen.sample(range(COUNT), num_fatal)}
    arrivals = sorted(chosen.randrange(TOKENS) for _ in range(COUNT))
    fleet, added = scheme(api_servers, 100, fatal), 0
    for now in range(_MOST_STEPS):
        while added < COUNT and arrivals[added] <= now:
            fleet.add(added)
            added += 1
        if added == COUNT and not fleet.num_live:
            break
        fleet.step(TOKENS)
    assert not fleet.num_live and set(fatal) <= set(fleet.ended)
    return len(fleet.ended) - num_fatal, fleet.deaths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=2000)
    schedules = parser.parse_args().schedules
    print("fatal | fronts | scheme | others that end, mean and most | deaths of the engine")
    for num_fatal in (1, 2):
        for api_servers in (1, 2, 4):
            for name, scheme in SCHEMES.items():
                ends, deaths = zip(
                    *(play(scheme, api_servers, num_fatal, seed) for seed in range(schedules)), strict=True
                )
                mean = sum(ends) / schedules
                of = f"{mean:.2f} of {COUNT - num_fatal}, {max(ends)}"
                print(f"{num_fatal} | {api_servers} | {name} | {of} | {sum(deaths) / schedules:.1f}", flush=True)


if __name__ == "__main__":
    main()
