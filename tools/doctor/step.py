"""Compares whole steps of a model with this device's kernels with the reference on the same device.

    python -m tools.doctor.step --list                      the models
    python -m tools.doctor.step NAME [--quick]              one of them; on a CPU always in its quick form

Prompts are prefilled, in two parts, and then continued by the tokens of the reference, so that both see the same tokens
at each step. What is compared are hidden states behind the last norm: greedy tokens may differ where two logits are
nearly equal, so they are shown, and decide nothing.

How far may a correct kernel be from the reference? As far as the reference in the model's type is from itself in
float32, within a factor. A row has as difference `|x - y|^2 / (|x|^2 + |y|^2)`, which is 1 where nothing is right.
Rounding also makes a router, or an indexer, choose otherwise between two that are nearly equal, which changes a few
rows much. So there are two limits: one of rounding for the 75th percentile of the rows, and one for their sum that
allows a few other choices.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from configs.deepseek_v2 import DEEPSEEK_V2_LITE
from configs.deepseek_v3 import DEEPSEEK_V3, DEEPSEEK_V32
from configs.glm import GLM_4_7_FLASH, GLM_5
from configs.kimi import KIMI_K2_THINKING
from configs.mistral import MISTRAL_SMALL_4
from dsv3.checkpoint.quantize import INT4, abstract_int4, packed_form, rounding
from dsv3.config.engine import pages_for
from dsv3.config.model import ModelConfig
from dsv3.config.options import EngineOptions
from dsv3.engine.build import bundled_model, load_components
from dsv3.engine.functions import StepFunctions, in_full_precision, model_functions
from dsv3.kv_cache.layout import pool
from dsv3.logs import configure_logging
from dsv3.model.batch import AttentionForm, DecodeBatch, PrefillBatch
from dsv3.model.params import Fp4Weight, Fp8Weight, Int4Weight, Params, ParamSpec, declare, initialize
from dsv3.text.tokenizer import Tokenizer
from pallas_kernels.backend import Backend, prepare, resolve_backend
from tools.doctor.rows import CaseResult, parse_name, run_cases

BUNDLED = "bundled"
FAMILIES: Mapping[str, ModelConfig] = {
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-V3.2": DEEPSEEK_V32,
    "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
    "Kimi-K2-Thinking": KIMI_K2_THINKING,
    "GLM-4.7-Flash": GLM_4_7_FLASH,
    "GLM-5": GLM_5,
    "Mistral-Small-4": MISTRAL_SMALL_4,
}
"""A dense layer and an MoE layer of each, with random weights of the family's types."""
_TEXTS = ("def add(a, b):\n    return", "import os\n\n\nclass Path:\n    def", "x")
_GREEDY = 64
_FACTOR = 8.0
"""Of squares: a kernel may be nearly three times as far from float32 as the reference is."""
_FLOOR = {"float32": 1e-9, "bfloat16": 1e-6, "float16": 1e-7}
"""A difference that is always allowed, by the type: some of its roundings."""
_FP8_FLOOR = 2e-3
"""The same for FP8 weights, whose kernels may or may not round activations to their 3 bits of fraction."""
_INT4_DEVIATION = 4.6  # of -8 to 7, all as frequent
_OTHER_CHOICES = 0.5
"""What other choices of experts may add to the sum over all rows: a row with one other expert of its 4 to 8 has some
0.1, one that is wrong has 1."""


class Model(NamedTuple):
    """A model with its parameters; `compute` is the type of activations and of pages."""

    cfg: ModelConfig
    params: Any
    compute: str


class Work(NamedTuple):
    """Prompts, and what follows: `first[b]` and then `second[b]` are prefilled, in steps of `rows` rows.

    With `fresh` the first part has a program of its own, for prompts without context, as a server has for long steps.
    `following` are the tokens `[B, steps]` of the decode steps; None: those with the greatest logits. The last request
    of a batch has ended: it is padding in decode steps.
    """

    first: list[np.ndarray]
    second: list[np.ndarray]
    rows: int
    steps: int
    following: np.ndarray | None
    fresh: bool


class Ran(NamedTuple):
    """Hidden states by step kind, rows `[n, D]` float32, and the decode steps' logits `[steps, B, W]` and tokens."""

    hidden: dict[str, np.ndarray]
    logits: np.ndarray
    following: np.ndarray


