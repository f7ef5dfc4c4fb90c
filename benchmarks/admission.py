"""What admission costs per step while many requests wait, with prompts that share a prefix or share nothing.

One request computes the shared prefix of 64 pages, chunk by chunk; the others wait for it. Without sharing they wait
because slots are taken. Prints microseconds of the engine's thread in `Scheduler.admit`, median and largest step.

  python -m benchmarks.admission [--waiting 1024] [--ranks 8] [--rounds 5]
"""

import argparse
import statistics
import time

from dsv3.config.engine import EngineConfig
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineRequest, RequestRules, prepare
from dsv3.scheduler.scheduler import Scheduler
from dsv3.scheduler.sequence import make_sequence

PAGES, STEPS = 64, 100


def measure(waiting: int, ranks: int, shared: bool) -> tuple[float, float]:
    """Returns microseconds of the median and of the largest step."""
    slots = 2 * waiting if shared else 1
    cfg = EngineConfig(max_model_len=8192, num_pages=65 * 2 * waiting, max_num_seqs=slots, num_ranks=ranks)
    scheduler, rules = Scheduler(cfg, 1000), RequestRules(vocab_size=1000, max_model_len=8192)
    for i in range(waiting + ranks):
        first = 2 if shared else i % 900
        prompt = [first] * (PAGES * 64) + [i % 900]
        request = EngineRequest(request_id=i, prompt_token_ids=prompt, sampling=SamplingParams())
        scheduler.add(make_sequence(prepare(request, rules)))
    scheduler.admit()
    times = []
    for _ in range(STEPS):
        started = time.thread_time()
        scheduler.admit()
        times.append(1e6 * (time.thread_time() - started))
    assert len(scheduler.queue) >= waiting - ranks
    return statistics.median(times), max(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("waiting", 1024), ("ranks", 8), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    for _ in range(arguments.rounds):
        with_prefix = measure(arguments.waiting, arguments.ranks, shared=True)
        without = measure(arguments.waiting, arguments.ranks, shared=False)
        print(f"shared: {with_prefix[0]:.1f} us (at most {with_prefix[1]:.1f}), not shared: {without[0]:.1f} us")


if __name__ == "__main__":
    main()
