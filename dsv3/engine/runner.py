"""Between the scheduler's plans and the devices: plans become commands, results become tokens."""

import dataclasses
from typing import Any

import jax
import numpy as np

from dsv3.config import ModelConfig
from dsv3.engine import executor
from dsv3.engine.commands import command_of
from dsv3.engine.config import EngineConfig
from dsv3.engine.executor import Executor
from dsv3.engine.plan import StepPlan
from dsv3.engine.programs import Programs
from dsv3.engine.results import Sampled
from dsv3.engine.step_bodies import StepFunctions


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """A plan under way, and its results when they come."""

    plan: StepPlan
    prefill: executor.Results | None
    decode: executor.Results | None


class Runner:
    """Launches plans; nothing here waits for a device but `fetch`."""

    def __init__(
        self,
        functions: StepFunctions,
        params: Any,
        model_cfg: ModelConfig,
        cfg: EngineConfig,
        devices: list[jax.Device],
    ) -> None:
        self._cfg, self._vocab_size = cfg, model_cfg.vocab_size
        self.executor = Executor(functions, params, model_cfg, cfg, devices)

    @property
    def programs(self) -> Programs:
        return self.executor.programs

    def launch(self, plan: StepPlan) -> Launched:
        """Starts a step."""
        launched = self.executor.launch(command_of(plan, self._cfg, self._vocab_size))
        return Launched(plan, launched.prefill, launched.decode)

    @staticmethod
    def fetch(results: executor.Results | None) -> Sampled | None:
        """Waits for the results of one program."""
        return Sampled(*(np.asarray(array) for array in results)) if results is not None else None
