"""The host selects the attention form of a step: whether queries need top-k, and how they attend to cached tokens."""

import dataclasses
import functools
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.deepseek_v3 import DEEPSEEK_V3, DEEPSEEK_V32
from dsv3.config.device_rates import PEAKS, peaks_of
from dsv3.config.engine import EngineConfig
from dsv3.config.model import ModelConfig
from dsv3.engine.components import EngineComponents
from dsv3.engine.device import form_selection
from dsv3.engine.device.layout import Layout
from dsv3.engine.engine import Engine
from dsv3.engine.functions import StepFunctions
from dsv3.engine.job import StepCommand
from dsv3.engine.jobs import decode, draft_module, prefill
from dsv3.model import AttentionForm, forms
from tests.dsv3.engine import toy
from tests.dsv3.engine.conftest import LIMITS
from tests.dsv3.engine.driving import request, run

LONGEST = 90
ANY, NEW, MATERIALIZED, ABSORBED, TOPK_MATERIALIZED, TOPK = AttentionForm


class OnPaper(Layout):
    """The parts of a layout that determine which programs there are."""

    platform, peaks = "cuda", PEAKS["H200"]

    def __init__(self, model: ModelConfig, cfg: EngineConfig, overlaps: Any) -> None:
        self.model_cfg, self.cfg = model, cfg
        self.functions = types.SimpleNamespace(overlaps=overlaps)  # type: ignore[assignment]


def layout(model: ModelConfig = DEEPSEEK_V32, platform: str = "cuda", length: int = 4096, overlaps: Any = None) -> Any:
    cfg = EngineConfig(max_model_len=length, num_pages=5000, max_num_batched_tokens=4096, cache_dtype="bfloat16")
    found = OnPaper(model, cfg, overlaps)
    found.platform = platform
    return found


def test_a_gpu_has_two_programs_where_requests_may_be_longer_than_topk() -> None:
    assert form_selection.decode_forms(layout()) == [ABSORBED, TOPK]
    assert form_selection.decode_forms(layout(length=2048)) == [ABSORBED]
    assert form_selection.decode_forms(layout(length=2049)) == [ABSORBED, TOPK]
    assert form_selection.decode_forms(layout(DEEPSEEK_V3)) == [ABSORBED]
    assert form_selection.decode_forms(layout(platform="cpu")) == [ANY]


def test_the_longest_query_selects_the_form() -> None:
    found = [form_selection.decode_form(layout(), n) for n in (1, 2048, 2049, form_selection.ANY_LENGTH)]
    assert found == [ABSORBED, ABSORBED, TOPK, TOPK]
    assert form_selection.decode_form(layout(length=2048), form_selection.ANY_LENGTH) is ABSORBED
    assert form_selection.decode_form(layout(DEEPSEEK_V3), form_selection.ANY_LENGTH) is ABSORBED
    assert form_selection.decode_form(layout(platform="cpu"), 9999) is ANY


@pytest.mark.parametrize(
    ("has_context", "longest", "keys", "wanted"),
    [
        (False, 2048, 4096, NEW),
        (True, 2048, 99_968, ABSORBED),
        (False, 2049, 2112, TOPK_MATERIALIZED),
        (True, 10_880, 10_880, TOPK_MATERIALIZED),
        (True, 4000, 10_944, TOPK),
        (False, 2049, form_selection.ANY_LENGTH, TOPK),
    ],
)
def test_prompts_have_four_programs(has_context: bool, longest: int, keys: int, wanted: AttentionForm) -> None:
    """Top-k queries treat new tokens and cached ones alike, so context makes no difference to them."""
    about, long = (4096, has_context, longest, keys), layout(length=32_768)
    assert form_selection.prefill_forms(long, 4096) == [NEW, ABSORBED, TOPK_MATERIALIZED, TOPK]
    assert form_selection.prefill_form(long, *about) is wanted
    assert form_selection.prefill_form(layout(platform="cpu"), *about) is ANY
    assert form_selection.prefill_forms(layout(platform="cpu"), 4096) == [ANY]
    assert form_selection.prefill_form(layout(DEEPSEEK_V3), *about) is (ABSORBED if has_context else NEW)


def test_capacity_is_bounded_by_requests_and_micro_batches() -> None:
    """Few tokens do not pay for the keys of all."""
    long = functools.partial(layout, length=32_768)
    assert [form_selection.capacity(long(), size, TOPK_MATERIALIZED) for size in (64, 1024, 4096)] == [0, 7552, 10_880]
    assert form_selection.prefill_forms(long(), 64) == [NEW, ABSORBED, TOPK]
    halves = form_selection.capacity(long(overlaps=lambda _: True), 4096, TOPK_MATERIALIZED)
    assert halves == form_selection.capacity(long(), 2048, TOPK_MATERIALIZED) == 9_216
    assert (
        form_selection.capacity(long(DEEPSEEK_V3), 4096, TOPK_MATERIALIZED)
        == form_selection.capacity(long(), 4096, TOPK)
        == 0
    )


