"""What drafts could gain at most where reading weights is all that takes time: arithmetic, nothing is measured.

    python -m benchmarks.draft_bound [--acceptance 0.96]

A step reads each weight once, however many rows it has, and a routed expert where a row chooses it. With drafts it also
reads the module and, for each draft, the head. Speed is tokens per row over what is read, both over those of a step
without drafts. "Own experts": each row chooses for itself, so more rows read more experts. "Same experts": all rows of
a request choose alike, which no drafts can better.
"""

import argparse
import math

import jax

from configs.deepseek_v3 import DEEPSEEK_V3
from dsv3.config.hugging_face import load_config
from dsv3.config.model import ModelConfig
from dsv3.engine.build import bundled_model
from dsv3.model.params import declare

DRAFTS = (1, 2, 3)
REQUESTS = {"bundled model": (1, 4, 16), "DeepSeek-V3": (1, 16, 256)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--acceptance", type=float, default=0.96, help="share of drafts accepted behind accepted ones")
    acceptance = parser.parse_args().acceptance
    models = {"bundled model": load_config(bundled_model()), "DeepSeek-V3": DEEPSEEK_V3}
    print("| model | requests | drafts | tokens per row | speed at most, own experts | same experts |")
    print("|---|---|---|---|---|---|")
    for name, cfg in models.items():
        for requests in REQUESTS[name]:
            for drafts in DRAFTS:
                tokens = sum(acceptance**place for place in range(drafts + 1))
                speeds = [tokens * read(cfg, requests, 0) / read(cfg, requests, drafts, same) for same in (False, True)]
                print(f"| {name} | {requests} | {drafts} | {tokens:.2f} | {speeds[0]:.2f} | {speeds[1]:.2f} |")


def read(cfg: ModelConfig, requests: int, drafts: int, same_experts: bool = False) -> float:
    """Returns how many weights a step reads, all of one width."""
    specs = declare(cfg)
    rows = requests * (1 if same_experts else 1 + drafts)
    head = cfg.vocab_size * cfg.hidden_size
    main = head + _read(cfg, (specs.dense, specs.moe), rows)
    chained = _read(cfg, specs.mtp, requests)  # a further draft: one row per request
    return main + (drafts > 0) * (_read(cfg, specs.mtp, rows) + (drafts - 1) * chained + drafts * head)


def _read(cfg: ModelConfig, specs: object, rows: int) -> float:
    """Returns how many weights of these layers `rows` rows read, which choose their experts independently."""
    share = 1 - (1 - cfg.num_experts_per_tok / cfg.n_routed_experts) ** rows
    return sum(math.prod(spec.shape) * (share if "experts" in spec.axes else 1.0) for spec in jax.tree.leaves(specs))


if __name__ == "__main__":
    main()
