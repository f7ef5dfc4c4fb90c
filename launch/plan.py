"""Says whether a model fits a deployment, what it sends, what overlaps, and how fast it could be. Needs no GPU.

  python -m launch.plan decode_ep144                          DeepSeek-V3 on 18 nodes of 8 H800
  python -m launch.plan prefill_ep32 --plot=layer.png         with a picture of one layer
  python -m launch.plan decode_ep144 --prefill=prefill_ep32   how many prefill nodes feed it, and what they pass on
  python -m launch.plan mine.toml --model=/models/Kimi-K2     your own deployment and model
  python -m launch.plan decode_ep144 --speculative_config='{"method": "mtp"}' --acceptance=0.85      with drafts
  python -m launch.plan fleet --traffic=day6                  how many instances DeepSeek's published day needs
  python -m launch.plan train --config=deepseek_v3_training --mesh=stage=16,data=2,expert=64      a training run

DEPLOYMENT is prefill_ep32, decode_ep144, node_8xh200, node_8xh800, or a JSON or TOML file with the fields of
tools.plan.deployment.Deployment. The programs are the server's own, compiled for the described GPUs; that takes one to
some minutes. Exit status 1: it does not fit; the numbers and what to change are printed. docs/plan.md explains.

`fleet` compiles nothing: rates are published figures or plans written with --json. docs/plan.md explains it. `train`
compiles nothing either: the programs of the pipeline are traced for their shapes. docs/training.md explains it.
"""

import dataclasses
import importlib.util
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags as absl_flags

from launch import described, flags, plan_training
from tools.plan import published_day

if TYPE_CHECKING:
    from dsv3.config.model import ModelConfig
    from tools.plan.deployment import Deployment

_MODEL = absl_flags.DEFINE_string(
    "model",
    "deepseek_v3",
    f"Plan for this model: {', '.join(described.MODELS)}, or a Hugging Face directory (only its config.json is read).",
)
_SPECULATIVE = absl_flags.DEFINE_string(
    "speculative_config",
    None,
    "Plan with drafts; a JSON object as in launch.serve, of the method mtp. With it the deployment's own is not read.",
)
_ACCEPTANCE = absl_flags.DEFINE_list(
    "acceptance",
    None,
    "Take this share of drafts for right: one number for each draft once those before it are, or the shares of rows in "
    "which all drafts up to each place are.",
)
_PREFILL = absl_flags.DEFINE_string(
    "prefill", None, "Say how many nodes of this deployment compute the prompts of DEPLOYMENT, which only decodes then."
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
    "fleet: take tokens per second and node from what DeepSeek published of its fleet, or of its kernels' profiles.",
)
_PREFILL_PLAN = absl_flags.DEFINE_string(
    "prefill_plan", None, "fleet: take prefill's from this file instead, which --json wrote for a deployment."
)
_DECODE_PLAN = absl_flags.DEFINE_string(
    "decode_plan", None, "fleet: take decode's from this file instead, which --json wrote for a deployment."
)
_GPU_HOUR = absl_flags.DEFINE_float("gpu_hour", published_day.GPU_HOUR, "fleet: dollars per GPU and hour.")
_FOR_FLEETS = (_TRAFFIC, _RATES, _PREFILL_PLAN, _DECODE_PLAN, _GPU_HOUR)
_NOT_FOR_FLEETS = (_SPECULATIVE, _ACCEPTANCE, _PREFILL, _PLOT)


def main(deployment: str) -> int:
    """Plans one deployment; the exit status is 1 if it does not fit."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # before jax starts: a GPU that is present must not be asked
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for name, path in (("json", _JSON.value), ("plot", _PLOT.value)):
        if path and not Path(path).absolute().parent.is_dir():
            raise flags.UsageError(f"--{name} {path}: there is no such folder")
    if deployment == "fleet":
        return _fleet()
    if deployment == "train":
        return _train()
    if given := plan_training.given():
        raise flags.UsageError(f"--{given[0]} is for train: python -m launch.plan train --config=tiny --mesh=stage=2")
    if given := _given_for_fleets():
        raise flags.UsageError(f"--{given[0]} is for fleet: python -m launch.plan fleet --traffic=day6")
    if _PLOT.value and importlib.util.find_spec("matplotlib") is None:
        raise flags.UsageError("--plot needs matplotlib: install the 'plots' extra")
    prefill = None if _PREFILL.value is None else described.deployment(_PREFILL.value)
    return _plan(described.model(_MODEL.value), _with_drafts(described.deployment(deployment)), prefill)


def _fleet() -> int:
    """Plans a fleet on paper."""
    if given := [flag.name for flag in _NOT_FOR_FLEETS if flag.value]:
        raise flags.UsageError(f"fleet takes no --{given[0]}")
    written = _plan_day(described.model(_MODEL.value), Path(_MODEL.value).name)
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(written, indent=1) + "\n")
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


def _rate(kind: published_day.Kind, path: str | None, model_name: str) -> published_day.InstanceRate:
    if path is not None:
        return published_day.read_rate(kind, Path(path), model_name)
    if model_name != PUBLISHED_MODEL:
        raise flags.UsageError(f"published rates are {PUBLISHED_MODEL}'s: give --{kind}_plan for --model {model_name}")
    return published_day.PUBLISHED_RATES[_RATES.value][published_day.KINDS.index(kind)]


def _given_for_fleets() -> list[str]:
    return [flag.name for flag in _FOR_FLEETS if flag.present]


def _train() -> int:
    """Plans a training run."""
    if given := [flag.name for flag in (*_NOT_FOR_FLEETS, _MODEL) if flag.present] + _given_for_fleets():
        raise flags.UsageError(f"train takes no --{given[0]}: --config says what is trained")
    written, fits = plan_training.plan()
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(written, indent=1) + "\n")
    return 0 if fits else 1


def _plan(model: "ModelConfig", deployment: "Deployment", prefill: "Deployment | None") -> int:
    from rich.console import Console

    from pallas_kernels.aot import AotUnavailableError
    from tools.plan import report
    from tools.plan.deployment import DeploymentError
    from tools.plan.plan import make_plan
    from tools.plan.simulated import ends_of

    console = Console()
    try:
        with Console(stderr=True).status("") as status:
            plan = make_plan(model, Path(_MODEL.value).name, deployment, status.update)
            feeding = None if prefill is None else make_plan(model, plan.model_name, prefill, status.update)
            if feeding is not None and plan.steps and not deployment.prefill_tokens:
                plan = dataclasses.replace(plan, ends=ends_of(model, deployment, status.update))
    except (DeploymentError, AotUnavailableError) as error:
        raise flags.UsageError(str(error)) from error
    console.print(report.render(plan, feeding))
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(report.as_json(plan, feeding), indent=1) + "\n")
    if _PLOT.value and plan.steps:
        from tools.plan.report import draw

        draw(plan, Path(_PLOT.value))
    return 0 if plan.verdict.fits else 1


def _with_drafts(deployment: "Deployment") -> "Deployment":
    """Returns the deployment with the drafts and the acceptance that the flags say."""
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
