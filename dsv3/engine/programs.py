"""The compiled programs: a table by kind and bucket, filled before the first request."""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv3.cache.layout import pool
from dsv3.config import ModelConfig
from dsv3.engine import state as device_state
from dsv3.engine import step_bodies
from dsv3.engine.config import EngineConfig
from dsv3.engine.sequence import FULL, GREEDY, SAMPLED
from dsv3.engine.step_bodies import StepFunctions
from sharding.collectives import compiler_options
from sharding.processes import on_every_rank, spans_processes
from sharding.rebalance import LayerMove, move_layer
from sharding.rules import by_rank, of_ranks

_log = logging.getLogger(__name__)
Progress = Callable[[int, int, str], None]
"""Called as `progress(done, total, what)` at the start and after each program."""

_COMPILE_THREADS = 8  # tracing holds the interpreter lock, so more would only wait


class Key(NamedTuple):
    """Names a program: `size` is the bucket (tokens of a prefill, rows of the others), `variant` the sampler's."""

    kind: Literal["prefill", "decode", "sample", "logprobs", "adjust", "new_adjust", "read_load", "move_experts"]
    size: int = 0
    variant: int = 0


BALANCING = (Key("read_load"), Key("move_experts"))
"""Programs that only spread experts need."""


class Store(Protocol):
    """Programs of an earlier start; `dsv3.engine.cluster.compiled.ProgramStore` is one."""

    def load(self, name: str) -> Callable[..., Any] | None: ...
    def save(self, name: str, program: Any) -> None: ...


