"""The model as the engine calls it: step functions of one rank, and experts that the devices share."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from dsv3.config.engine import ForwardProgram
from dsv3.config.model import ModelConfig
from dsv3.model import decoder, dspark, steps
from dsv3.model.batch import DecodeBatch, PrefillBatch
from dsv3.model.steps import StepOutput
from dsv3.model.vocabulary import WHOLE, Vocabulary
from pallas_kernels import invariance
from pallas_kernels.backend import Backend
from sharding.experts.placement import Placement
from sharding.experts.traffic import Traffic
from sharding.mesh import Machine


@dataclasses.dataclass(frozen=True)
class SpreadExperts:
    """Routed experts in replicas on all devices, for an engine that counts their load and moves them.

    Stack i of the MoE layers has `layers[i]` layers: the first stack is the main model's, a second one its MTP
    module's. The layers of all stacks are numbered consecutively, and share one `Placement` `[L, E, Ec]`.
    `take(params)` returns the experts of each stack, a tree of `[L, Er, ...]` arrays, and the placement; `put(params,
    stacks, placement)` returns the parameters with these in their place. Both accept trees of shapes and of partitions
    too.

    Each rank counts on its devices, int32 `[n]`: (token, expert) pairs by layer and expert; then for each forward
    program the passes that overflowed a buffer, and all passes.
    """

    layers: tuple[int, ...]
    num_experts: int
    num_replicas: int
    num_groups: int
    machine: Machine
    take: Callable[[Any], tuple[tuple[Any, ...], Placement]]
    put: Callable[[Any, tuple[Any, ...], Placement], Any]

    @property
    def num_layers(self) -> int:
        """MoE layers of all stacks."""
        return sum(self.layers)

    def first_layer(self, stack: int) -> int:
        """Returns the number of a stack's first layer."""
        return sum(self.layers[:stack])

    def stack_of(self, layer: int) -> int:
        """Returns the stack that the layer of this number is in."""
        return max(stack for stack in range(len(self.layers)) if self.first_layer(stack) <= layer)

    def num_counters(self, num_programs: int) -> int:
        """Returns the counters of a rank for so many forward programs."""
        return self.num_layers * self.num_experts + 2 * num_programs

    def count(self, counters: jax.Array, result: StepOutput, program: int, stack: int) -> jax.Array:
        """Returns the counters after a pass of forward program number `program` through a stack."""
        counts = result.expert_counts.ravel()
        first, passes = self.first_layer(stack) * self.num_experts, self.num_counters(program)
        ran = jnp.stack([(result.overflows > 0).astype(jnp.int32), jnp.ones((), jnp.int32)])
        return counters.at[first : first + counts.size].add(counts).at[passes : passes + 2].add(ran)

    def split_counters(self, total: np.ndarray, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns pairs `[L, E]` and passes `[programs, 2]` from the sum of all ranks' counters."""
        pairs, passes = np.split(total.astype(np.int64), [self.num_counters(0)])
        return pairs.reshape(self.num_layers, -1), passes.reshape(-1, 2) // num_ranks  # passes are equal on every rank


@dataclasses.dataclass(frozen=True)
class DraftFunctions:
    """A module that predicts the token after the next from what is known of a token, and the next token.

    `predict(params, cfg, PrefillBatch or DecodeBatch, pages, draft_input)` is `prefill` or `decode` of `StepFunctions`
    with two differences: the tokens of a batch are the next ones, and the `draft_input` of the step
    (`[T, cfg.draft_input_width]` or `[B, S, ...]`) of type `dtype` is an argument. The results have a `draft_input` of
    the same shape and type, for the next draft; their hidden states are those of `logits`.
    """

    dtype: Any
    predict: Callable[[Any, ModelConfig, PrefillBatch | DecodeBatch, Any, jax.Array], StepOutput]


@dataclasses.dataclass(frozen=True)
class BlockFunctions:
    """Stages that draft a block of tokens at once, as `dsv3.model.dspark` describes each function.

    `write(params, cfg, batch, pages, draft_input)` returns the pages with what the stages see of a step; `draft_input`
    has the type `dtype`. `propose(params, cfg, DecodeBatch, pages)` returns hidden `[B, n, D]` and the states that
    `choose(params, vocabulary, best, scores, states, last)` takes, which returns drafts and their confidence.
    """

    dtype: Any
    write: Callable[[Any, ModelConfig, PrefillBatch | DecodeBatch, Any, jax.Array], Any]
    propose: Callable[[Any, ModelConfig, DecodeBatch, Any], StepOutput]
    choose: Callable[..., tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class StepFunctions:
    """The model, as the engine calls it.

    `prefill(params, cfg, PrefillBatch, pages)` returns hidden `[T, D]`, `decode(params, cfg, DecodeBatch, pages)`
    hidden `[B, S, D]`, both with the new pages, and with the `draft_input` if there is a `draft`.
    `logits(params, cfg, hidden)` is float32 `[..., W]`, or has only this device's part of the vocabulary where several
    share it (`vocabulary`); `scores` has one shape for both.
    `param_specs` are the partitions of the parameters: a tree, or one for all. `dtype` is the type of the hidden
    states. With `experts` the results have `expert_counts` `[L, E]` too, and `traffic(program)` returns what a device
    sends in the MoE layers of a forward program. `draft` makes drafts, if the model does so itself. Where a step
    `may_overflow`, the results have `overflows` `[]`, equal on all ranks: above 0 the step's results are invalid on all
    of them, and it must be repeated with fewer tokens per bucket. `overlaps(program)` returns how many NCCL
    communicators a program uses at once while it computes (0: it does not overlap); None: no program overlaps.
    `connect(programs)`, in all processes and before a program runs, prepares what forward programs need of a library;
    it returns a function that raises if their results cannot be used. `library_bytes(programs)` is the memory that the
    library then takes on a device, beside jax's pool.
    """

    prefill: Callable[[Any, ModelConfig, PrefillBatch, Any], StepOutput]
    decode: Callable[[Any, ModelConfig, DecodeBatch, Any], StepOutput]
    logits: Callable[[Any, ModelConfig, jax.Array], jax.Array]
    param_specs: Any = dataclasses.field(default_factory=PartitionSpec)
    experts: SpreadExperts | None = None
    traffic: Callable[[ForwardProgram], Traffic] | None = None
    draft: DraftFunctions | BlockFunctions | None = None
    dtype: Any = jnp.float32
    may_overflow: bool = False
    overlaps: Callable[[ForwardProgram], int] | None = None
    vocabulary: Vocabulary = WHOLE
    connect: Callable[[Sequence[ForwardProgram]], Callable[[], None]] | None = None
    library_bytes: Callable[[Sequence[ForwardProgram]], int] | None = None

    def scores(self, params: Any, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
        """Returns the logits that follow from `hidden` `[..., D]`, as `Vocabulary.scores`: `[Xn, ..., W / Xn]`."""
        return self.vocabulary.scores(functools.partial(self.logits, params, cfg), hidden)


def model_functions(
    backend: Backend | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
    drafts: bool = False,
    blocks: bool = False,
) -> StepFunctions:
    """Returns the served model with kernels of `backend` (None: those of the device).

    `dtype` is the type of its hidden states. With `drafts` it has its MTP module too, with `blocks` its stages of
    DSpark.
    """
    prefill, decode, predict, propose = (
        functools.partial(function, backend=backend)
        for function in (steps.prefill, steps.decode, steps.predict, dspark.propose)
    )
    write = functools.partial(dspark.write_context, backend=backend)
    draft: DraftFunctions | BlockFunctions | None = None
    if blocks:
        draft = BlockFunctions(dtype, write, propose, dspark.choose)
    elif drafts:
        draft = DraftFunctions(dtype, predict)
    logits = functools.partial(decoder.logits, backend=backend)
    return StepFunctions(prefill, decode, logits, draft=draft, dtype=dtype)


def in_full_precision(functions: StepFunctions) -> StepFunctions:
    """Returns functions with float32 matrix products where the model computes in float32; others unchanged.

    A GPU's default for them is TF32, which has 10 bits of fraction.
    """
    if jnp.dtype(functions.dtype) != jnp.float32:
        return functions
    return _traced_in(functions, lambda: jax.default_matmul_precision("highest"))


def batch_invariant(functions: StepFunctions) -> StepFunctions:
    """Returns functions whose rows have the same bits in every batch (`pallas_kernels.invariance`)."""
    return _traced_in(functions, invariance.batch_invariant)


def _traced_in(
    functions: StepFunctions, context: Callable[[], contextlib.AbstractContextManager[None]]
) -> StepFunctions:
    def inside[**P, R](function: Callable[P, R]) -> Callable[P, R]:
        def traced(*args: P.args, **kwargs: P.kwargs) -> R:
            with context():
                return function(*args, **kwargs)

        return traced

    draft = functions.draft
    if isinstance(draft, DraftFunctions):
        draft = dataclasses.replace(draft, predict=inside(draft.predict))
    elif isinstance(draft, BlockFunctions):
        write, propose, choose = inside(draft.write), inside(draft.propose), inside(draft.choose)
        draft = dataclasses.replace(draft, write=write, propose=propose, choose=choose)
    prefill, decode, logits = inside(functions.prefill), inside(functions.decode), inside(functions.logits)
    return dataclasses.replace(functions, prefill=prefill, decode=decode, logits=logits, draft=draft)
