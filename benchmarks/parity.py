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
from dsv3.model.forward import forward

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
    known, texts = np.asarray(golden.get("input_ids", np.zeros((0, 0), np.int32))), list(_texts(golden))
    rows = [*known, *map(np.concatenate, texts)]
    width = max(map(len, rows))
    tokens = np.array([np.pad(row, (0, width - len(row))) for row in rows], np.int32)
    logits = np.asarray(_forward(params, cfg=cfg, tokens=jnp.asarray(tokens)).logits)
    ours, best = logits[: len(known), : known.shape[1]], logits[len(known) :].argmax(-1)
    error = float(np.abs(ours - golden["logits"]).max() / np.abs(golden["logits"]).max()) if known.size else None
    equal = [(row[len(ids) - 1 :][: len(more)] == more).all() for row, (ids, more) in zip(best, texts, strict=True)]
    return [member, cfg.family, known.size or None, error, len(texts) or None, sum(equal) if texts else None]


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


if __name__ == "__main__":
    run(main)
