"""Plans a deployment without GPUs: whether a model fits, what it sends, what overlaps, and how fast it could be.

  python -m launch.plan decode_ep144                          DeepSeek-V3 on 18 nodes of 8 H800
  python -m launch.plan prefill_ep32 --plot=layer.png         with a picture of one layer
  python -m launch.plan decode_ep144 --prefill=prefill_ep32   with KV transfer from that many prefill nodes
  python -m launch.plan mine.toml --model=/models/Kimi-K2     your own deployment and model
  python -m launch.plan decode_ep144 --speculative_config='{"method": "mtp"}' --acceptance=0.85      with drafts
  python -m launch.plan v4_flash_4xh200 --model=deepseek_v4_flash     DeepSeek-V4 on 4 H200, from shapes in a second
  python -m launch.plan fleet --traffic=day6                  how many instances DeepSeek's published day needs
  python -m launch.plan train --config=deepseek_v3_training --mesh=stage=16,data=2,expert=64      a training run

DEPLOYMENT is prefill_ep32, decode_ep144, node_8xh200, node_8xh800, one of DeepSeek-V4's (docs/plan.md), or a JSON or
TOML file with the fields of tools.plan.deployment.Deployment. Compiling the server's programs for its GPUs takes
minutes; plans of DeepSeek-V4 compile none. Exit status 1: it does not fit; the output says by how much and what to
change (docs/plan.md).

`fleet` compiles nothing: rates are published figures or plans written with --json (docs/plan.md). `train` only traces
the programs of the pipeline for their shapes (docs/training.md).
"""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags as absl_flags

from launch import catalog, flags, plan_training
from tools.plan import published_day
from tools.plan.deployment import PHASES, Phase

if TYPE_CHECKING:
    from dsv3.config.model import ModelConfig
    from tools.plan.deployment import Deployment

_MODEL = absl_flags.DEFINE_string(
    "model",
    "deepseek_v3",
    f"Plan for this model: {', '.join(catalog.MODELS)}, or a Hugging Face directory (only its config.json is read).",
)
_SPECULATIVE = absl_flags.DEFINE_string(
    "speculative_config",
    None,
    "Plan with drafts (method mtp or dspark); a JSON object as in launch.serve, in place of the deployment's.",
)
_ACCEPTANCE = absl_flags.DEFINE_list(
    "acceptance",
    None,
    "Assume this acceptance of drafts: the chance of each draft if those before are accepted, or for each position the "
    "share of rows in which all drafts up to it are.",
)
_PREFILL = absl_flags.DEFINE_string(
    "prefill", None, "Plan how many nodes of this deployment compute the prompts for DEPLOYMENT, which only decodes."
)
_JSON = absl_flags.DEFINE_string("json", None, "Write everything to this file as JSON.")
_PLOT = absl_flags.DEFINE_string("plot", None, "Draw the timeline of one MoE layer to this PNG file.")
absl_flags.adopt_module_key_flags(plan_training)
PUBLISHED_MODEL = "deepseek_v3"
_TRAFFIC = absl_flags.DEFINE_enum("traffic", None, ["day6"], "fleet: plan for DeepSeek's published day.")
_RATES = absl_flags.DEFINE_enum(
    "rates",
    "fleet",
    [*published_day.PUBLISHED_RATES],
    "fleet: use the tokens per second and node that DeepSeek published of its fleet, or of its kernels' profiles.",
)
_PREFILL_PLAN = absl_flags.DEFINE_string(
    "prefill_plan", None, "fleet: use the rate of this prefill plan instead, written with --json."
)
_DECODE_PLAN = absl_flags.DEFINE_string(
    "decode_plan", None, "fleet: use the rate of this decode plan instead, written with --json."
)
_GPU_HOUR = absl_flags.DEFINE_float("gpu_hour", published_day.GPU_HOUR, "fleet: dollars per GPU and hour.")
_FLEET_FLAGS = (_TRAFFIC, _RATES, _PREFILL_PLAN, _DECODE_PLAN, _GPU_HOUR)
_DEPLOYMENT_FLAGS = (_SPECULATIVE, _ACCEPTANCE, _PREFILL, _PLOT)


def main(deployment: str) -> int:
    """Plans one deployment; the exit status is 1 if it does not fit."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # before jax starts: leave present GPUs alone
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    flags.check_outputs(_JSON.value, _PLOT.value, (".png",))
    if deployment == "fleet":
        return _fleet()
    if deployment == "train":
        return _train()
    if given := plan_training.given():
        raise flags.UsageError(f"--{given[0]} is for train: python -m launch.plan train --config=tiny --mesh=stage=2")
    if given := _given_fleet_flags():
        raise flags.UsageError(f"--{given[0]} is for fleet: python -m launch.plan fleet --traffic=day6")
    prefill = None if _PREFILL.value is None else catalog.deployment(_PREFILL.value)
    return _plan(catalog.model(_MODEL.value), _with_drafts(catalog.deployment(deployment)), prefill)


def _fleet() -> int:
    """Plans the capacity of a fleet."""
    if given := [flag.name for flag in _DEPLOYMENT_FLAGS if flag.value]:
        raise flags.UsageError(f"fleet takes no --{given[0]}")
    flags.write_json(_JSON.value, _plan_day(catalog.model(_MODEL.value), Path(_MODEL.value).name))
    return 0


def _plan_day(model: "ModelConfig", model_name: str) -> dict[str, Any]:
    """Plans and prints DeepSeek's published day; returns it for JSON."""
    from rich.console import Console

    if _TRAFFIC.value is None:
        raise flags.UsageError("fleet needs --traffic=day6")
    if not 0 < _GPU_HOUR.value < math.inf:
        raise flags.UsageError(f"--gpu_hour {_GPU_HOUR.value:g}: must be a number above 0")
    try:
        prefill = _rate("prefill", _PREFILL_PLAN.value, model_name)
        decode = _rate("decode", _DECODE_PLAN.value, model_name)
        # Without a plan: two bytes per value in every layer, which is bfloat16, and no MTP module.
        token = decode.token_bytes or model.num_hidden_layers * model.latent_dim * 2
        planned = published_day.plan_day(prefill, decode, token, _GPU_HOUR.value)
    except published_day.RateError as error:
        raise flags.UsageError(str(error)) from error
    Console().print(published_day.render(planned))
    return planned


