"""What a run leaves to read: a log with a JSON line per report, and a picture of the loss."""

import importlib.util
import json
from pathlib import Path
from typing import Any


class RunLog:
    """The log of a run, one JSON object per line; lines after the step that a run resumes from are dropped."""

    def __init__(self, path: Path, resume_step: int):
        self._path = path
        kept = [row for row in read_log(path) if row["step"] <= resume_step]
        new = path.with_suffix(".new")
        new.write_text("".join(json.dumps(row) + "\n" for row in kept))
        new.replace(path)

    def write(self, **values: Any) -> None:
        """Appends one line."""
        with self._path.open("a") as file:
            file.write(json.dumps(values) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a log; none if there is no file. A last line that a kill has cut off is left out."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def plot_losses(log: Path, picture: Path) -> bool:
    """Draws training, MTP and validation loss over tokens seen as a PNG; returns False if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    rows = read_log(log)
    figure = Figure(figsize=(6.4, 3.6), dpi=90, layout="constrained")
    axes = figure.add_subplot()
    for kind, key, label in (
        ("train", "mtp_loss", "MTP (token after next)"),
        ("train", "loss", "training"),
        ("validation", "loss", "validation"),
    ):
        chosen = [row for row in rows if row["kind"] == kind]
        style = "o-" if kind == "validation" else "-"
        axes.plot([r["tokens"] / 1e6 for r in chosen], [r[key] for r in chosen], style, ms=2.5, lw=1, label=label)
    axes.set(xlabel="million tokens", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture)
    return True
