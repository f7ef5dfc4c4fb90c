"""A line for the log about the last seconds of a server, as vLLM and SGLang write one."""

import time
from collections.abc import Mapping

from dsv3.server.answers.metrics import Metrics

_COUNTED = ("prompt_tokens", "generation_tokens")
_LOOKED_UP = ("prefix_queries", "prefix_hits")


class Throughput:
    """What a server does between two questions."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._at, self._before = time.monotonic(), self._totals()

    def line(self) -> str | None:
        """Returns the rates since the last call and the state of the moment; None where nothing has happened."""
        now, totals = time.monotonic(), self._totals()
        seconds, self._at = max(now - self._at, 1e-9), now
        before, self._before = self._before, totals
        grown = {name: value - before[name] for name, value in totals.items()}
        stats = self._metrics.stats
        running, waiting = _number(stats, "running"), _number(stats, "waiting")
        if not (running or waiting or any(grown[name] for name in _COUNTED)):
            return None
        prompt, generated = (grown[name] / seconds for name in _COUNTED)
        queries, hits = (grown[name] for name in _LOOKED_UP)
        hit_rate = f", prefix cache hit rate: {hits / queries:.1%}" if queries > 0 else ""
        return (
            f"running: {running:.0f} reqs, waiting: {waiting:.0f} reqs, prompt throughput: {prompt:.1f} tokens/s, "
            f"generation throughput: {generated:.1f} tokens/s, "
            f"KV cache usage: {_number(stats, 'cache_usage'):.1%}{hit_rate}"
        )

    def _totals(self) -> dict[str, float]:
        counted, stats = self._metrics.counted()[0], self._metrics.stats
        return {name: counted[name] for name in _COUNTED} | {name: _number(stats, name) for name in _LOOKED_UP}


def _number(stats: Mapping[str, object], name: str) -> float:
    value = stats.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0
