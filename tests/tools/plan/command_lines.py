"""The command lines that README, docs and deploy/ give for GPUs, as the engine's options, each with its machine.

`python -m tests.tools.plan.command_lines` compiles the largest programs of each, with two MoE layers, for GPUs that are
not there, and writes to `working.json` what memory they take, and what those of the published plans do: a minute or two
for each. `test_account.py` reads it.
"""

import dataclasses
import functools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import yaml

from configs.deepseek_v2_lite import DEEPSEEK_V2_LITE
from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import DECODE_EP144, H200, H800, NODE_8XH200, PREFILL_EP32
from configs.glm_4_7_flash import GLM_4_7_FLASH
from dsv3.config.declaration import options_of
from dsv3.config.model import ModelConfig
from dsv3.config.options import EngineOptions
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Programs
from dsv3.engine.device.working import ReadPrograms, measure
from dsv3.engine.dtypes import EngineDtypes
from dsv3.engine.executor import lay_out
from dsv3.engine.jobs.registry import JOB_KINDS
from dsv3.engine.limits import Hardware, engine_config, pages_of_one
from dsv3.engine.parts import Parts
from tools.plan import programs as planning
from tools.plan.deployment import Deployment, Device

ROOT = Path(__file__).parents[3]
WORKING = Path(__file__).with_name("working.json")
H100 = dataclasses.replace(H800, name="H100")
PUBLISHED = (DECODE_EP144, PREFILL_EP32, NODE_8XH200)


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a command line runs on, and the model that it serves."""

    model: ModelConfig
    device: Device
    nodes: int = 1
    gpus_per_node: int = 8


ONE_H100, ONE_NODE = Machine(DEEPSEEK_V2_LITE, H100, 1, 1), Machine(DEEPSEEK_V3, H200)
GLM = Machine(GLM_4_7_FLASH, H100, 1, 1)
DECODE, PREFILL = Machine(DEEPSEEK_V3, H800, 18), Machine(DEEPSEEK_V3, H800, 4)
FILES = {
    "README.md": (ONE_H100, ONE_NODE),
    "docs/batch.md": (ONE_H100, ONE_NODE),
    "docs/models.md": (GLM,),
    "launch/serve.py": (ONE_H100, ONE_NODE),
    "deploy/slurm/decode_ep144.sh": (DECODE,),
    "deploy/slurm/prefill_ep32.sh": (PREFILL,),
    "deploy/slurm/single_node.sh": (ONE_NODE,),
    "deploy/kubernetes/decode/decode.yaml": (DECODE, DECODE),
    "deploy/kubernetes/prefill/prefill.yaml": (PREFILL, PREFILL),
    "deploy/kubernetes/pair/pair.yaml": (ONE_NODE, ONE_NODE),
}
"""The machine of each command line of a file that names a model's directory, in their order."""
_SERVES = re.compile(r"-m launch\.(?:serve|batch) (?:[^\n\\]|\\\n)*--model [/\"](?:[^\n\\#]|\\\n)*")
_OTHER_MODELS = re.compile(r"--model /models/(?!DeepSeek-V3 |DeepSeek-V2-Lite|GLM-4.7-Flash)")


def command_lines(file: str) -> list[list[str]]:
    """Returns the arguments of each command line of a file."""
    text = (ROOT / file).read_text()
    if file.endswith(".yaml"):
        parts = [part for part in yaml.safe_load_all(text) if part]
        return [list(args) for part in parts for args in _containers(part) if any("--model" in a for a in args)]
    found = [match for match in _SERVES.findall(text) if not _OTHER_MODELS.search(match)]
    return [shlex.split(re.sub(r"\s{3,}[a-z].*", "", match.replace("\\\n", " "))) for match in found]


def _containers(part: Any) -> list[list[str]]:
    if isinstance(part, list):
        return [args for each in part for args in _containers(each)]
    if not isinstance(part, dict):
        return []
    own = [part["args"]] if "args" in part else []
    return own + [args for each in part.values() for args in _containers(each)]


