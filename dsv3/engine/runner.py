"""Owns what lives on the device and launches steps; nothing here waits for the device but `fetch`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config import ModelConfig
from dsv3.engine.config import EngineConfig
from dsv3.engine.plan import DecodePlan, PrefillPlan, StepPlan
from dsv3.engine.programs import Key, Programs
from dsv3.engine.results import Sampled
from dsv3.engine.sequence import FULL
from dsv3.engine.state import adjust_request, control_row
from dsv3.engine.step_bodies import PREFILL_HEADER, StepFunctions
from sharding.rules import by_rank, rank_mesh, shardings


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way: device arrays that will hold the sampled tokens and log-probabilities."""

    plan: StepPlan
    prefill: tuple[jax.Array, ...] | None
    decode: tuple[jax.Array, ...] | None


class Runner:
    """Parameters, page pools and decode state of all ranks, one device a rank."""

    def __init__(
        self,
        functions: StepFunctions,
        params: Any,
        model_cfg: ModelConfig,
        cfg: EngineConfig,
        devices: list[jax.Device],
    ) -> None:
        if len(devices) != cfg.num_ranks:
            raise ValueError(f"num_ranks is {cfg.num_ranks}, but {len(devices)} devices were given")
        self._cfg, self._model_cfg = cfg, model_cfg
        self._mesh = rank_mesh(devices, cfg.num_nodes)
        self._params = jax.device_put(params, shardings(functions.param_specs, self._mesh))
        dtype = jnp.dtype(cfg.cache_dtype)
        self.programs = Programs(functions, model_cfg, cfg, self._mesh, self._params, dtype)
        self._pages = self._zeros(self.programs.pages)
        self._state = self._zeros(self.programs.state)
        self._adjust: Any = None

    def _zeros(self, shapes: Any) -> Any:
        sharding = by_rank(self._mesh)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=sharding), shapes)

    def launch(self, plan: StepPlan) -> Launched:
        """Starts a step and the copies of its results to the host."""
        prefill = self._launch_prefill(plan.prefill) if plan.prefill is not None else None
        decode = self._launch_decode(plan.decode) if plan.decode is not None else None
        return Launched(plan, prefill, decode)

    @staticmethod
    def fetch(results: tuple[jax.Array, ...] | None) -> Sampled | None:
        """Waits for the results of one program."""
        return Sampled(*(np.asarray(array) for array in results)) if results is not None else None

    def _launch_prefill(self, plan: PrefillPlan) -> tuple[jax.Array, ...]:
        tokens, rows = self._prefill_arrays(plan)
        program = self.programs.get(Key("prefill", plan.tokens))
        self._pages, self._state, logits, slots = program(self._params, self._pages, self._state, tokens, rows)
        if not len(plan.sampled.slots):
            return (slots,)  # no token to read, but something to wait for: pages are shared once they are written
        if plan.variant == FULL:
            self._set_adjustments(plan)
        return self._sample(logits, slots, plan.variant, plan.logprobs)

    def _launch_decode(self, plan: DecodePlan) -> tuple[jax.Array, ...]:
        program = self.programs.get(Key("decode", plan.batch.shape[1]))
        self._pages, self._state, logits, slots = program(self._params, self._pages, self._state, plan.batch)
        return self._sample(logits, slots, plan.variant, plan.logprobs)

    def _sample(self, logits: jax.Array, slots: jax.Array, variant: int, logprobs: bool) -> tuple[jax.Array, ...]:
        rows = logits.shape[1]
        program = self.programs.get(Key("sample", rows, variant))
        adjust = self._adjust_state() if variant == FULL else None
        self._state, adjust, tokens = program(self._state, adjust, logits, slots)
        if variant == FULL:
            self._adjust = adjust
        results = (tokens, *self.programs.get(Key("logprobs", rows))(logits, tokens)) if logprobs else (tokens,)
        for array in results:
            array.copy_to_host_async()
        return results

    def _adjust_state(self) -> Any:
        """Made when first needed: it takes 5 bytes a slot and vocabulary entry."""
        if self._adjust is None:
            self._adjust = self.programs.get(Key("new_adjust"))(np.zeros(self._cfg.num_ranks, np.int32))
        return self._adjust

    def _set_adjustments(self, plan: PrefillPlan) -> None:
        program = self.programs.get(Key("adjust"))
        for chunk in (c for mine in plan.chunks for c in mine):
            if chunk.is_last and chunk.sequence.variant == FULL:
                request = adjust_request(chunk.sequence, self._cfg, self._model_cfg.vocab_size)
                arrays = (getattr(request, field.name) for field in dataclasses.fields(request))
                self._adjust = program(self._adjust_state(), *arrays)

    def _prefill_arrays(self, plan: PrefillPlan) -> tuple[np.ndarray, np.ndarray]:
        cfg = self._cfg
        tokens = np.zeros((cfg.num_ranks, plan.tokens), np.int32)
        rows = np.zeros((cfg.num_ranks, cfg.prefill_rows(plan.tokens), PREFILL_HEADER + cfg.pages_per_seq), np.int32)
        rows[..., 0] = cfg.max_num_seqs
        for rank, chunks in enumerate(plan.chunks):
            at = 0
            for i, chunk in enumerate(chunks):
                sequence, count = chunk.sequence, chunk.stop - chunk.start
                tokens[rank, at : at + count] = sequence.tokens[chunk.start : chunk.stop]
                at += count
                rows[rank, i, :4] = (sequence.slot % cfg.max_num_seqs, count, chunk.start, chunk.is_last)
                rows[rank, i, 4:PREFILL_HEADER] = control_row(sequence)
                rows[rank, i, PREFILL_HEADER : PREFILL_HEADER + len(sequence.pages)] = sequence.pages
        return tokens, rows
