"""The program that computes the ends of prompts, where another instance has computed their whole pages."""

import dataclasses
from collections.abc import Callable

from dsv3.config.model import ModelConfig
from tools.plan.deployment import Deployment
from tools.plan.handover import Ends, lengths
from tools.plan.played import Played
from tools.plan.programs import compile_step, lay_out


def with_ends(deployment: Deployment, page_size: int) -> Deployment:
    """Returns a decode deployment with the program that computes the ends of prompts, each shorter than a page."""
    return dataclasses.replace(deployment, prefill_tokens=page_size, max_num_batched_tokens=page_size)


def ends_of(model: ModelConfig, deployment: Deployment, progress: Callable[[str], None]) -> Ends:
    """Compiles the program of a decode deployment, and estimates its time; an MTP module behind it is left out.

    Ends have half a page at the mean. Raises DeploymentError and `AotUnavailableError` as `make_plan` does.
    """
    planned = lay_out(model, with_ends(deployment, model.page_size))
    progress(f"compiling the ends of prompts for {deployment.devices} x {deployment.device.name}")
    compiled, *_ = compile_step(planned, "prefill")
    prompt, answer = lengths(deployment)
    rows = deployment.decode_requests * deployment.ranks
    return Ends(Played(planned, compiled).seconds(model.page_size, round(prompt / 2)), rows, answer)