def run(model: Model, backend: Backend, work: Work) -> Ran:
    """Runs the prompts and the decode steps, with programs like those that a server compiles."""
    cfg, (prefill, decode, score), count = model.cfg, _programs(backend, model.compute), len(work.first)
    longest = max(len(a) + len(b) for a, b in zip(work.first, work.second, strict=True)) + work.steps
    width = pages_for(longest, cfg.page_size)
    # Page 0 belongs to no request, and a request's pages are not consecutive.
    table = 1 + np.arange(count * width, dtype=np.int32).reshape(width, count).T
    pages = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), pool(cfg, model.compute, 1 + count * width))
    form = AttentionForm.TOPK if cfg.index_layers else AttentionForm.ANY
    zeros = np.zeros(count, np.int32)

    first = AttentionForm.NEW if work.fresh else form
    parts = [(work.first, zeros, first), (work.second, lengths_of(work.first), form)]
    hidden, last = {}, np.zeros((count, cfg.hidden_size), np.float32)
    for name, (chunks, contexts, taken) in zip(("prefill", "prefill with context"), parts, strict=True):
        out = prefill(model.params, cfg, _ragged(chunks, contexts, work.rows, table, taken), pages)
        pages, lengths = out.pages, lengths_of(chunks)
        found = np.asarray(out.hidden, np.float32)[: lengths.sum()]
        hidden[name] = found
        ends = np.cumsum(lengths) - 1
        last[lengths > 0] = found[ends[lengths > 0]]
    scores = np.asarray(score(model.params, cfg, last.astype(model.compute)))

    lengths = lengths_of(work.first) + lengths_of(work.second)
    active = np.arange(count) < count - 1
    tokens, states, logits = [], [], []
    for step in range(work.steps):
        chosen = np.argmax(scores, -1).astype(np.int32) if work.following is None else work.following[:, step]
        tokens.append(chosen)
        logits.append(scores)
        lengths = lengths + 1
        batch = DecodeBatch(chosen[:, None], np.where(active, lengths, 0).astype(np.int32), table, form)
        state, scores, pages = decode(model.params, cfg, batch, pages)
        state, scores = np.asarray(state[:, 0], np.float32), np.asarray(scores[:, 0])
        states.append(state[active])
    hidden["decode"] = np.concatenate(states)
    return Ran(hidden, np.stack(logits), np.stack(tokens, 1))


@functools.cache
def _programs(backend: Backend, compute: str) -> tuple[Any, Any, Any]:
    """Returns the programs of prefill, of decode with its logits, and of logits alone."""
    functions = in_full_precision(model_functions(backend, dtype=jnp.dtype(compute)))
    prefill = jax.jit(functions.prefill, static_argnums=1, donate_argnums=3)
    decode = jax.jit(functools.partial(_decode, functions), static_argnums=1, donate_argnums=3)
    return prefill, decode, jax.jit(functions.logits, static_argnums=1)


def _decode(functions: StepFunctions, params: Any, cfg: ModelConfig, batch: DecodeBatch, pages: Any) -> Any:
    out = functions.decode(params, cfg, batch, pages)
    return out.hidden, functions.logits(params, cfg, out.hidden), out.pages


def lengths_of(chunks: list[np.ndarray]) -> np.ndarray:
    """Returns the number of tokens of each."""
    return np.array([len(chunk) for chunk in chunks], np.int32)


def _ragged(
    chunks: list[np.ndarray],
    contexts: np.ndarray,
    rows: int,
    table: np.ndarray,
    form: AttentionForm,
) -> PrefillBatch:
    tokens, positions = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    ends = np.cumsum(lengths_of(chunks))
    tokens[: ends[-1]] = np.concatenate(chunks)
    positions[: ends[-1]] = np.concatenate(
        [start + np.arange(len(chunk)) for start, chunk in zip(contexts, chunks, strict=True)]
    )
    cu_lengths = np.concatenate([[0], ends]).astype(np.int32)
    return PrefillBatch(tokens, positions, cu_lengths, contexts, table, form)


