"""The check of whole steps passes right kernels, whatever rounding does, and catches wrong ones."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.tiny import MODEL as TINY
from dsv3.engine.build import bundled_model
from dsv3.kv_cache.layout import pool
from dsv3.model.batch import DecodeBatch
from dsv3.model.params import ParamSpec, declare
from pallas_kernels import mla
from pallas_kernels.backend import Backend
from tools.doctor import checks, step
from tools.doctor.step import FAMILIES, Model, Work, random_params, two_layers

CFG = dataclasses.replace(TINY, num_hidden_layers=2, num_nextn_predict_layers=0, vocab_size=256)


@pytest.fixture(scope="module")
def tiny() -> tuple[Model, Work]:
    rng = np.random.default_rng(1)

    def draw(spec: ParamSpec) -> np.ndarray:
        """Returns values as `random_params` does, in numpy: jax would compile a generator for each shape."""
        if spec.init == "normal":
            return rng.normal(scale=0.45 * CFG.hidden_size**-0.5, size=spec.shape).astype(np.float32)
        return np.full(spec.shape, spec.init == "ones", np.float32)

    model = Model(CFG, jax.tree.map(draw, declare(CFG)), "float32")
    first, second = ([rng.integers(0, 256, n, np.int32) for n in lengths] for lengths in ((17, 1, 3), (8, 2, 0)))
    return model, Work(first, second, 32, 2, None, False)


def check(monkeypatch, capsys, made: tuple[Model, Work]) -> tuple[int, dict[str, dict]]:
    """Runs the command with another model in the bundled one's place; programs with kernels are traced anew."""
    reference = step._programs(Backend.REFERENCE, "float32")
    fresh = step._programs.__wrapped__
    known: dict = {(Backend.REFERENCE, "float32"): reference}
    monkeypatch.setattr(step, "_programs", lambda *key: known.get(key) or known.setdefault(key, fresh(*key)))
    monkeypatch.setattr(step, "bundled", lambda quick: made)
    status = step.main(["bundled"])
    rows = map(json.loads, capsys.readouterr().out.splitlines())
    return status, {row["case"]: row for row in rows}


def test_this_machines_kernels_pass(monkeypatch, capsys, tiny):
    status, rows = check(monkeypatch, capsys, tiny)
    assert status == 0, rows
    assert list(rows) == ["prefill", "prefill with context", "decode", "greedy tokens"]
    assert [rows[kind]["figures"]["rows"] for kind in list(rows)[:3]] == [21, 10, 4]
    assert rows["greedy tokens"]["figures"] == {"tokens": 4, "agree": 4}


def short_sighted(right):
    """Attends to one token less than there are."""
    return lambda q, pages, table, lengths, **how: right(q, pages, table, lengths - 1, **how)


def inexact(right):
    """Writes latents that are one percent too large."""
    return lambda pages, latents, *where, **how: right(pages, 1.01 * latents, *where, **how)


@pytest.mark.parametrize(
    ("name", "wrong", "fail"),
    [("mla_decode", short_sighted, {"decode"}), ("write_pages", inexact, {"prefill with context", "decode"})],
)
def test_a_wrong_kernel_is_found(monkeypatch, capsys, tiny, name, wrong, fail):
    right = getattr(mla, name)
    broken = wrong(right)

    def kernel(*args, **how):
        return (right if how["backend"] is Backend.REFERENCE else broken)(*args, **how)

    monkeypatch.setattr(mla, name, kernel)
    status, rows = check(monkeypatch, capsys, tiny)
    assert status == 1
    assert {case for case, row in rows.items() if not row["passed"]} == fail
    assert all("is allowed" in rows[case]["says"] for case in fail)


