"""What prefill and decode on separate instances pass on, and how many nodes of one feed the other. An estimate.

A request of the mean context has a prompt and an answer in a stated proportion. While it is answered its context grows
from the prompt to prompt and answer, so the mean is the prompt and half of the answer.
"""

import dataclasses

from dsv3.scheduler.gathering import MOST_STEPS
from tools.plan.deployment import Deployment


@dataclasses.dataclass(frozen=True)
class Ends:
    """What the ends of prompts cost an instance of `rows` requests with `answer` tokens each, that only decodes.

    Whole pages travel. The 1 to 64 tokens behind the last one are computed by a program of `seconds`, which takes
    nearly as long for one prompt as for one per rank: it reads the same weights and crosses the same links. So prompts
    wait for each other (`dsv3.scheduler.gathering`).
    """

    seconds: float
    rows: int
    answer: float

    @property
    def steps(self) -> float:
        """Decode steps per run of the program: prompts gather for `MOST_STEPS` behind the one in which one comes."""
        return MOST_STEPS + max(1.0, self.answer / self.rows)

    @property
    def per_step(self) -> float:
        """Seconds that the program adds to a decode step at the mean."""
        return self.seconds / self.steps

    def share(self, step: float) -> float:
        """Returns the share that is left of the tokens that decode steps of `step` seconds give alone.

        Steps are longer by the program, and requests that wait for others hold a row without a token.
        """
        return step / (step + self.per_step) * self.answer / (self.answer + MOST_STEPS / 2)


@dataclasses.dataclass(frozen=True)
class Handover:
    """A mean request of a decode unit: tokens of its prompt and of its answer, and the bytes of the prompt's pages.

    `node_seconds` and `cross_seconds` are the time that its pages take over one device's links in a node and between
    nodes. `requests_per_second` is how many a unit of `nodes` finishes, `bytes_per_second` what each of its nodes gets.
    """

    prompt: float
    answer: float
    nbytes: float
    node_seconds: float
    cross_seconds: float
    requests_per_second: float
    bytes_per_second: float


def lengths(deployment: Deployment) -> tuple[float, float]:
    """Returns the mean tokens of a prompt and of an answer."""
    answer = deployment.context_length / (deployment.prompt_per_answer + 0.5)
    return deployment.context_length - answer / 2, answer


def handover(deployment: Deployment, token_bytes: int, tokens_per_node: float) -> Handover:
    """Returns what a decode deployment takes over: `token_bytes` in all layers, `tokens_per_node` per second."""
    prompt, answer = lengths(deployment)
    nbytes = prompt * token_bytes
    finished = tokens_per_node / answer  # requests per second and node
    return Handover(
        prompt=prompt,
        answer=answer,
        nbytes=nbytes,
        node_seconds=nbytes / deployment.device.node_link,
        cross_seconds=nbytes / deployment.device.cross_link,
        requests_per_second=finished * deployment.nodes,
        bytes_per_second=finished * nbytes,
    )


def prefill_nodes(requests_per_second: float, prompt: float, hit_rate: float, tokens_per_node: float) -> float:
    """Returns how many prefill nodes compute the prompts of a decode unit, `tokens_per_node` tokens per second each.

    DeepSeek's fleet had 95.5 prefill nodes for 131.25 of decode, so 13.1 for each unit of 18.
    """
    return requests_per_second * prompt * (1 - hit_rate) / tokens_per_node
