"""Checks from shapes alone whether a model fits this machine's device with default options, as a server would."""

import sys
from pathlib import Path

from dsv3.config.options import EngineOptions
from dsv3.engine.build import load_components
from dsv3.engine.memory import GB, local_bytes
from dsv3.logs import configure_logging
from tools.doctor.install import free_bytes
from tools.doctor.rows import CaseResult, run_cases


def memory(directory: Path) -> CaseResult:
    """Returns the account of a device's memory. Raises ValueError where not a page fits, which says what to change."""
    parts = load_components(directory, EngineOptions(), progress=False, shapes=True)
    print(parts.description, file=sys.stderr)
    cfg = parts.cfg
    figures = {"tokens": float(cfg.num_pages * cfg.page_size), "tokens per request": float(cfg.max_model_len)}
    if parts.memory is None:
        weights, free = local_bytes(parts.shapes.params), free_bytes()
        figures |= {"weights GB": weights / GB, "free GB": free / GB}
        says = "on a CPU the cache takes 1 GiB beside the weights"
        lacks = weights + 2**30 > free  # false where it is not known
        if lacks:
            says = f"{weights / GB:.2f} GB of weights and a cache of 1 GiB do not fit {free / GB:.2f} GB of free memory"
        return CaseResult("memory", not lacks, says, figures)
    found = parts.memory.account
    sizes = ("total", "pool", "weights", "state", "working", "cache")
    figures |= {f"{name} GB": getattr(found, name) / GB for name in sizes}
    return CaseResult("memory", True, str(found), figures)


if __name__ == "__main__":
    configure_logging()
    sys.exit(run_cases({"memory": lambda: memory(Path(sys.argv[1]))}))
