"""The part of `launch.plan` that plans a fleet on paper: its flags, what it reads, what it prints. Imports no jax."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags as absl_flags

from launch import flags
from tools.capacity import day6, instances
from tools.capacity.report import Reference, as_json, render
from tools.capacity.staffing import Fleet, Terms, staff
from tools.capacity.trace import read_trace
from tools.capacity.traffic import Traffic, TrafficError, read_traffic

if TYPE_CHECKING:
    from dsv3.config.model import ModelConfig

PUBLISHED_MODEL = "deepseek_v3"
_TRAFFIC = absl_flags.DEFINE_string(
    "traffic",
    None,
    "fleet: plan for this traffic: day6 (DeepSeek's published day), a table of a day (.toml, .json) or a trace of "
    "requests (.jsonl, Mooncake's form).",
)
_RATES = absl_flags.DEFINE_enum(
    "rates",
    "fleet",
    instances.PUBLISHED,
    "fleet: take tokens per second and node from what DeepSeek published of its fleet, or of its kernels' profiles.",
)
_PREFILL_PLAN = absl_flags.DEFINE_string(
    "prefill_plan", None, "fleet: take prefill's from this file instead, which --json wrote for a deployment."
)
_DECODE_PLAN = absl_flags.DEFINE_string(
    "decode_plan", None, "fleet: take decode's from this file instead, which --json wrote for a deployment."
)
_GPU_HOUR = absl_flags.DEFINE_float("gpu_hour", day6.GPU_HOUR, "fleet: dollars per GPU and hour.")
_FLAGS = (_TRAFFIC, _RATES, _PREFILL_PLAN, _DECODE_PLAN, _GPU_HOUR)


def given() -> list[str]:
    """Returns the names of this module's flags that the command line has."""
    return [flag.name for flag in _FLAGS if absl_flags.FLAGS[flag.name].present]


def plan(model: "ModelConfig", model_name: str) -> dict[str, Any]:
    """Plans and prints a fleet; returns it for JSON. Raises UsageError for what cannot be read or does not fit."""
    from rich.console import Console

    if _TRAFFIC.value is None:
        raise flags.UsageError("fleet needs --traffic=day6, or --traffic=FILE")
    if not 0 < _GPU_HOUR.value < math.inf:
        raise flags.UsageError(f"--gpu_hour {_GPU_HOUR.value:g}: must be a number above 0")
    try:
        fleet, notes = _fleet(model, model_name, _traffic(_TRAFFIC.value))
    except (TrafficError, instances.InstanceError) as error:
        raise flags.UsageError(str(error)) from error
    reference = None
    if fleet.traffic is day6.DAY6:
        reference = Reference(day6.as_charted(fleet.terms), day6.PUBLISHED, day6.KNOWN_ERRORS)
    Console().print(render(fleet, notes, reference))
    return as_json(fleet, notes, reference)


def _fleet(model: "ModelConfig", model_name: str, traffic: Traffic) -> tuple[Fleet, list[str]]:
    """Returns the planned fleet, and what must be said of its rates."""
    prefill = _instance("prefill", _PREFILL_PLAN.value, model_name)
    decode = _instance("decode", _DECODE_PLAN.value, model_name)
    notes = [*instances.check(prefill, traffic.prompt), *instances.check(decode, traffic.context)]
    # Without a plan: two bytes per value in every layer, which is bfloat16, and no MTP module.
    token = decode.token_bytes or model.num_hidden_layers * model.latent_dim * 2
    terms = Terms(token, _GPU_HOUR.value)
    return staff(traffic, prefill, decode, terms), notes


def _instance(kind: instances.Kind, path: str | None, model_name: str) -> instances.Instance:
    if path is not None:
        return instances.from_plan(kind, Path(path), model_name)
    if model_name != PUBLISHED_MODEL:
        raise flags.UsageError(f"published rates are {PUBLISHED_MODEL}'s: give --{kind}_plan for --model {model_name}")
    return instances.published(kind, _RATES.value)


def _traffic(name: str) -> Traffic:
    if name == day6.DAY6.name:
        return day6.DAY6
    path = Path(name)
    if not path.is_file():
        raise flags.UsageError(f"--traffic {name}: neither {day6.DAY6.name} nor a file")
    return read_trace(path) if path.suffix == ".jsonl" else read_traffic(path)
