"""What the dashboard shows, as one bounded JSON object."""

import time
from typing import Any

import msgspec
import numpy as np

from dsv3.engine.look import ExpertLoad, Look, StepNote
from dsv3.server.answers.history import KEPT_S, TIERS
from dsv3.server.answers.service import Service

_MAX_LAYERS, _MAX_COLUMNS = 256, 1024  # of a heat map; larger models show the first
STEPS_TOLD = 120


def picture(service: Service, since: float, experts: int) -> bytes:
    """Returns the dashboard's JSON: curves after the time `since`, the experts' load unless it is version `experts`.

    Numbers that do not exist (yet) are null or absent.
    """
    stats, info, look = service.metrics.stats, service.engine.info, service.onlooker.look()
    return msgspec.json.encode(
        {
            "now": time.time(),
            "kept_s": KEPT_S,
            "model": service.config.model_names[0],
            "status": service.status,
            "reason": service.reason,
            "started": service.config.created,
            "max_num_seqs": info and info.max_num_seqs,
            "num_pages": info and info.num_pages,
            "max_model_len": info and info.rules.max_model_len,
            "pages_in_use": stats.get("pages_in_use"),
            "kernel_fallbacks": info and info.kernel_fallbacks,
            "recompilations": stats.get("recompilations"),
            "accepted_by_place": _accepted(stats),
            "tiers": [{"name": tier, **_tier(stats, tier)} for tier in TIERS if f"pages_tiers_{tier}_hits" in stats],
            "experts": experts_of(look, experts, stats),
            "steps": [] if look is None else [_step(note) for note in look.steps[-STEPS_TOLD:]],
            "series": service.history.series(since),
        }
    )


def _accepted(stats: dict[str, Any]) -> list[float]:
    """Returns the share of rows with drafts in which all up to a place were right, by place."""
    rows = stats.get("draft_num_drafts", 0)
    return [count / rows for count in stats.get("draft_num_accepted_tokens_per_pos", [])] if rows else []


def _tier(stats: dict[str, Any], tier: str) -> dict[str, Any]:
    names = ("bytes_held", "queries", "hits", "loaded_bytes", "stored_bytes", "damaged", "failures")
    return {name: stats.get(f"pages_tiers_{tier}_{name}") for name in names}


def _step(note: StepNote) -> dict[str, Any]:
    """Returns a step with its times in microseconds after its beginning, which is in seconds."""
    return {
        "began": note.began,
        "launched": note.launched,
        "collected": note.collected,
        "parts": [[part.what, round((part.at - note.began) * 1e6)] for part in note.parts],
        "jobs": note.jobs,
        "running": note.running,
    }


def experts_of(look: Look | None, known: int, stats: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the experts' load in percent of each layer's mean; only the version where the page knows it.

    None where the engine has shown none.
    """
    if look is None or look.experts is None:
        return None
    load, names = look.experts, ("experts_rebalances", "experts_moved", "experts_balancedness")
    told = {"version": load.version} | {name: stats.get(name) for name in names}
    if load.version == known:
        return told
    told |= {"layers": load.layers, "experts": load.experts, "devices": load.devices}
    return told | {
        "load": _percent(load, load.load, load.experts),
        "device_load": _percent(load, load.device_load, load.devices),
        "before": _percent(load, load.before, load.devices),
        "after": _percent(load, load.after, load.devices),
    }


def _percent(load: ExpertLoad, values: bytes, columns: int) -> list[list[int]]:
    """Returns `[layers, columns]` as percent of the layer's mean, 0 in a layer without load; empty for no values."""
    if not values:
        return []
    array = np.frombuffer(values, "<f4").reshape(load.layers, columns)[:_MAX_LAYERS]
    mean = array.mean(axis=1, keepdims=True)
    percent = np.divide(100 * array, mean, out=np.zeros_like(array), where=mean > 0)
    return percent[:, :_MAX_COLUMNS].round().astype(int).tolist()