def test_the_materialized_form_has_capacity_for_a_wave_of_queries() -> None:
    """16 heads of 1,024 queries are 128 blocks; a request's longest text bounds the capacity, too."""
    long = functools.partial(layout, DEEPSEEK_V3, length=163_840)
    assert [form_selection.capacity(long(), size, MATERIALIZED) for size in (64, 256, 1024, 4096)] == [
        0,
        0,
        131_072,
        262_144,
    ]
    assert form_selection.prefill_forms(long(), 256) == [NEW, ABSORBED]
    assert form_selection.prefill_forms(long(), 1024) == [NEW, MATERIALIZED, ABSORBED]
    assert form_selection.capacity(long(overlaps=lambda _: True), 1024, MATERIALIZED) == 65_536  # of a micro-batch
    assert form_selection.capacity(layout(DEEPSEEK_V3, length=2048), 4096, MATERIALIZED) == 16 * 2048
    assert form_selection.capacity(layout(), 4096, MATERIALIZED) == 0


def test_the_table_has_each_form_once_and_a_form_without_topk_needs_no_indexer() -> None:
    assert list(forms.FORMS) == list(AttentionForm)
    for form, row in forms.FORMS.items():
        assert forms.applies(form, DEEPSEEK_V3, "cuda", 10**6) == (form is not ANY and not row.use_topk)
        assert forms.applies(form, DEEPSEEK_V32, "cpu", 10**6) == (form is ANY)


