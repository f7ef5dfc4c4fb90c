"""What log-probabilities of prompts cost those who ask for them, and those who do not.

  python -m benchmarks.prompt_logprobs [--rounds 9] [--prompts 8] [--length 512]

The bundled model on this machine's CPU, in one run, in turns. First whole requests of `--length` tokens that want one
token: with `prompt_logprobs=1`, and without. Then the prefill program of the largest bucket by itself: as it is, where
it leaves the hidden states of its tokens, and as it would be without them.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dsv3 import LLM, SamplingParams
from dsv3.engine.device.programs import Key
from dsv3.engine.jobs import prefill

_HIDDEN = 3  # the place of hidden states in what the program returns


def main() -> None:
    """Prints medians and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("rounds", 9), ("prompts", 8), ("length", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    llm = LLM(enable_prefix_caching=False, max_model_len=2048, progress=False)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, 3000, args.length).tolist() for _ in range(args.prompts)]
    plain, asking = SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, prompt_logprobs=1)
    without, with_them = _in_turns(
        args.rounds, lambda: llm.generate(prompts, plain), lambda: llm.generate(prompts, asking)
    )
    rate = args.prompts * args.length
    print(f"requests without: {rate / without:.0f} prompt tokens/s; asking: {rate / with_them:.0f}")
    print(f"asking takes {with_them / without:.2f} times as long")
    bucket = max(key.size for key in _prefill_keys(llm))
    kept, dropped = _in_turns(args.rounds, *_prefills(llm, bucket))
    print(f"prefill of {bucket} tokens: {kept * 1e3:.2f} ms, {dropped * 1e3:.2f} ms without its hidden states")
    print(f"handing them on takes {kept / dropped:.3f} times as long")


def _in_turns(rounds: int, *works: Callable[[], Any]) -> list[float]:
    """Returns the median seconds of each; one round comes before and does not count."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(rounds + 1):
        for work, taken in zip(works, seconds, strict=True):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken[1:]) for taken in seconds]


def _prefill_keys(llm: LLM) -> list[Key]:
    """Returns the prefill programs of the engine."""
    programs = llm.engine.executor.devices.programs  # type: ignore[attr-defined]
    return [key for key in programs.keys() if key.kind == prefill.NAME]  # noqa: SIM118


def _prefills(llm: LLM, bucket: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns the launch of a full batch: of the program as it is, and of one that keeps its hidden states."""
    devices = llm.engine.executor.devices  # type: ignore[attr-defined]
    spec = devices.programs.spec(next(key for key in _prefill_keys(llm) if key.size == bucket))

    def without(*arguments: Any) -> Any:
        results = spec.body(*arguments)
        return results[:_HIDDEN] + results[_HIDDEN + 1 :]

    rows = np.zeros(spec.arguments[-1].shape, np.int32)
    rows[0, 0, :4] = 0, bucket, 0, -1
    rows[0, 0, prefill.HEADER :] = np.arange(rows.shape[-1] - prefill.HEADER) % devices.layout.cfg.num_pages
    rows[0, 1:, 0] = devices.layout.cfg.max_num_seqs
    tokens = np.arange(bucket, dtype=np.int32)[None] % 3000

    def launched(body: Callable[..., Any]) -> Callable[[], None]:
        compiled = jax.jit(body, donate_argnums=spec.donated).lower(*spec.arguments).compile()
        held = [devices.zeros(devices.layout.pages), devices.zeros(devices.layout.state)]

        def launch() -> None:
            held[:] = compiled(devices.params, *held, tokens, rows)[:2]
            jax.block_until_ready(held)

        return launch

    return launched(spec.body), launched(dataclasses.replace(spec, body=without).body)


if __name__ == "__main__":
    main()