def differences(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns `|x - y|^2 / (|x|^2 + |y|^2)` of each row; not a number where a row has one that is none."""
    x, y = found.astype(np.float64), wanted.astype(np.float64)
    return np.sum((x - y) ** 2, -1) / np.maximum(np.sum(x * x, -1) + np.sum(y * y, -1), 1e-30)


def judge(case: str, found: np.ndarray, reference: np.ndarray, exact: np.ndarray, floor: float) -> CaseResult:
    """Returns the row of one kind of steps: rows of hidden states by kernels, by the reference, and in float32."""
    ours, own = differences(found, exact), differences(reference, exact)
    measured = {"75th percentile": np.quantile(ours, 0.75), "sum": np.sum(ours)}
    allowed = {
        "75th percentile": _FACTOR * np.quantile(own, 0.75) + floor,
        "sum": _FACTOR * np.sum(own) + floor * len(own) + _OTHER_CHOICES,
    }
    figures = {"rows": float(len(ours))}
    for name, value in measured.items():
        figures |= {f"{name} of differences": float(value), f"limit of the {name}": float(allowed[name])}
    worst = int(np.argmax(np.where(np.isfinite(ours), ours, np.inf)))
    figures["largest difference"] = float(ours[worst])
    wrong = [name for name, value in measured.items() if not value <= allowed[name]]  # also where it is not a number
    says = "; ".join(
        f"the {name} of the rows' differences is {measured[name]:.2e}, {allowed[name]:.2e} is allowed" for name in wrong
    )
    if wrong:
        says += f"; the worst is row {worst} of {len(ours)}"
    return CaseResult(case, not wrong, says, figures)


def tokens_row(found: np.ndarray, reference: np.ndarray) -> CaseResult:
    """Returns how many greedy tokens agree, of logits `[steps, B, W]`; it passes where the logits are numbers.

    A difference says how far apart the reference has the two tokens: nearly equal logits may change places.
    """
    ours, theirs = np.argmax(found, -1), np.argmax(reference, -1)
    differ = np.argwhere(ours != theirs)
    figures = {"tokens": float(ours.size), "agree": float(ours.size - len(differ))}
    if not np.all(np.isfinite(found)):
        return CaseResult("greedy tokens", False, "logits are not finite", figures)
    if not len(differ):
        return CaseResult("greedy tokens", True, "", figures)
    step, b = differ[0]
    one, other = ours[step, b], theirs[step, b]
    gap, spread = reference[step, b, other] - reference[step, b, one], np.std(reference[step, b])
    by = found[step, b, one] - found[step, b, other]
    says = (
        f"first different at token {step} of request {b}: {one} in place of {other}, whose logit is greater by "
        f"{gap:.2g} in the reference and less by {by:.2g} here, where logits have a deviation of {spread:.2g}"
    )
    return CaseResult("greedy tokens", True, says, figures | {"gap": float(gap)})


def cases(make: Callable[[], tuple[Model, Work]], backend: Backend) -> dict[str, Callable[[], CaseResult | str]]:
    """Returns what `run_cases` takes.

    The first case runs the model four times: with kernels (twice), with the reference, and in float32.
    """

    @functools.cache
    def runs() -> tuple[Ran, Ran, Ran, Ran, float]:
        model, work = make()
        reference = run(model, Backend.REFERENCE, work)
        work = work._replace(following=reference.following)
        exact = reference
        if model.compute != "float32":
            exact = run(in_float32(model), Backend.REFERENCE, work)
        first, second = run(model, backend, work), run(model, backend, work)
        return first, second, reference, exact, _FP8_FLOOR if model.cfg.fp8 else _FLOOR[model.compute]

    def steps(kind: str) -> CaseResult:
        first, second, reference, exact, floor = runs()
        row = judge(kind, first.hidden[kind], reference.hidden[kind], exact.hidden[kind], floor)
        if row.passed and not np.array_equal(first.hidden[kind], second.hidden[kind]):
            differ = int(np.sum(np.any(first.hidden[kind] != second.hidden[kind], -1)))
            return msgspec.structs.replace(row, passed=False, says=f"two runs differ in {differ} rows")
        return row

    def tokens() -> CaseResult:
        first, _, reference, _, _ = runs()
        return tokens_row(first.logits[:, :-1], reference.logits[:, :-1])

    kinds = ("prefill", "prefill with context", "decode")
    return {**{kind: functools.partial(steps, kind) for kind in kinds}, "greedy tokens": tokens}


def in_float32(model: Model) -> Model:
    """Returns a model that computes in float32 with the same weights; quantized ones stay so."""

    def widened(leaf: Any) -> Any:
        return leaf.astype(jnp.float32) if isinstance(leaf, jax.Array) else leaf

    quantized = (Fp4Weight, Fp8Weight, Int4Weight)
    params = jax.tree.map(widened, model.params, is_leaf=lambda x: isinstance(x, quantized))
    return Model(model.cfg, params, "float32")


def bundled(quick: bool) -> tuple[Model, Work]:
    """Returns the model that ships with the package, as a server loads it, and prompts to be continued."""
    directory = bundled_model()
    parts = load_components(directory, EngineOptions(max_num_seqs=len(_TEXTS)), progress=False)
    tokenizer = Tokenizer.from_directory(directory)
    prompts = [np.array(tokenizer.encode(text), np.int32) for text in (*_TEXTS, _TEXTS[0])]
    first, second = [p[: len(p) // 2 + 1] for p in prompts], [p[len(p) // 2 + 1 :] for p in prompts]
    model = Model(parts.model_cfg, parts.params, jnp.dtype(parts.functions.dtype).name)
    return model, Work(first, second, model.cfg.page_size, _GREEDY, None, not quick)


def two_layers(cfg: ModelConfig, *, narrow: bool) -> ModelConfig:
    """Returns a model of two layers of `cfg`, the MoE layer last, with few words and experts.

    The widths are those of `cfg`, or `narrow`: then hidden states, MLPs and the query's latent have two to four blocks
    of 128, and what attention works on stays as it is but for the number of heads. An indexer chooses fewer tokens, so
    that a short prompt has more.
    """
    fewer = 4 * cfg.n_group  # in each group more than the least that a router ranks it by
    few: dict[str, Any] = {
        "num_hidden_layers": 2,
        "first_k_dense_replace": min(1, cfg.first_k_dense_replace),
        "num_nextn_predict_layers": 0,
        "vocab_size": 1024,
        "n_routed_experts": max(fewer, 32),
    }
    if cfg.indexer is not None:
        few["indexer"] = dataclasses.replace(cfg.indexer, topk=64 if narrow else 512)
    if narrow:
        few |= {
            "hidden_size": 512,
            "num_attention_heads": 16,
            "q_lora_rank": cfg.q_lora_rank and 256,
            "intermediate_size": 512,
            "moe_intermediate_size": 256,
        }
    return dataclasses.replace(cfg, **few)


def random_params(cfg: ModelConfig) -> Params:
    """Returns random parameters of the types that a server keeps them in; plain ones are bfloat16.

    Their deviation keeps what a layer adds of the size of what it is added to, at any width, so that each layer counts.
    """
    std = 0.45 * cfg.hidden_size**-0.5
    # This generator compiles in a fraction of the time of jax's own.
    drawn = initialize(cfg, jax.random.key(0, impl="rbg"), jnp.bfloat16, std=std)

    def stored(spec: ParamSpec, leaf: jax.Array) -> Any:
        if packed_form(cfg, spec) is INT4:
            return _int4(spec, std)
        if cfg.fp8 is not None and spec.quantizable:
            return rounding(cfg.fp8.scale_fmt == "ue8m0")(leaf)
        return leaf

    return jax.tree.map(stored, declare(cfg), drawn)


def _int4(spec: ParamSpec, std: float) -> Int4Weight:
    words_key, scale_key = jax.random.split(jax.random.key(spec.shape[-1], impl="rbg"))
    shapes = abstract_int4(spec.shape)
    words = jax.random.bits(words_key, shapes.data.shape, jnp.uint32).astype(shapes.data.dtype)
    scale = jax.random.uniform(scale_key, shapes.scale.shape, jnp.float32, 0.5, 1.5) * (std / _INT4_DEVIATION)
    return Int4Weight(words, scale.astype(shapes.scale.dtype))


def family(name: str, quick: bool) -> tuple[Model, Work]:
    """Returns two layers of a family, and prompts that end within pages and tiles, one of a single token."""
    cfg = two_layers(FAMILIES[name], narrow=quick)
    rows, steps = (128, 4) if quick else (1024, 16)
    rng = np.random.default_rng(0)

    def draw(*lengths: int) -> list[np.ndarray]:
        return [rng.integers(0, cfg.vocab_size, n, np.int32) for n in lengths]

    longest = 5 * rows // 8 + 3
    first, second = draw(longest, 1, rows // 8, 7), draw(rows // 2 + 1, 13, 1, 0)
    following = rng.integers(0, cfg.vocab_size, (len(first), steps), np.int32)
    compute = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    model = Model(cfg, random_params(cfg), "bfloat16")
    work = Work(first, second, rows, steps, following, not quick and not cfg.index_layers)
    return (in_float32(model) if compute == "float32" else model), work


def main(argv: list[str] | None = None) -> int:
    """Lists the models, or checks one; returns the exit status of a check."""
    args = parse_name(argv, "step", (BUNDLED, *FAMILIES), quick="narrow layers and short prompts")
    if args.list:
        print(BUNDLED, *FAMILIES, sep="\n")
        return 0
    configure_logging()
    quick = args.quick or jax.default_backend() == "cpu"
    backend = resolve_backend()
    prepare(backend)
    make = bundled if args.name == BUNDLED else functools.partial(family, args.name)
    return run_cases(cases(functools.partial(make, quick), backend))


if __name__ == "__main__":
    sys.exit(main())