def test_a_kernel_that_gives_something_else_the_second_time_is_found(monkeypatch, tiny):
    runs = []
    right = step.run

    def run(model, backend, work):
        found = right(model, Backend.REFERENCE, work)
        if backend is not Backend.REFERENCE:
            runs.append(backend)
            found.hidden["decode"][1, 2] *= 1 + 1e-6 * len(runs)
        return found

    monkeypatch.setattr(step, "run", run)
    cases = step.cases(lambda: tiny, Backend.NATIVE)
    assert cases["prefill"]().passed and len(runs) == 2
    assert cases["decode"]().says == "two runs differ in 1 rows"


ROWS = np.random.default_rng(2).normal(size=(100, 64))


def rounded(seed: int, size: float = 4e-3) -> np.ndarray:
    return ROWS + size * np.random.default_rng(seed).normal(size=ROWS.shape)


def judged(found: np.ndarray) -> tuple[bool, str]:
    row = step.judge("decode", found, rounded(3), ROWS, 1e-6)
    return row.passed, row.says


def test_rounding_and_a_few_other_choices_pass():
    other = rounded(4, 8e-3)
    other[[7, 70]] += 0.5 * np.random.default_rng(5).normal(size=(2, 64))
    assert judged(other) == (True, "")


@pytest.mark.parametrize("fault", ["one row", "two percent", "not finite", "half"])
def test_what_rounding_cannot_do_fails(fault):
    found = rounded(6)
    if fault == "one row":
        found[70] = -found[71]
    elif fault == "two percent":
        found *= 1.02
    elif fault == "not finite":
        found[70, 3] = np.nan
    else:
        found[::2] *= 1.1
    passed, says = judged(found)
    assert not passed
    if fault in ("one row", "not finite"):
        assert "the worst is row 70 of 100" in says


def test_tokens_say_how_near_the_tie_was():
    reference = np.zeros((3, 2, 5), np.float32)
    reference[..., 2] = 1
    found = reference.copy()
    found[1, 1, 4] = 1.25
    row = step.tokens_row(found, reference)
    assert row.passed and row.figures == {"tokens": 6, "agree": 5, "gap": 1}
    assert "at token 1 of request 1: 4 in place of 2, whose logit is greater by 1 in the reference" in row.says
    assert not step.tokens_row(found * np.nan, reference).passed


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_keeps_what_makes_it_one(name):
    """Its layers are traced with this machine's kernels; types and the router's choice are the family's."""
    whole, cfg = FAMILIES[name], two_layers(FAMILIES[name], narrow=True)
    assert (cfg.num_dense_layers, cfg.num_moe_layers) in ((1, 1), (0, 2))
    assert cfg.num_experts_per_tok == whole.num_experts_per_tok < cfg.n_routed_experts // cfg.n_group * cfg.topk_group
    params = jax.eval_shape(lambda: random_params(cfg))
    kept = {type(params.moe.moe.down).__name__, type(params.moe.attention.o).__name__}
    assert kept == (
        {"Int4Weight", "ShapeDtypeStruct"} if cfg.int4_experts else {"Fp8Weight" if cfg.fp8 else "ShapeDtypeStruct"}
    )
    tokens, table = jnp.zeros((2, 1), jnp.int32), jnp.zeros((2, 3), jnp.int32)
    batch = DecodeBatch(tokens, jnp.array([70, 0]), table)
    _, decode, _ = step._programs(Backend.REFERENCE, "bfloat16")
    hidden, logits, _ = jax.eval_shape(decode, params, cfg, batch, pool(cfg, "bfloat16", 7))
    assert hidden.shape == (2, 1, 512) and logits.shape == (2, 1, 1024)


def test_steps_and_collectives_are_checked_before_a_server(monkeypatch):
    monkeypatch.setattr(checks, "count_gpus", lambda: 8)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    names = [(check.section, check.name) for check in checks.table(bundled_model(), quick=False)]
    expected = [("step", "models"), ("step", "stored"), ("collectives", "kinds"), ("serve", "server")]
    assert [name for name in names if name in expected] == expected
    assert not {"step", "collectives"} & {check.section for check in checks.table(bundled_model(), quick=True)}


def test_the_list_is_of_models(capsys):
    assert step.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == ["bundled", *FAMILIES]
