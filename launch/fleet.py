"""The part of `launch.plan` that plans DeepSeek's published day: its flags, what it reads and prints. No jax."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags as absl_flags

from launch import flags
from tools.plan import published_day

if TYPE_CHECKING:
    from dsv3.config.model import ModelConfig

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
_FLAGS = (_TRAFFIC, _RATES, _PREFILL_PLAN, _DECODE_PLAN, _GPU_HOUR)


def given() -> list[str]:
    """Returns the names of this module's flags that the command line has."""
    return [flag.name for flag in _FLAGS if absl_flags.FLAGS[flag.name].present]


def plan(model: "ModelConfig", model_name: str) -> dict[str, Any]:
    """Plans and prints the day; returns it for JSON. Raises UsageError for what cannot be read or does not fit."""
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
