"""transformers' batch `generate` in a process of its own, on command: what `benchmarks.cpu_peers` measures it by.

The interpreter that runs it has transformers and torch, and nothing of ours. It generates greedily, with as many
threads as there are cores, and its sequences start and end together: the best case of a batch.
"""

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

_WORKER = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging
logging.set_verbosity_error()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2])).eval()
for line in sys.stdin:
    job = json.loads(line)
    prompts = torch.tensor(job["prompts"])
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=job["tokens"],
                       min_new_tokens=job["tokens"], do_sample=False, pad_token_id=0)
    print(json.dumps(time.perf_counter() - started), flush=True)
"""

Generate = Callable[[np.ndarray, int], float]
"""Takes prompts `[requests, tokens]` and the number of tokens to generate for each; returns the seconds it took."""


@contextlib.contextmanager
def generating(python: Path, model: Path, dtype: str) -> Iterator[Generate]:
    """Starts `python` with the worker and yields what generates in it; the first call waits until `model` is loaded."""
    command = [str(python), "-c", _WORKER, str(model), dtype]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        jobs, answers = process.stdin, process.stdout

        def generate(prompts: np.ndarray, tokens: int) -> float:
            jobs.write(json.dumps({"prompts": prompts.tolist(), "tokens": tokens}) + "\n")
            jobs.flush()
            line = answers.readline()
            if not line:
                raise RuntimeError(f"transformers ended with {process.wait()}")
            return json.loads(line)

        yield generate
