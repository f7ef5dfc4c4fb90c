"""Has a decode instance gather the ends of prompts, so that few of its steps pay for computing them. Imports no jax.

Another instance has computed a prompt's whole pages, which leaves 1 to 64 tokens. The program for these reads the same
weights and crosses the same links for one prompt as for hundreds: 46 ms beside a decode step of 76 ms in DeepSeek's
unit of 144 GPUs, where some prompt comes in nearly every step (docs/fleet.md). All requests that run pay for it, and
prompts that wait pay for waiting. So they wait until both have come to the same: nobody can do better than half without
knowing who comes next.
"""

MOST_STEPS = 8
"""A prompt waits for so many steps at most: 0.6 s of DeepSeek's unit."""
_STEPS_COST = 0.5  # decode steps that the program takes


class Gathering:
    """Says whether the prompts of a step wait for the next one."""

    def __init__(self) -> None:
        self._steps = self._waited = 0

    def waits(self, prompts: int, running: int) -> bool:
        """Returns whether `prompts` wait for one more step, beside `running` requests that have another token in it."""
        self._steps, self._waited = self._steps + 1, self._waited + prompts
        if self._steps <= MOST_STEPS and self._waited < _STEPS_COST * running:
            return True
        self._steps = self._waited = 0
        return False
