"""What prefill passes on to decode, against the published fleet."""

import dataclasses
import random

import pytest

from configs.deployments import DECODE_EP144
from dsv3.scheduler.balance import PrefillBatching
from tools.plan.deployment import DeploymentError
from tools.plan.plan import Ends, handover, prefill_nodes

TOKEN_BYTES = 70_272
FLEET = handover(DECODE_EP144, TOKEN_BYTES, 14_800)


def test_the_published_fleet_has_its_own_proportion_of_nodes():
    """DeepSeek computed 266 of 608 billion prompt tokens, on 95.5 nodes; 131.25 nodes answered."""
    hits, computed = 342 / 608, 73_700 * 266 / 608
    nodes = prefill_nodes(FLEET.requests_per_second, FLEET.prompt, hits, computed)
    assert nodes == pytest.approx(18 * 95.5 / 131.25, rel=0.01)


def test_a_mean_request_has_the_mean_context():
    assert FLEET.prompt + FLEET.answer / 2 == pytest.approx(4989)
    assert FLEET.prompt / FLEET.answer == pytest.approx(608 / 168)
    assert FLEET.nbytes == pytest.approx(FLEET.prompt * TOKEN_BYTES)
    assert FLEET.cross_seconds == pytest.approx(FLEET.nbytes / 50e9)
    assert FLEET.bytes_per_second * DECODE_EP144.nodes == pytest.approx(FLEET.requests_per_second * FLEET.nbytes)


@pytest.mark.parametrize("every", [1, 5])
def test_the_ends_of_prompts_cost_what_gathering_makes_of_them(every):
    """Three prompts come in each step, or one in five at random: steps per program, and how long a prompt waits."""
    gathering, rows, chance = PrefillBatching(), 4000, random.Random(0)
    ends = Ends(0.048, rows, rows * every if every > 1 else rows / 3)
    programs, prompts, gathered, waited = 0, 0, 0, 0
    for _ in range(6000):
        come = 3 if every == 1 else int(chance.random() * every < 1)
        prompts, gathered = prompts + come, gathered + come
        if not gathered:
            continue
        if gathering.waits(gathered, rows):
            waited += gathered
        else:
            programs, gathered = programs + 1, 0
    assert programs == pytest.approx(6000 / ends.steps, rel=0.05)
    step, answer = 0.08, ends.answer
    left = (step * 6000) / (step * 6000 + programs * ends.seconds) * answer / (answer + waited / prompts)
    assert ends.share(step) == pytest.approx(left, rel=0.01)


def test_a_proportion_must_be_positive():
    with pytest.raises(DeploymentError, match="prompt_per_answer"):
        dataclasses.replace(DECODE_EP144, prompt_per_answer=0)
