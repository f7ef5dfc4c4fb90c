"""How far each model family is from transformers: logits and greedy texts of small random models, in float32.

    JAX_PLATFORMS=cpu python -m benchmarks.parity [--only deepseek_v4 kimi_k2]

Every directory of tests/golden is a checkpoint in a published form, with the logits of transformers' class and, in
most, its greedy continuations of 32 prompts (`tests/golden/make_families.py` and its neighbors make them). The files
are read as a server with `--dtype float32 --fp8 dequantize` reads them. An error is the largest difference of logits
over the largest logit. A text is equal if each of its tokens has the largest logit behind the tokens before it. The
command exits with 1 if an error exceeds 1e-4 or a text differs.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import ROOT, Cell, Report, arguments, run
from dsv3.checkpoint import load_params
from dsv3.config.hugging_face import load_config
from dsv3.config.model import ModelConfig
from dsv3.model.forward import forward
from dsv3.model.params import Params

GOLDEN = ROOT / "tests" / "golden"
LARGEST_ERROR = 1e-4
_forward = jax.jit(forward, static_argnames="cfg")


def main(report: Report) -> int:
    members = [path.parent.name for path in sorted([*GOLDEN.glob("*/golden.npz"), *GOLDEN.glob("*/greedy.json")])]
    args = arguments(__doc__, only=tuple(members))
    if unknown := set(args.only) - set(members):
        print(f"{sorted(unknown)} are not among {members}", file=sys.stderr)
        return 2
    columns = ["checkpoint", "model_type", "positions", "largest error of logits, relative", "texts", "equal texts"]
    table = report.table("float32, beside transformers", columns, map(compare, args.only))
    return 1 if any((row[3] or 0) > LARGEST_ERROR or row[4] != row[5] for row in table.rows) else 0


def compare(member: str) -> list[Cell]:
    """Returns the row of one checkpoint; empty cells for what transformers gave nothing for."""
    directory = GOLDEN / member
    cfg = load_config(directory)
    params = load_params(directory, cfg, dtype=jnp.float32, fp8="dequantize", progress=False)
    golden = _golden(directory)
    known, texts = golden.get("input_ids"), list(_texts(golden))
    width = max([0 if known is None else known.shape[1], *(len(prompt) + len(more) for prompt, more in texts)])
    rows = np.zeros(((0 if known is None else len(known)) + len(texts), width), np.int32)
    if known is not None:
        rows[: len(known), : known.shape[1]] = known
    for row, text in zip(rows[len(rows) - len(texts) :], texts, strict=True):
        row[: sum(map(len, text))] = np.concatenate(text)
    logits = _logits(params, cfg, rows)
    error = None
    if known is not None:
        ours, theirs = logits[: len(known), : known.shape[1]], golden["logits"]
        error = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    best = logits[len(rows) - len(texts) :].argmax(-1)
    equal = [
        (each[len(prompt) - 1 :][: len(more)] == more).all() for each, (prompt, more) in zip(best, texts, strict=True)
    ]
    positions, some = None if known is None else known.size, bool(texts)
    return [member, cfg.family, positions, error, len(texts) if some else None, sum(equal) if some else None]


def _golden(directory: Path) -> dict[str, np.ndarray]:
    if (texts := directory / "greedy.json").exists():
        return json.loads(texts.read_text())
    with np.load(directory / "golden.npz") as file:
        return dict(file)


def _texts(golden: dict[str, np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields prompts and their continuations."""
    for prompt, more in zip(golden.get("prompts", ()), golden.get("greedy", ()), strict=True):
        ids = np.asarray(prompt)
        yield ids[ids >= 0], np.asarray(more)


def _logits(params: Params, cfg: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(_forward(params, cfg=cfg, tokens=jnp.asarray(tokens)).logits)


if __name__ == "__main__":
    run(main)
