"""Shapes and shardings of everything on the devices, and programs over them; holds no array, so it needs no device.

An instance reserves multiprocessors for transfers: one number for its kernels, NCCL and `launch.plan`. In an overlapped
step (`dsv3.model.schedules`) transfers run beside kernels. NCCL's are kernels themselves, one thread block per channel,
and each of our kernels fills a multiprocessor. So ours leave as many multiprocessors as NCCL may have channels, and
communicators whose transfers are in flight at once divide these. All programs of an instance have the same numbers:
they share NCCL's communicators, which keep the setting of the first program that runs.

Prefill reserves what DeepSeek's does: 24 of 132 (its profile: 108 compute). Decode over 144 GPUs sends 70 MB per layer
in an estimated 1.35 ms, 52 GB/s. A channel is assumed to carry 15 GB/s, so 8 are twice that. None of this has been
measured.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dsv3.config.device_rates import Peaks, peaks_of
from dsv3.config.engine import EngineConfig, ForwardProgram
from dsv3.engine.components import EngineComponents
from dsv3.engine.device import state as device_state
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.device.state import DecodeState, chunk_columns
from dsv3.kv_cache.layout import groups_of, pool
from dsv3.model.batch import AttentionForm
from dsv3.model.forms import applies
from dsv3.model.steps import StepOutput
from pallas_kernels import gpus
from pallas_kernels.multiprocessors import Multiprocessors, taking
from sharding.mesh import PAGES_SPEC, RANK_SPEC
from sharding.processes import on_every_rank

PREFILL_RESERVE = 24
"""Multiprocessors that an instance with overlapped prefill steps reserves for transfers."""

DECODE_RESERVE = 8
"""The same for an instance that overlaps decode steps only."""


@dataclasses.dataclass(frozen=True)
class Reserve:
    """Which programs of an instance reserve multiprocessors for transfers, and how many.

    `overlapped` has kind and size of each; at most `communicators` have transfers in flight at once in one of them.
    """

    beside_transfers: Multiprocessors
    overlapped: frozenset[tuple[str, int]]
    communicators: int

    @property
    def channels(self) -> int:
        """NCCL's channels of each communicator; 0, which leaves them to NCCL, if nothing is reserved."""
        reserved = self.beside_transfers.reserved
        return max(1, reserved // self.communicators) if reserved else 0

    def of(self, kind: str, size: int) -> Multiprocessors:
        """Returns the multiprocessors of a program's kernels, and those it reserves for transfers."""
        own = self.beside_transfers
        return own if (kind, size) in self.overlapped else dataclasses.replace(own, reserved=0)


def reserve(cfg: EngineConfig, overlaps: Callable[[ForwardProgram], int] | None, count: int) -> Reserve:
    """Returns the reserve of an instance on devices of `count` multiprocessors.

    `overlaps` is that of `dsv3.engine.functions.StepFunctions`. Raises ValueError where `cfg` leaves kernels no
    multiprocessor.
    """
    found = [(p, 0 if overlaps is None else overlaps(p)) for p in cfg.forward_programs]
    overlapped = frozenset((p.kind, p.size) for p, communicators in found if communicators)
    wanted = cfg.reserved_multiprocessors
    if wanted is None:
        wanted = PREFILL_RESERVE if any(kind == "prefill" for kind, _ in overlapped) else DECODE_RESERVE
    most = max((communicators for _, communicators in found), default=0)
    return Reserve(Multiprocessors(count, wanted if overlapped else 0), overlapped, most)


Gathered = Literal["none", "last", "all"]
"""Which results of a program every process can read in an instance of several: none, a copy of the last, or all."""


class Layout:
    """Shapes of parameters, page pools and decode state of all ranks, and how a program is mapped over them.

    Arrays have a leading rank axis, except for parameters, whose shapes and shardings are those of `components`.
    """

    def __init__(self, components: EngineComponents) -> None:
        self.functions, self.model_cfg, self.cfg, self.mesh = (
            components.functions,
            components.model_cfg,
            components.cfg,
            components.mesh,
        )
        self.takes_grammars = components.tokenizer is not None
        self.rank_sharding, self.spans_processes = NamedSharding(self.mesh, RANK_SPEC), self.mesh.is_multi_process
        self.params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), components.params
        )
        cfg = self.cfg
        one = pool(self.model_cfg, cfg.cache_dtype, cfg.num_pages, cfg.num_window_pages, cfg.max_num_seqs)
        lasting = {group.name for group in groups_of(self.model_cfg, cfg.cache_dtype, "context")}
        self.pages = {name: self._pool_array(leaf, divides=name in lasting) for name, leaf in one.items()}
        experts = self.functions.experts
        counters = None if experts is None else experts.num_counters(len(cfg.forward_programs))
        self.state = self.sharded(device_state.decode_state_shapes(self.cfg, counters))
        self.reserve = reserve(self.cfg, self.functions.overlaps, gpus.multiprocessors(self.mesh.devices.flat[0]))

    @property
    def platform(self) -> str:
        """The devices' platform: `cpu` or `cuda`."""
        return self.mesh.devices.flat[0].platform

    @property
    def peaks(self) -> Peaks:
        """Peak rates of the devices."""
        return peaks_of(self.mesh.devices.flat[0].device_kind)

    @functools.cached_property
    def longest(self) -> int:
        """The most tokens that a request can have, in whole pages."""
        return self.cfg.pages_per_seq * self.cfg.page_size

    @functools.cached_property
    def forms(self) -> tuple[AttentionForm, ...]:
        """The forms of attention that may suit a step, in order of preference."""
        given, invariant = (self.model_cfg, self.platform, self.longest), self.cfg.batch_invariant
        return tuple(form for form in AttentionForm if applies(form, *given, batch_invariant=invariant))

    @property
    def num_local_ranks(self) -> int:
        """Ranks whose part of a command this process executes."""
        return self.cfg.num_ranks // self.cfg.num_processes if self.spans_processes else self.cfg.num_ranks

    @property
    def first_local_rank(self) -> int:
        """The first of these ranks."""
        return self.cfg.ranks_of(jax.process_index()).start if self.spans_processes else 0

    @property
    def sampled_shapes(self) -> list[tuple[int, int]]:
        """Rows and tokens per row of every batch that is sampled."""
        cfg = self.cfg
        sizes = {(rows, 1) for rows in map(cfg.prefill_rows, cfg.prefill_buckets)}
        return sorted(sizes | {(rows, cfg.width(rows)) for rows in cfg.decode_buckets})

    def draft_input(self, result: Any) -> jax.Array | None:
        """Returns what a module or stages take of the tokens of a forward pass, `[..., draft_input_width]`.

        Of a model with one residual stream it is their hidden states; None where the model makes no drafts.
        """
        if self.functions.draft is None:
            return None
        return result.draft_input if self.model_cfg.hyper_connections is not None else result.hidden

    def routed_experts(self, result: Any) -> jax.Array | None:
        """Returns the experts of the tokens of a forward pass; None where the engine does not return them."""
        return result.routed_experts if self.cfg.enable_return_routed_experts else None

    def scores(self, rows: int, width: int) -> jax.ShapeDtypeStruct:
        """Returns the shape of the scores of a sampled batch, over all ranks."""
        ranks = self.functions.vocabulary.ranks
        return self.array(ranks, rows, width, self.model_cfg.vocab_size // ranks, dtype=jnp.float32)

    def update_counters(self, state: DecodeState, result: StepOutput, program: int) -> DecodeState:
        """Returns the state with the experts' counters after a pass of forward program number `program`."""
        if (experts := self.functions.experts) is None:
            return state
        stack = int(self.cfg.forward_programs[program].of_module)
        return dataclasses.replace(state, counters=experts.count(state.counters, result, program, stack))

    def sampling_slots(self, slots: jax.Array, result: StepOutput) -> jax.Array:
        """Returns the slots `[B]` to sample after a forward pass: all `retry_slot` where it overflowed."""
        return jnp.where(result.overflows > 0, self.retry_slot, slots) if self.functions.may_overflow else slots

    @property
    def padding_slot(self) -> int:
        """The slot of a padding row: what a program writes there is dropped."""
        return self.cfg.max_num_seqs

    @property
    def padding_chunk(self) -> np.ndarray:
        """A row of a prefill batch without a chunk, `[columns]` int32."""
        row = np.zeros(chunk_columns(self.cfg), np.int32)
        row[0] = self.padding_slot
        return row

    @property
    def retry_slot(self) -> int:
        """The slot of every row of a forward pass that must be repeated. Like that of padding it is out of range."""
        return self.cfg.max_num_seqs + 1

    def _pool_array(self, one: jax.ShapeDtypeStruct, divides: bool) -> jax.ShapeDtypeStruct:
        """Returns the shape of a pool over all ranks; devices of a rank divide its pages, or replicate them."""
        spec = PAGES_SPEC if divides and self.cfg.decode_context_parallel_size > 1 else RANK_SPEC
        shape = (self.cfg.num_ranks, *one.shape)
        return jax.ShapeDtypeStruct(shape, one.dtype, sharding=NamedSharding(self.mesh, spec))

    def array(self, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """Returns the shape of an array over all ranks, given one rank's."""
        return self.sharded(jax.ShapeDtypeStruct((self.cfg.num_ranks, *shape), dtype))

    def chunks(self, size: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Returns the shapes of a prefill batch of bucket `size`: tokens `[T]`, and chunks `[B, columns]`."""
        return self.array(size), self.array(self.cfg.prefill_rows(size), chunk_columns(self.cfg))

    def sharded(self, tree: Any) -> Any:
        """Returns a tree of shapes with the sharding of arrays whose leading axis is the rank."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.rank_sharding), tree)

    def per_rank(
        self,
        key: Key,
        body: Callable[..., Any],
        arguments: tuple[Any, ...],
        donated: tuple[int, ...] = (),
        *,
        takes_params: bool = False,
        gathered: Gathered = "none",
        padding: Mapping[int, Any] | None = None,
    ) -> ProgramSpec:
        """Returns the program that runs `body`, written for one rank without the rank axis, on all of them.

        With `takes_params` the first argument is the parameters. `gathered` copies are appended ("last") or replace the
        results ("all"), only in an instance of several processes. `padding` is the program's.
        """
        split, changed = 1 if takes_params else 0, len(donated)
        share, out_specs = self._shared(gathered)
        of_ranks = [jax.tree.map(lambda x: x.sharding.spec, argument) for argument in arguments[split:]]
        specs: list[Any] = [self.functions.param_specs, *of_ranks] if takes_params else of_ranks
        divides = any(spec == PAGES_SPEC for number in donated for spec in jax.tree.leaves(specs[number]))
        if divides:  # the first results are the new values of the donated arguments
            out_specs = (tuple(specs[number] for number in donated), out_specs)

        def one_rank(*args: Any) -> Any:
            mine = jax.tree.map(lambda x: x[0], args[split:])
            out = share(jax.tree.map(lambda x: x[None], body(*args[:split], *mine)))
            return (out[:changed], out[changed:]) if divides else out

        spec = self.mapped(key, one_rank, arguments, donated, tuple(specs), out_specs, padding)
        if not divides:
            return spec
        return dataclasses.replace(spec, body=lambda *args: sum(spec.body(*args), ()))

    def mapped(
        self,
        key: Key,
        body: Callable[..., Any],
        arguments: tuple[Any, ...],
        donated: tuple[int, ...],
        in_specs: tuple[Any, ...],
        out_specs: Any,
        padding: Mapping[int, Any] | None = None,
    ) -> ProgramSpec:
        """Returns a program whose `body` gets one device's part of arrays partitioned by the specs.

        Its kernels leave to transfers what `reserve` says.
        """

        def body_of_device(*args: Any) -> Any:
            with taking(self.reserve.of(key.kind, key.size)):
                return body(*args)

        mapped = jax.shard_map(body_of_device, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return ProgramSpec(key, mapped, arguments, donated, padding or {})

    def _shared(self, gathered: Gathered) -> tuple[Callable[[Any], Any], Any]:
        """Returns the last operation of a program, and the partitions of its results."""
        if not self.spans_processes or gathered == "none":
            return lambda out: out, RANK_SPEC
        if gathered == "all":
            return on_every_rank, PartitionSpec()
        return lambda out: (*out, on_every_rank(out[-1])), (*[RANK_SPEC] * 3, PartitionSpec())
