"""Owns what lives on the devices and carries out commands; nothing here waits for a device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config import ModelConfig
from dsv3.engine.commands import BalanceCommand, DecodeCommand, MoveCommand, PrefillCommand, StepCommand
from dsv3.engine.config import EngineConfig
from dsv3.engine.programs import Key, Programs
from dsv3.engine.sequence import FULL
from dsv3.engine.state import AdjustRequest
from dsv3.engine.step_bodies import StepFunctions
from sharding.processes import local_part, place
from sharding.rebalance import LayerMove
from sharding.rules import by_rank, rank_mesh, shardings

Results = tuple[jax.Array, ...]
"""Device arrays that will hold sampled tokens, and log-probabilities where they were asked for.

Of a `BalanceCommand`: the experts' load, if it was read, and for each move whether it was carried out.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """The results of a step on its way."""

    prefill: Results | None
    decode: Results | None
    balance: Results | None


class Executor:
    """Parameters, page pools and decode state of all ranks."""

    def __init__(
        self,
        functions: StepFunctions,
        params: Any,
        model_cfg: ModelConfig,
        cfg: EngineConfig,
        devices: list[jax.Device],
    ) -> None:
        if len(devices) != cfg.num_devices:
            raise ValueError(
                f"{cfg.num_ranks} ranks of tensor_parallel_size {cfg.tensor_parallel_size} need {cfg.num_devices} "
                f"devices, but {len(devices)} were given"
            )
        self._cfg, self._experts = cfg, functions.experts
        self._mesh = rank_mesh(devices, cfg.num_nodes, cfg.tensor_parallel_size)
        self._params = place(params, shardings(functions.param_specs, self._mesh))
        self.programs = Programs(functions, model_cfg, cfg, self._mesh, self._params)
        self._pages = self._zeros(self.programs.pages)
        self._state = self._zeros(self.programs.state)
        self._adjust: Any = None

    def launch(self, command: StepCommand) -> Launched:
        """Starts a step and the copies of its results to the host."""
        balance = self._launch_balance(command.balance) if command.balance is not None else None
        prefill = self._launch_prefill(command.prefill) if command.prefill is not None else None
        decode = self._launch_decode(command.decode) if command.decode is not None else None
        return Launched(prefill, decode, balance)

    def _launch_balance(self, command: BalanceCommand) -> Results:
        read = [self._read_load()] if command.read_load else []
        results = (*read, *map(self._move, command.moves))
        for array in results:
            array.copy_to_host_async()
        return results

    def _read_load(self) -> jax.Array:
        load, total = self.programs.get(Key("read_load"))(self._state.load)
        self._state = dataclasses.replace(self._state, load=load)
        return total

    def _move(self, command: MoveCommand) -> jax.Array:
        assert self._experts is not None  # only a `Balancer` of spread experts asks for moves
        move = LayerMove(*(getattr(command, name) for name in LayerMove._fields))
        stacks, placement = self._experts.take(self._params)
        stacks, placement, intact = self.programs.get(Key("move_experts"))(stacks, placement, move)
        self._params = self._experts.put(self._params, stacks, placement)
        return intact

    def _launch_prefill(self, command: PrefillCommand) -> Results:
        program = self.programs.get(Key("prefill", command.tokens.shape[1]))
        self._pages, self._state, logits, slots = program(
            self._params, self._pages, self._state, command.tokens, command.rows
        )
        if command.variant is None:
            # No token to read, but something to wait for: pages are shared once they are written.
            return (local_part(slots),)
        for request in command.adjustments:
            self._set_adjustment(request)
        return self._sample(logits, slots, command.variant, command.logprobs)

    def _launch_decode(self, command: DecodeCommand) -> Results:
        program = self.programs.get(Key("decode", command.batch.shape[1]))
        self._pages, self._state, logits, slots = program(self._params, self._pages, self._state, command.batch)
        return self._sample(logits, slots, command.variant, command.logprobs)

    def _sample(self, logits: jax.Array, slots: jax.Array, variant: int, logprobs: bool) -> Results:
        rows = logits.shape[1]
        program = self.programs.get(Key("sample", rows, variant))
        adjust = self._adjust_state() if variant == FULL else None
        self._state, adjust, tokens, *of_all = program(self._state, adjust, logits, slots)
        if variant == FULL:
            self._adjust = adjust
        results = tuple(of_all) or (tokens,)
        if logprobs:
            results += self.programs.get(Key("logprobs", rows))(logits, tokens)
        for array in results:
            array.copy_to_host_async()
        return results

    def _set_adjustment(self, request: AdjustRequest) -> None:
        arrays = (getattr(request, field.name) for field in dataclasses.fields(request))
        self._adjust = self.programs.get(Key("adjust"))(self._adjust_state(), *arrays)

    def _adjust_state(self) -> Any:
        """Made when first needed: it takes 5 bytes a slot and vocabulary entry."""
        if self._adjust is None:
            self._adjust = self.programs.get(Key("new_adjust"))(np.zeros(self._cfg.num_ranks, np.int32))
        return self._adjust

    def _zeros(self, shapes: Any) -> Any:
        sharding = by_rank(self._mesh)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=sharding), shapes)
