"""Between the scheduler's plans and the devices: plans become commands, results become tokens."""

import dataclasses
from typing import Any, Protocol

import jax
import numpy as np

from dsv3.config import ModelConfig
from dsv3.engine import executor
from dsv3.engine.commands import BalanceCommand, StepCommand, command_of
from dsv3.engine.config import EngineConfig
from dsv3.engine.executor import Executor
from dsv3.engine.plan import StepPlan
from dsv3.engine.programs import Programs
from dsv3.engine.results import Sampled
from dsv3.engine.step_bodies import StepFunctions


class Link(Protocol):
    """The other processes of an instance; `dsv3.engine.cluster.leader.Leader` is one."""

    def send(self, command: StepCommand) -> None:
        """Has them execute a command too; does not wait. Raises when the instance has failed."""

    def launched(self, number: int) -> None:
        """Notes that this process has launched step `number`, as they should soon have."""

    def results(self, number: int, results: list[np.ndarray]) -> None:
        """Notes what was read of step `number`, which they must have read too. Raises when the instance has failed."""

    def explain(self, error: Exception) -> Exception:
        """What to raise for an error of a step, which another process may have caused."""


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """A plan under way, what is done about balance with it, and the results when they come."""

    plan: StepPlan
    balance: BalanceCommand | None
    prefill: executor.Results | None
    decode: executor.Results | None
    balanced: executor.Results | None


class Runner:
    """Launches plans; nothing here waits for a device but `fetch`. With a `link`, other processes launch them too."""

    def __init__(
        self,
        functions: StepFunctions,
        params: Any,
        model_cfg: ModelConfig,
        cfg: EngineConfig,
        devices: list[jax.Device],
        link: Link | None = None,
    ) -> None:
        self._cfg, self._vocab_size = cfg, model_cfg.vocab_size
        self._link = link
        self.executor = Executor(functions, params, model_cfg, cfg, devices)

    @property
    def programs(self) -> Programs:
        return self.executor.programs

    def launch(self, plan: StepPlan, balance: BalanceCommand | None = None) -> Launched:
        """Starts a step."""
        command = command_of(plan, self._cfg, self._vocab_size, balance)
        if self._link is not None:
            self._link.send(command)  # first, so that the others do not wait for this process's launch
        try:
            launched = self.executor.launch(command)
        except Exception as error:
            raise self._explained(error) from error
        if self._link is not None:
            self._link.launched(command.number)
        return Launched(plan, balance, launched.prefill, launched.decode, launched.balance)

    def fetch(self, results: executor.Results | None) -> Sampled | None:
        """Waits for the results of one program."""
        return Sampled(*self.fetch_arrays(results)) if results is not None else None

    def fetch_arrays(self, results: executor.Results) -> list[np.ndarray]:
        """Waits for arrays."""
        try:
            return [np.asarray(array) for array in results]
        except Exception as error:
            raise self._explained(error) from error

    def agree(self, launched: Launched, prefill: Sampled | None, decode: Sampled | None) -> None:
        """Has the results of a step compared with what the other processes have read; raises once they differ."""
        if self._link is not None:
            plan = launched.plan
            samples = plan.prefill is not None and len(plan.prefill.sampled.slots) > 0
            self._link.results(plan.number, [*_arrays(prefill if samples else None), *_arrays(decode)])

    def _explained(self, error: Exception) -> Exception:
        return error if self._link is None else self._link.explain(error)


def _arrays(sampled: Sampled | None) -> list[np.ndarray]:
    fields = () if sampled is None else (sampled.tokens, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
    return [array for array in fields if array is not None]
