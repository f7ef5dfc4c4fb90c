"""Log of all requests and the times of their tokens, and the figures that follow."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from tools.load import PERCENTILES, distribution

Outcome = Literal["", "answered", "refused", "too long"]
_GAP = 1e-4
_FIRST_SIZE = 1024


class RequestLog:
    """Columns over all requests, by number; figures exclude requests that arrive, and tokens, before `begin`."""

    def __init__(self, begin: float = 0.0) -> None:
        self.begin = begin
        self.count = 0
        self.ends: Counter[Outcome] = Counter()
        self.arrived, self.first, self.last, self.ended = (np.full(_FIRST_SIZE, np.nan) for _ in range(4))
        self.prompt, self.cached, self.tokens = (np.zeros(_FIRST_SIZE, np.int64) for _ in range(3))
        self.answered = np.zeros(_FIRST_SIZE, bool)
        self.output_tokens = 0  # including those before `begin`
        self._gaps: Counter[int] = Counter()  # in tenths of a millisecond
        self._tokens_since, self._before = 0, np.nan

    def on_arrival(self, now: float, prompt: int) -> int:
        """Adds a request; returns its number."""
        number, self.count = self.count, self.count + 1
        if number == len(self.arrived):
            for name in ("arrived", "first", "last", "ended", "prompt", "cached", "tokens", "answered"):
                column = getattr(self, name)
                more = np.full(len(column), np.nan) if column.dtype == float else np.zeros(len(column), column.dtype)
                setattr(self, name, np.concatenate([column, more]))
        self.arrived[number], self.prompt[number] = now, prompt
        return number

    def record_tokens(self, ids: np.ndarray, now: float, before: float) -> None:
        """Records a token of each request of `ids` `[n]`; `before` is the end of the previous step."""
        if now >= self.begin:
            last = self.last[ids]
            regular = last == before
            if count := int(np.count_nonzero(regular)):
                self._gaps[round((now - before) / _GAP)] += count
            others = now - last[~regular]
            self._gaps.update(np.rint(others[~np.isnan(others)] / _GAP).astype(int).tolist())
            self._tokens_since += len(ids)
        self.last[ids] = now
        self.tokens[ids] += 1
        self.output_tokens += len(ids)

    def on_end(self, number: int, now: float, end: Outcome) -> None:
        """Records the end of a request."""
        self.ended[number] = now
        self.answered[number] = end == "answered"
        self.ends[end] += 1

    def ttft(self, start: float, stop: float) -> np.ndarray:
        """Returns the seconds to the first token, if any, of requests that arrived from `start` to `stop`."""
        mine = slice(0, self.count)
        came = (self.arrived[mine] >= start) & (self.arrived[mine] < stop) & ~np.isnan(self.first[mine])
        return (self.first[mine] - self.arrived[mine])[came]

    def figures(self, now: float, limits: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Returns counts, rates, percentiles in milliseconds, and goodput from `begin` to `now`.

        `limits` are goodput's bounds in milliseconds, by `ttft`, `tpot` or `e2e`.
        """
        mine = slice(0, self.count)
        ended = np.nan_to_num(self.ended[mine], nan=-1.0) >= self.begin
        good = ended & self.answered[mine] & (self.arrived[mine] >= self.begin)
        seconds = max(now - self.begin, _GAP)
        ttft, e2e = self.first[mine] - self.arrived[mine], self.ended[mine] - self.arrived[mine]
        with np.errstate(invalid="ignore", divide="ignore"):
            tpot = (self.last[mine] - self.first[mine]) / (self.tokens[mine] - 1)
        tpot[self.tokens[mine] < 2] = 0.0
        prompt, cached = int(self.prompt[mine][good].sum()), int(self.cached[mine][good].sum())
        within = good.copy()
        for metric, milliseconds in (limits or {}).items():
            within &= {"ttft": ttft, "tpot": tpot, "e2e": e2e}[metric] * 1e3 <= milliseconds
        counts: dict[str, int] = {"arrived": self.count, "unfinished": self.count - sum(self.ends.values())}
        return {
            "requests": counts | dict(sorted(self.ends.items())),
            "seconds": seconds,
            "requests_per_second": float(np.count_nonzero(ended & self.answered[mine])) / seconds,
            "output_tokens_per_second": self._tokens_since / seconds,
            "mean_prompt": prompt / max(1, int(good.sum())),
            "mean_answer": float(self.tokens[mine][good].mean()) if good.any() else 0.0,
            "hit_rate": cached / prompt if prompt else 0.0,
            "ttft_ms": distribution(ttft[good].tolist()),
            "e2e_ms": distribution(e2e[good].tolist()),
            "tpot_ms": distribution(tpot[good & (self.tokens[mine] > 1)].tolist()),
            "itl_ms": self._gap_percentiles(),
            "goodput": {
                "requests_per_second": float(np.count_nonzero(within)) / seconds,
                "share": float(np.count_nonzero(within)) / max(1, int(np.count_nonzero(good))),
            }
            if limits
            else None,
        }

    def _gap_percentiles(self) -> dict[str, float] | None:
        """Returns mean, percentiles and maximum of inter-token latencies, each to a tenth of a millisecond."""
        if not self._gaps:
            return None
        gaps = np.array(sorted(self._gaps))
        counts = np.array([self._gaps[gap] for gap in gaps.tolist()])
        below, total = counts.cumsum(), int(counts.sum())
        found = {"mean": float((gaps * counts).sum() / total)}
        for rank in PERCENTILES:
            found[f"p{rank}"] = float(gaps[np.searchsorted(below, rank / 100 * total)])
        found["max"] = float(gaps[-1])
        return {name: value * _GAP * 1e3 for name, value in found.items()}
