"""The notebooks of `examples/`: executed with the bundled model, committed without outputs."""

import itertools
import pathlib
import re

import nbclient
import nbformat
import pytest

# Programs of the smallest batches: those of an `LLM()` take twice the time of the cells behind it. The limits say how
# many requests are computed at once, and no cell depends on that.
LIMITS = "max_num_seqs=1, max_model_len=256, max_num_batched_tokens=64"
SMALLER = {
    "LLM()": f"LLM({LIMITS})",
    "LLM(dtype": "LLM(max_num_seqs=8, decode_batch_sizes='8', max_model_len=64, max_num_batched_tokens=64, dtype",
    "STEPS = 20": "STEPS = 2",
    "llm.engine.model_cfg, max_tokens=24": "llm.engine.model_cfg, group_size=8, max_tokens=12",
    "n=32": "n=16",
}
EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell):
    """What a cell printed, without the terminal codes of progress bars."""
    printed = (output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")
    return re.sub(r"\x1b\[[^@-~]*[@-~]", "", "".join(printed))


def pictures_of(cell):
    return [output for output in cell.outputs if "image/png" in output.get("data", {})]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_valid_and_committed_without_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(notebook))


def executed(name):
    notebook = read(EXAMPLES / name)
    for cell, (usual, smaller) in itertools.product(code_cells(notebook), SMALLER.items()):
        cell.source = cell.source.replace(usual, smaller)
    resources = {"metadata": {"path": str(EXAMPLES.parent)}}
    return nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()


@pytest.fixture(scope="module")
def quickstart():
    return executed("quickstart.ipynb")


@pytest.fixture(scope="module")
def inside():
    return executed("inside.ipynb")


@pytest.fixture(scope="module")
def plan():
    return executed("plan.ipynb")


def warnings_of(notebook):
    return [
        output.text
        for cell in code_cells(notebook)
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stderr" and "Warning" in output.text
    ]


def test_text_comes_in_three_cells(quickstart):
    first = code_cells(read(EXAMPLES / "quickstart.ipynb"))
    assert first[0].source == "from dsv3 import LLM, SamplingParams"
    assert first[1].source == "llm = LLM()"
    prompt = "def read_lines(path):\n"
    shown = text_of(code_cells(quickstart)[2])
    assert prompt in shown and len(shown.split(prompt)[1].strip()) > 20


def test_no_cell_warns(quickstart):
    assert not warnings_of(quickstart)


def test_it_shows_probabilities_and_experts_as_pictures(quickstart):
    assert sum(len(pictures_of(cell)) for cell in code_cells(quickstart)) == 2


def test_prompts_with_one_beginning_share_it(quickstart):
    [shown] = [text_of(cell) for cell in code_cells(quickstart) if "num_cached_tokens" in cell.source]
    cached, read_tokens = shown.split(", ")[-1].removesuffix(" prompt tokens cached\n").split(" of ")
    assert 0 < int(cached) < int(read_tokens)


def test_the_step_by_hand_equals_the_engine(quickstart):
    [shown] = [text_of(cell) for cell in code_cells(quickstart) if "by_hand" in cell.source]
    by_hand, by_engine = shown.strip().splitlines()[-1].removeprefix("by hand ").split(", by the engine ")
    assert by_hand == by_engine and len(by_hand) > 2


def test_the_inside_of_a_prompt_is_drawn(inside):
    assert not warnings_of(inside)
    assert sum(len(pictures_of(cell)) for cell in code_cells(inside)) == 5
    [shapes] = [text_of(cell) for cell in code_cells(inside) if "llm.inspect(prompt)" in cell.source]
    assert re.search(r"attention +float32 +\(\d+, (\d+), \1\)", shapes) and "expert_ids" in shapes


def test_inspecting_leaves_the_engine_alone_and_agrees_with_it(inside):
    [shown] = [text_of(cell) for cell in code_cells(inside) if "steps before serving" in cell.source]
    inspected, served, steps = re.search(r"inspected (\d+), served (\d+), steps before serving (\d+)", shown).groups()
    assert inspected == served and steps == "0"


def test_a_deployment_is_planned_and_drawn(plan):
    assert not warnings_of(plan)
    assert sum(len(pictures_of(cell)) for cell in code_cells(plan)) == 1
    text = "".join(map(text_of, code_cells(plan)))
    assert re.search(r"node_8xh800 .* does not fit", text) and re.search(r"decode_ep144 .* fits", text)
    rooms = [int(room.replace(",", "")) for room in re.findall(r"([\d,]+) tokens each at most", text)]
    assert len(rooms) == 6 and rooms[:3] == sorted(rooms[:3], reverse=True) and rooms[3] > rooms[0]


def test_rewards_train_the_model_that_serves():
    notebook = executed("grpo.ipynb")
    assert not warnings_of(notebook)
    text = "".join(map(text_of, code_cells(notebook)))
    before, after = map(int, re.search(r"(\d+)% before, (\d+)% after 2 steps", text).groups())
    assert after > before  # the seeds are fixed
    assert "largest difference of a ratio from 1: 0.0\n" in text
    assert sum(len(pictures_of(cell)) for cell in code_cells(notebook)) == 1