def _rate(kind: Phase, path: str | None, model_name: str) -> published_day.InstanceRate:
    if path is not None:
        return published_day.read_rate(kind, Path(path), model_name)
    if model_name != PUBLISHED_MODEL:
        raise flags.UsageError(f"published rates are {PUBLISHED_MODEL}'s: give --{kind}_plan for --model {model_name}")
    return published_day.PUBLISHED_RATES[_RATES.value][PHASES.index(kind)]


def _given_fleet_flags() -> list[str]:
    return [flag.name for flag in _FLEET_FLAGS if flag.present]


def _train() -> int:
    """Plans a training run."""
    if given := [flag.name for flag in (*_DEPLOYMENT_FLAGS, _MODEL) if flag.present] + _given_fleet_flags():
        raise flags.UsageError(f"train takes no --{given[0]}: --config names the model")
    written, fits = plan_training.plan()
    flags.write_json(_JSON.value, written)
    return 0 if fits else 1


def _plan(model: "ModelConfig", deployment: "Deployment", prefill: "Deployment | None") -> int:
    if model.compressed is not None:
        return _plan_from_shapes(model, deployment)
    from rich.console import Console

    from pallas_kernels.aot import AotUnavailableError
    from tools.plan import report
    from tools.plan.deployment import DeploymentError
    from tools.plan.plan import make_plan, partial_page_cost

    console = Console()
    try:
        with Console(stderr=True).status("") as status:
            plan = make_plan(model, Path(_MODEL.value).name, deployment, status.update)
            prefill_plan = None if prefill is None else make_plan(model, plan.model_name, prefill, status.update)
            if prefill_plan is not None and plan.steps and not deployment.prefill_tokens:
                plan = dataclasses.replace(plan, partial_pages=partial_page_cost(model, deployment, status.update))
    except (DeploymentError, AotUnavailableError) as error:
        raise flags.UsageError(str(error)) from error
    console.print(report.render(plan, prefill_plan))
    flags.write_json(_JSON.value, report.as_json(plan, prefill_plan))
    if _PLOT.value and plan.steps:
        report.draw(plan, Path(_PLOT.value))
    return 0 if plan.verdict.fits else 1


def _plan_from_shapes(model: "ModelConfig", deployment: "Deployment") -> int:
    """Plans a model whose programs are not compiled here: DeepSeek-V4."""
    from rich.console import Console

    from pallas_kernels.aot import AotUnavailableError
    from tools.plan import uncompiled_report
    from tools.plan.deployment import DeploymentError
    from tools.plan.uncompiled import uncompiled_plan

    if given := [flag.name for flag in (_PREFILL, _PLOT) if flag.value]:
        raise flags.UsageError(f"--{given[0]} needs compiled programs; plans of {_MODEL.value} are made from shapes")
    try:
        plan = uncompiled_plan(model, Path(_MODEL.value).name, deployment)
    except (DeploymentError, AotUnavailableError) as error:
        raise flags.UsageError(str(error)) from error
    Console().print(uncompiled_report.render(plan))
    flags.write_json(_JSON.value, uncompiled_report.as_json(plan))
    return 0 if plan.verdict.fits else 1


def _with_drafts(deployment: "Deployment") -> "Deployment":
    """Returns the deployment with drafts and acceptance of the flags."""
    from tools.plan.deployment import DeploymentError

    given: dict[str, Any] = {}
    if _SPECULATIVE.value is not None:
        given["speculative_config"] = _json_object(_SPECULATIVE.value)
    if _ACCEPTANCE.value:
        given["acceptance"] = _shares(_ACCEPTANCE.value)
    try:
        return dataclasses.replace(deployment, **given)
    except DeploymentError as error:
        raise flags.UsageError(str(error)) from error


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise flags.UsageError(f"--speculative_config: {text!r} is not a JSON object")
    return value


def _shares(texts: list[str]) -> float | tuple[float, ...]:
    try:
        shares = tuple(map(float, texts))
    except ValueError:
        raise flags.UsageError(f"--acceptance: {','.join(texts)!r} is not a number, nor a list of numbers") from None
    return shares[0] if len(shares) == 1 else shares


if __name__ == "__main__":
    flags.run(main, positional="DEPLOYMENT")
