"""Prompts and arrival times: lengths, seeds, shared prefixes, files."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench.workload import Prompt, RandomPrompts, RequestFormat, arrival_offsets, load_dataset, repeat

IDS = range(500)


@given(st.integers(1, 60), st.integers(1, 60), st.floats(0, 0.99), st.integers(0, 20), st.integers(0, 2**32))
def test_lengths_stay_in_their_range(input_len, output_len, ratio, prefix_len, seed):
    shape = RandomPrompts(input_len, output_len, ratio, prefix_len)
    for prompt in shape.draw(5, IDS, seed):
        own = len(prompt.content) - prefix_len
        assert max(1, int(input_len * (1 - ratio))) <= own <= np.ceil(input_len * (1 + ratio))
        assert max(1, int(output_len * (1 - ratio))) <= prompt.output_len <= np.ceil(output_len * (1 + ratio))


def test_lengths_are_exact_without_a_range():
    prompts = list(RandomPrompts(7, 3).draw(4, IDS, seed=1))
    assert [(len(p.content), p.output_len) for p in prompts] == [(7, 3)] * 4


def test_a_seed_fixes_the_prompts():
    shape = RandomPrompts(20, 5, 0.5, 4, 2)
    assert list(shape.draw(9, IDS, 3)) == list(shape.draw(9, IDS, 3))
    assert list(shape.draw(9, IDS, 3)) != list(shape.draw(9, IDS, 4))


def test_prefixes_are_shared_evenly_and_the_rest_is_not():
    prompts = [p.content for p in RandomPrompts(16, 1, prefix_len=8, num_prefixes=2).draw(6, IDS, 0)]
    assert {tuple(p[:8]) for p in prompts[0::2]} == {tuple(prompts[0][:8])}
    assert prompts[0][:8] != prompts[1][:8]
    assert len({tuple(p[8:]) for p in prompts}) == 6


def test_words_make_text():
    [prompt] = RandomPrompts(5, 1).draw(1, ["alpha", "beta"], 0)
    assert len(prompt.content.split()) == 5 and set(prompt.content.split()) <= {"alpha", "beta"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input_len": 0}, "input_len"),
        ({"output_len": 0}, "output_len"),
        ({"range_ratio": 1.0}, "range_ratio"),
        ({"range_ratio": float("nan")}, "range_ratio"),
        ({"prefix_len": -1}, "prefix_len"),
        ({"num_prefixes": 0}, "num_prefixes"),
    ],
)
def test_a_shape_out_of_range_names_its_option(fields, named):
    with pytest.raises(ValueError, match=f"--{named}"):
        RandomPrompts(**({"input_len": 4, "output_len": 4} | fields))


def test_dataset_lines(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a"}, {"prompt": [1, 2], "max_tokens": 9}, {"messages": [{"role": "user", "content": "b"}]}]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    prompts = load_dataset(path, output_len=4)
    assert prompts == [Prompt("a", 4), Prompt([1, 2], 9), Prompt(rows[2]["messages"], 4)]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "{}", '{"prompt": ""}', '{"prompt": []}', '{"prompt": 1}', '{"prompt": "a", "messages": []}',
     '{"prompt": "a", "max_tokens": 0}', '{"prompt": "a", "max_tokens": "9"}'],
)  # fmt: skip
def test_a_wrong_dataset_line_is_named(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2"):
        load_dataset(path, 4)


def test_an_empty_dataset_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no prompts"):
        load_dataset(tmp_path / "empty.jsonl", 4)


def test_repeated_prompts_are_used_equally_often_up_to_one():
    prompts = [Prompt(str(i), 1) for i in range(3)]
    drawn = repeat(prompts, 7, seed=0)
    counts = [drawn.count(prompt) for prompt in prompts]
    assert len(drawn) == 7 and sorted(counts) == [2, 2, 3]
    assert sorted(repeat(prompts, 3, seed=1), key=str) == prompts


def test_bodies_of_both_endpoints():
    text = json.loads(RequestFormat("completions", "m", 0.5).body(Prompt([1, 2], 8)))
    assert text["prompt"] == [1, 2] and text["max_tokens"] == 8 and text["temperature"] == 0.5
    assert text["stream"] and text["stream_options"] == {"include_usage": True}
    assert text["ignore_eos"] and text["return_token_ids"]
    chat = json.loads(RequestFormat("chat", "m", extensions=False).body(Prompt("hello", 8)))
    assert chat["messages"] == [{"role": "user", "content": "hello"}]
    assert "ignore_eos" not in chat and "return_token_ids" not in chat


def test_prompts_an_endpoint_cannot_take():
    with pytest.raises(ValueError, match="--endpoint=chat"):
        RequestFormat("completions", "m").body(Prompt([{"role": "user", "content": "x"}], 1))
    with pytest.raises(ValueError, match="not token ids"):
        RequestFormat("chat", "m").body(Prompt([1], 1))


def test_arrivals_are_ordered_seeded_and_of_the_rate_asked_for():
    offsets = arrival_offsets(20_000, request_rate=8.0, burstiness=1.0, seed=1)
    gaps = np.diff([0.0, *offsets])
    assert all(a <= b for a, b in itertools.pairwise(offsets))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    # A Poisson process has gaps as wide as their mean.
    assert gaps.std() == pytest.approx(1 / 8, rel=0.05)
    assert offsets == arrival_offsets(20_000, 8.0, 1.0, seed=1)


def test_burstiness_is_the_inverse_square_of_the_spread():
    gaps = np.diff([0.0, *arrival_offsets(20_000, request_rate=1.0, burstiness=4.0, seed=1)])
    assert gaps.std() / gaps.mean() == pytest.approx(0.5, rel=0.05)


def test_an_infinite_rate_makes_all_due_at_once():
    assert arrival_offsets(3, float("inf"), 1.0, seed=0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, 0.0)])
def test_rates_out_of_range_are_refused(rate, burstiness):
    with pytest.raises(ValueError, match="greater than 0"):
        arrival_offsets(1, rate, burstiness, seed=0)