def options_in(arguments: list[str]) -> EngineOptions:
    """Returns the engine's options among arguments; all else is not read."""
    known = {each.name: each for each in options_of(EngineOptions)}
    given: dict[str, Any] = {}
    for i, argument in enumerate(arguments):
        name, equals, text = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not argument.startswith("--") or name not in known:
            continue
        if isinstance(known[name].default, bool):
            given[name] = True
        else:
            value = text if equals else arguments[i + 1]
            number = re.fullmatch(r"[0-9.]+", value)
            given[name] = (float(value) if "." in value else int(value)) if number else value
    return EngineOptions(**given)


def served(machine: Machine, options: EngineOptions) -> tuple[Layout, Programs]:
    """Returns what a server with these options has on its devices, from shapes, with the smallest pool."""
    deployment = Deployment(
        "served",
        machine.device,
        machine.nodes,
        machine.gpus_per_node,
        decode_requests=1,
        expert_parallel=options.enable_expert_parallel,
        redundant_experts=options.num_redundant_experts,
    )
    planned = planning.lay_out(machine.model, deployment)
    hardware = Hardware(deployment.ranks, machine.nodes, is_cpu=False)
    pages = pages_of_one(machine.model, options)
    cfg = engine_config(
        planned.model, options, hardware, EngineDtypes(jnp.dtype(jnp.bfloat16), "bfloat16"), pages=pages
    )
    parts = Parts(planned.functions, planned.params, planned.model, cfg, planned.mesh, tokenizer=Path("tokenizer.json"))
    layout, programs = lay_out(parts, JOB_KINDS)
    programs.store = ReadPrograms()
    return layout, programs


def shallow(model: ModelConfig) -> ModelConfig:
    """Returns the model with two MoE layers: its loops are scans, so programs take the same memory."""
    return dataclasses.replace(model, num_hidden_layers=model.first_k_dense_replace + 2)


def all_lines() -> list[tuple[str, Machine, EngineOptions]]:
    """Returns every command line: its file, its machine, its options."""
    return [
        (file, machine, options_in(line))
        for file, machines in FILES.items()
        for machine, line in zip(machines, command_lines(file), strict=True)
    ]


def key_of(machine: Machine, options: EngineOptions) -> str:
    """Returns under what `working.json` knows a command line: all that its programs' memory depends on."""
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_redundant_experts", "enable_eplb")
    shape = f"{machine.nodes} x {machine.gpus_per_node}"
    width, layers = machine.model.hidden_size, machine.model.num_hidden_layers
    return f"{width} wide, {layers} layers, {shape}: " + " ".join(f"{n}={getattr(options, n)}" for n in names)


def working_of_plan(deployment: Deployment) -> int:
    """Returns the working memory that `launch.plan` finds."""
    planned = planning.lay_out(shallow(DEEPSEEK_V3), deployment)
    return measure(planned.engine, planned.programs)


def working_of_server(machine: Machine, options: EngineOptions) -> int:
    """Returns the working memory that a server finds."""
    layout, programs = served(dataclasses.replace(machine, model=shallow(machine.model)), options)
    return measure(layout.cfg, programs)


@functools.cache
def written() -> dict[str, int]:
    """Returns what `working.json` says."""
    return json.loads(WORKING.read_text())


def main() -> None:
    """Writes `working.json`."""
    known: dict[str, int] = {}
    for _, machine, options in all_lines():
        if (key := key_of(machine, options)) not in known:
            known[key] = working_of_server(machine, options)
            print(f"{known[key] / 1e9:.3f} GB  {key}", flush=True)
    for deployment in PUBLISHED:
        known[f"plan {deployment.name}"] = working_of_plan(deployment)
        print(f"{known[f'plan {deployment.name}'] / 1e9:.3f} GB  plan {deployment.name}", flush=True)
    WORKING.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