class Programs:
    """Compiles, on demand or all at once, and remembers. Every array has a leading rank axis, but parameters and moves.

    The page pool, the decode state, the adjust state, and for a move the experts are donated: pass each program the
    newest ones. A `store`, where one is set, is asked before anything is traced, and given what is compiled.
    """

    def __init__(
        self,
        functions: StepFunctions,
        model_cfg: ModelConfig,
        cfg: EngineConfig,
        mesh: Mesh,
        params: Any,
    ) -> None:
        self._functions, self._model_cfg, self._cfg, self._mesh = functions, model_cfg, cfg, mesh
        self._compiled: dict[Key, Callable[..., Any]] = {}
        self.store: Store | None = None
        self._params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        one = pool(model_cfg, cfg.cache_dtype, cfg.num_pages)
        pages = jax.ShapeDtypeStruct((cfg.num_ranks, *one.shape), one.dtype)
        self.pages = self._sharded(pages)
        experts = functions.experts
        load_size = None if experts is None else step_bodies.load_size(experts, cfg)
        self.state = self._sharded(device_state.decode_state_shapes(cfg, load_size))
        self.adjust = self._sharded(device_state.adjust_state_shapes(cfg, model_cfg.vocab_size))

    def keys(self) -> list[Key]:
        """Every program that serving can need."""
        cfg = self._cfg
        rows = sorted({*cfg.decode_buckets, *map(cfg.prefill_rows, cfg.prefill_buckets)})
        return [
            *(Key("prefill", size) for size in cfg.prefill_buckets),
            *(Key("decode", size) for size in cfg.decode_buckets),
            *(Key("sample", size, variant) for variant in (GREEDY, SAMPLED, FULL) for size in rows),
            *(Key("logprobs", size) for size in rows),
            Key("new_adjust"),
            Key("adjust"),
            *(BALANCING if self._functions.experts is not None else ()),
        ]

    def compile_all(self, progress: Progress | None = None) -> None:
        """Compiles what `keys` lists, from the persistent cache where it knows them."""
        keys = self.keys()
        report = progress or (lambda done, total, what: None)
        report(0, len(keys), "")
        with ThreadPoolExecutor(min(_COMPILE_THREADS, os.cpu_count() or 1)) as pool:
            names = {pool.submit(self.get, key): f"{key.kind} {key.size or ''}".strip() for key in keys}
            for done, future in enumerate(as_completed(names), 1):
                future.result()
                report(done, len(keys), names[future])

    def get(self, key: Key) -> Callable[..., Any]:
        """The compiled program, compiled now if it is new."""
        program = self._compiled.get(key)
        if program is None:
            program = self._compiled[key] = self._load_or_compile(key)
        return program

    def _load_or_compile(self, key: Key) -> Callable[..., Any]:
        if self.store is None:
            return self._compile(key)
        name = f"{key.kind}-{key.size}-{key.variant}"
        program = self.store.load(name)
        if program is None:
            self.store.save(name, program := self._compile(key))
        return program

    def _compile(self, key: Key) -> Callable[..., Any]:
        _log.debug("compiling %s", key)
        if key in BALANCING:
            mapped, arguments, donated = getattr(self, f"_{key.kind}")()
        else:
            body, arguments, donated, takes_params = getattr(self, f"_{key.kind}")(key)
            mapped = self._mapped(body, len(arguments), takes_params, key.kind)
        options = compiler_options(self._mesh.devices.flat[0].platform)
        return jax.jit(mapped, donate_argnums=donated).lower(*arguments).compile(options)

    def _mapped(self, body: Callable[..., Any], arguments: int, takes_params: bool, kind: str) -> Callable[..., Any]:
        """`body`, written for one rank, over all of them; if it `takes_params`, they are the first argument."""
        share, out_specs = self._shared(kind)

        def one_rank(*args: Any) -> Any:
            split = 1 if takes_params else 0
            mine = jax.tree.map(lambda x: x[0], args[split:])
            return share(jax.tree.map(lambda x: x[None], body(*args[:split], *mine)))

        specs: list[Any] = [of_ranks()] * arguments
        if takes_params:
            specs[0] = self._functions.param_specs
        return self._shard_map(one_rank, tuple(specs), out_specs)

    def _shared(self, kind: str) -> tuple[Callable[[Any], Any], Any]:
        """What a program does last, and where its results lie: over several processes each can read what is sampled."""
        if spans_processes(self._mesh):
            if kind == "sample":  # the tokens of all ranks besides the rank's own, which log-probabilities take
                return lambda out: (*out, on_every_rank(out[-1])), (*[of_ranks()] * 3, PartitionSpec())
            if kind == "logprobs":
                return on_every_rank, PartitionSpec()
        return lambda out: out, of_ranks()

    def _prefill(self, key: Key) -> tuple[Any, ...]:
        width = step_bodies.PREFILL_HEADER + self._cfg.pages_per_seq
        body = self._forward(step_bodies.prefill_body, key)
        batch = (self._array(key.size), self._array(self._cfg.prefill_rows(key.size), width))
        return body, (self._params, self.pages, self.state, *batch), (1, 2), True

    def _decode(self, key: Key) -> tuple[Any, ...]:
        body = self._forward(step_bodies.decode_body, key)
        return body, (self._params, self.pages, self.state, self._array(key.size, 2)), (1, 2), True

    def _forward(self, body: Callable[..., Any], key: Key) -> Callable[..., Any]:
        program = self._cfg.forward_programs.index((key.kind, key.size))
        return functools.partial(body, self._functions, self._model_cfg, program=program)

    def _sample(self, key: Key) -> tuple[Any, ...]:
        body = functools.partial(step_bodies.sample_body, key.variant)
        adjust = self.adjust if key.variant == FULL else None
        donated = (0, 1) if key.variant == FULL else (0,)
        return body, (self.state, adjust, self._logits(key.size), self._array(key.size)), donated, False

    def _logprobs(self, key: Key) -> tuple[Any, ...]:
        return step_bodies.logprobs_body, (self._logits(key.size), self._array(key.size)), (), False

    def _adjust(self, key: Key) -> tuple[Any, ...]:
        request = device_state.empty_adjust_request(self._cfg, self._model_cfg.vocab_size)
        arrays = [getattr(request, field.name) for field in dataclasses.fields(request)]
        return step_bodies.adjust_body, (self.adjust, *map(self._like, arrays)), (0,), False

    def _new_adjust(self, key: Key) -> tuple[Any, ...]:
        shapes = jax.tree.map(lambda x: (x.shape[1:], x.dtype), self.adjust)
        leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))

        def zeros(_: jax.Array) -> Any:
            return jax.tree.unflatten(tree, [jnp.zeros(shape, dtype) for shape, dtype in leaves])

        return zeros, (self._array(),), (), False

    def _read_load(self) -> tuple[Any, ...]:
        def one_rank(load: jax.Array) -> tuple[jax.Array, jax.Array]:
            empty, total = step_bodies.read_load_body(load[0])
            return empty[None], total

        return self._shard_map(one_rank, (of_ranks(),), (of_ranks(), PartitionSpec())), (self.state.load,), (0,)

    def _move_experts(self) -> tuple[Any, ...]:
        experts, whole = self._functions.experts, PartitionSpec()
        assert experts is not None  # `keys` lists this program only then
        stacks, placement = experts.take(self._params)
        shapes = LayerMove((), (experts.num_slots,), placement.slots.shape[1:], placement.copies.shape[1:])
        sharding = NamedSharding(self._mesh, whole)
        move = LayerMove(*(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for shape in shapes))
        specs = (*experts.take(self._functions.param_specs), whole)
        body = functools.partial(move_layer, machine=experts.machine)
        return self._shard_map(body, specs, specs), (stacks, placement, move), (0, 1)

    def _shard_map(self, body: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(body, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _logits(self, rows: int) -> jax.ShapeDtypeStruct:
        return self._array(rows, self._model_cfg.vocab_size, dtype=jnp.float32)

    def _array(self, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return self._sharded(jax.ShapeDtypeStruct((self._cfg.num_ranks, *shape), dtype))

    def _like(self, array: Any) -> jax.ShapeDtypeStruct:
        return self._sharded(jax.ShapeDtypeStruct(array.shape, array.dtype))

    def _sharded(self, tree: Any) -> Any:
        sharding = by_rank(self._mesh)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