@pytest.mark.parametrize(
    ("new", "cached", "expands"),
    [
        ((4096,), (32_768,), True),
        ((4096,), (64,), True),
        ((4096,), (259_072,), False),
        ((2048, 2048), (65_536, 100_000), True),
        ((100,) * 16, (8192,) * 16, False),
        ((400,) * 10, (8192,) * 10, True),
        ((3000, 4, 4, 4), (1000, 60_000, 60_000, 60_000), False),
    ],
)
def test_a_step_materializes_cached_tokens_where_that_is_faster(new, cached, expands: bool) -> None:
    """Many new tokens per cached one do, within capacity; a step of prefix hits stays absorbed."""
    sequence = types.SimpleNamespace(tokens=np.zeros(300_000, np.int32), pages=[], page_row=None, slot=0, routed=None)
    sequence.needs_prompt_logprobs = False
    chunks = [prefill.Chunk(sequence, 0, start, start + n) for n, start in zip(new, cached, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "control_rows", lambda rows: np.zeros((len(list(rows)), prefill.HEADER - 4), np.int32))
        command = prefill._command([chunks, []], 4096, layout().cfg).part(range(2))
    assert command.pairs == sum(n * start for n, start in zip(new, cached, strict=True))
    about = layout(DEEPSEEK_V3, length=300_000), 4096, True, command.longest, command.keys, command.pairs
    assert form_selection.prefill_form(*about) is (MATERIALIZED if expands else ABSORBED)
    assert form_selection.capacity(about[0], 4096, MATERIALIZED) == 262_144
    assert form_selection.prefill_form(about[0], 4096, False, *about[3:]) is NEW


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 9000), max_size=4), min_size=2, max_size=2))
def test_a_step_masks_only_where_all_its_tokens_fit(stops: list[list[int]]) -> None:
    """The figures of `_command` about the ranks' chunks suffice for `pack`, which gives each request whole pages."""
    sequence = types.SimpleNamespace(tokens=np.zeros(9001, np.int32), pages=[], page_row=None, slot=0, routed=None)
    chunks = [[prefill.Chunk(sequence, 0, 0, stop) for stop in mine] for mine in stops]
    if not any(stops):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "control_rows", lambda rows: np.zeros((len(list(rows)), prefill.HEADER - 4), np.int32))
        sequence.needs_prompt_logprobs = False
        command = prefill._command(chunks, 4096, layout().cfg)
    needed = max(sum(-(-stop // 64) * 64 for stop in mine) for mine in stops)
    found = form_selection.prefill_form(layout(length=32_768), 4096, True, command.longest, command.keys)
    assert command.keys == needed
    assert (found is TOPK_MATERIALIZED) == (command.longest > 2048 and needed <= 10_880)


def noting(engine: Engine) -> list[tuple[str, int, int]]:
    """Records each forward job with the most tokens that a query sees, by the devices and by the host."""
    devices, launch, found = engine.executor.devices, engine.executor.launch, []

    def noted(command: StepCommand) -> Any:
        for kind, job in command.jobs:
            if kind == "decode":
                lengths = np.asarray(devices.state.lengths)
                live = [(rank, slot) for rank, slot in _live(job.rows, lengths.shape[1])]
                found.append((kind, max(int(lengths[at]) for at in live) + job.width - 1, job.longest))
            elif kind == "prefill":
                found.append((kind, int((job.header[:, 3] + job.header[:, 4]).max()), job.longest))
        return launch(command)

    engine.executor.launch = noted
    return found


def _live(rows: np.ndarray, num_slots: int) -> list[tuple[int, int]]:
    ranks, places = np.nonzero(rows[..., 0] < num_slots)
    return [(int(rank), int(rows[rank, place, 0])) for rank, place in zip(ranks, places, strict=True)]


def test_without_drafts_the_host_knows_exactly(engine: Engine) -> None:
    """Requests of two ranks, in chunks; one ends before the other."""
    seen = noting(engine)
    prompts = [[(k * i) % 60 + 1 for i in range(30 * k)] for k in (1, 4, 5)]
    run(engine, *(request(str(k), p, max_tokens=9 + 5 * k, ignore_eos=True) for k, p in enumerate(prompts)))
    assert {kind for kind, _, _ in seen} == {"decode", "prefill"}
    assert [devices for _, devices, _ in seen] == [host for _, _, host in seen]
    assert max(host for _, _, host in seen) == 150 + 19 - 1


def strict(functions: StepFunctions) -> StepFunctions:
    """The toy, whose answers are NaN where a batch without top-k has a query that sees more than `LONGEST`."""

    def checked(step: Any) -> Any:
        def run_step(params: Any, cfg: ModelConfig, batch: Any, pages: Any, *hidden: Any) -> Any:
            out = step(params, cfg, batch, pages, *hidden)
            seen = batch.lengths if hasattr(batch, "lengths") else jnp.diff(batch.cu_lengths) + batch.context_lengths
            assert batch.form in (ABSORBED, TOPK)
            wrong = jnp.logical_and(batch.form is ABSORBED, (seen > LONGEST).any())
            return out._replace(hidden=jnp.where(wrong, jnp.nan, out.hidden))

        return run_step

    draft = functions.draft
    assert draft is not None
    draft = dataclasses.replace(draft, predict=checked(draft.predict))
    return dataclasses.replace(
        functions, prefill=checked(functions.prefill), decode=checked(functions.decode), draft=draft
    )


def test_with_drafts_the_host_counts_those_that_may_be_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of two drafts is right at two of three places; texts grow over `LONGEST` in decode, then in prefill.

    The drafts of a NaN are wrong, and a text of NaN fails. Each program is there for both cases, and both are used.
    """

    def taken(longest: int) -> AttentionForm:
        return TOPK if longest > LONGEST else ABSORBED

    for module, phase in ((decode, "decode"), (draft_module, "decode"), (prefill, "prefill")):
        monkeypatch.setattr(module, f"{phase}_forms", lambda *_: [ABSORBED, TOPK])
    for module in (decode, draft_module):
        monkeypatch.setattr(module, "decode_form", lambda _, longest: taken(longest))
    monkeypatch.setattr(prefill, "prefill_form", lambda _, size, has_context, longest, *more: taken(longest))
    given = {"method": "mtp", "num_speculative_tokens": 2}
    limits = LIMITS | {"num_ranks": 1, "max_num_seqs": 1, "speculative_config": given, "tokens_per_row": 3}
    model = toy.toy_config(num_nextn_predict_layers=1)
    parts = EngineComponents.on_devices(strict(toy.drafting(3)), toy.PARAMS, model, EngineConfig(**limits))
    engine, prompt = Engine(parts), [(11 * i) % 60 + 1 for i in range(40)]
    seen, answer = noting(engine), toy.expected_tokens(prompt, 120, ())
    assert run(engine, request("a", prompt, max_tokens=100, ignore_eos=True))["a"].tokens == answer[:100]
    again = run(engine, request("b", prompt + answer[:60], max_tokens=9, ignore_eos=True))["b"]
    assert again.tokens == answer[60:69]
    assert all(devices <= host <= devices + 6 for _, devices, host in seen), "two steps of three tokens are in flight"
    used = engine.executor.devices.programs._compiled
    kinds = [(key.kind, key.variant) for key in used if key.kind in ("decode", "prefill") or key.kind.startswith("mtp")]
    both = {(kind, form) for kind in ("decode", "mtp decode", "mtp prefill") for form in (ABSORBED, TOPK)}
    assert both | {("mtp chain", form) for form in (ABSORBED, TOPK)} <= set(kinds)
    assert engine.stats().pages_in_use == 0 and engine.failure is None


def test_the_forms_cross_where_the_device_says() -> None:
    """An H100 has more operations per byte than an H200: copies cost it more, so it masks longer prompts."""
    kinds = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H20", "an unknown GPU")
    peaks = [peaks_of(kind) for kind in kinds]
    assert peaks == [PEAKS["H200"], PEAKS["H100"], PEAKS["H20"], PEAKS["H200"]]
    rooms = [forms.masked_capacity(DEEPSEEK_V32, each, "bfloat16", 4096) for each in peaks]
    assert rooms[2] < rooms[0] == rooms[3] < rooms[1]
