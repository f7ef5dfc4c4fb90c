"""Log-probabilities of prompts: those of the model, for all of the prompt, however it is computed."""

import numpy as np
import pytest

from dsv3.engine.jobs import prompt_logprobs
from dsv3.scheduler.request import PromptLogprobs
from tests.dsv3.engine import toy
from tests.dsv3.engine.driving import Gathered, drain, request, run

PROMPT = [(11 * i) % 60 + 1 for i in range(150)]


def joined(got: Gathered) -> PromptLogprobs | None:
    """The parts joined as by an API server: tokens repeated after a pre-emption are dropped."""
    parts = [output.prompt_logprobs for output in got.outputs if output.prompt_logprobs is not None]
    logprobs = 0
    columns: list[bytes] = [b""] * 4
    for part in parts:
        part = part.behind(logprobs)
        assert part.start <= max(logprobs, 1) or not len(part)
        logprobs = max(logprobs, part.start + len(part))
        columns = [a + getattr(part, n) for a, n in zip(columns, PromptLogprobs.__struct_fields__[1:], strict=True)]
    return PromptLogprobs(1, *columns) if parts else None


def check(got: Gathered, prompt: list[int], count: int) -> None:
    """Compares with the toy's own arithmetic."""
    logprobs = joined(got)
    assert logprobs is not None and len(logprobs) == len(prompt) - 1
    for i, (entry, rank) in enumerate(zip(logprobs.tokens(), logprobs.token_ranks(), strict=True), 1):
        scores = np.array(toy.scores(prompt[:i])) / 8192
        logprobs = scores - np.log(np.exp(scores).sum())
        assert entry.logprob == pytest.approx(logprobs[prompt[i]], abs=1e-4)
        assert rank == 1 + (scores > scores[prompt[i]]).sum()
        assert len(entry.top_ids) == len(entry.top_logprobs) == count
        assert entry.top_logprobs == pytest.approx(sorted(logprobs)[::-1][:count], abs=1e-4)
        assert logprobs[entry.top_ids] == pytest.approx(entry.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("length", [1, 2, 64, 65, 101, 150])
@pytest.mark.parametrize("count", [0, 3])
def test_every_token_but_the_first_has_logprobs(engine, monkeypatch, length, count):
    """Chunks report them in parts, beside requests without, before the first token of the answer."""
    monkeypatch.setattr(prompt_logprobs, "_PART", 31)
    beside = [request(f"beside {i}", PROMPT[i : i + 40], max_tokens=3) for i in range(3)]
    asked = request("a", PROMPT[:length], max_tokens=2, ignore_eos=True, prompt_logprobs=count)
    gathered = run(engine, *beside[:2], asked, beside[2])
    check(gathered["a"], PROMPT[:length], count)
    assert gathered["a"].tokens == toy.expected_tokens(PROMPT[:length], 2, ())
    assert not gathered["a"].outputs[0].token_ids and gathered["a"].last.prompt_logprobs is None
    assert all(joined(gathered[f"beside {i}"]) is None for i in range(3))


def test_cached_pages_are_computed_again_and_serve_others(engine):
    """Pages hold no hidden states; requests without log-probabilities continue to use them."""
    run(engine, request("before", PROMPT, max_tokens=1))
    got = run(engine, request("a", PROMPT, max_tokens=1, prompt_logprobs=1))["a"]
    check(got, PROMPT, 1)
    assert got.last.num_cached_tokens == 0
    assert run(engine, request("after", PROMPT, max_tokens=1))["after"].last.num_cached_tokens == 128


def test_only_the_first_sequence_reports_prompt_logprobs(engine):
    gathered = run(engine, request("a", PROMPT[:70], n=3, temperature=1.0, max_tokens=2, prompt_logprobs=2))
    check(gathered["a"], PROMPT[:70], 2)
    assert joined(gathered["a+1"]) is None and joined(gathered["a+2"]) is None


def test_a_step_reports_a_bounded_number_of_tokens(make_engine, monkeypatch):
    """Other requests have the rest of the step: their prompts are not delayed."""
    monkeypatch.setattr(prompt_logprobs, "MAX_PROMPT_LOGPROB_TOKENS", 10)
    engine = make_engine(num_ranks=2)
    engine.add(request("a", PROMPT[:45], max_tokens=1, prompt_logprobs=1))
    engine.add(request("b", PROMPT[:30], max_tokens=1, prompt_logprobs=1))
    for i in range(4):
        engine.add(request(str(i), PROMPT[i : i + 20], max_tokens=1))
    gathered = drain(engine)
    check(gathered["a"], PROMPT[:45], 1)
    check(gathered["b"], PROMPT[:30], 1)
    for i in range(4):
        assert gathered[str(i)].tokens == toy.expected_tokens(PROMPT[i : i + 20], 1)
    parts = [len(o.prompt_logprobs) for o in gathered["a"].outputs if o.prompt_logprobs is not None]
    assert parts == [10, 10, 10, 10, 4]


def test_pre_empted_requests_report_all_of_the_prompt(engine):
    prompts = [PROMPT[:40], [5] * 60, PROMPT[:20], [9] * 60, PROMPT[:40], [3] * 61]
    for i, prompt in enumerate(prompts):
        engine.add(request(str(i), prompt, max_tokens=140, ignore_eos=True, prompt_logprobs=1))
    gathered = drain(engine)
    assert engine.stats().preemptions > 0
    for i, prompt in enumerate(prompts):
        check(gathered[str(i)], prompt, 1)
        assert gathered[str(i)].tokens == toy.expected_tokens(prompt, 140, ())
