"""The command lines for GPUs in README, docs and deploy/, as engine options with their machines.

`python -m tests.tools.plan.command_lines` compiles the largest programs of each, with two MoE layers, and those of the
published plans, and writes their working memory to `working.json` for `test_account.py`. Each takes a minute or two.
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

from configs.deepseek_v2 import DEEPSEEK_V2_LITE
from configs.deepseek_v3 import DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32
from configs.deployments import DECODE_EP144, H100, H200, NODE_8XH200, PREFILL_EP32
from configs.glm import GLM_4_7_FLASH
from configs.kimi import KIMI_K2_THINKING
from dsv3.config.declaration import options_of
from dsv3.config.model import ModelConfig
from dsv3.config.options import EngineOptions
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Programs, ReadPrograms, measure
from dsv3.engine.dtypes import EngineDtypes
from dsv3.engine.executor import lay_out
from dsv3.engine.jobs import JOB_KINDS
from dsv3.engine.limits import Hardware, engine_config, pages_of_one
from tools.plan import programs as planning
from tools.plan.deployment import Deployment, Device

ROOT = Path(__file__).parents[3]
WORKING = Path(__file__).with_name("working.json")
# The least memory that drivers report: 139.72 GiB of an H200 (most report 139.8).
LEAST_H200 = dataclasses.replace(H200, memory_bytes=150_020_000_000)
PUBLISHED = (DECODE_EP144, PREFILL_EP32, NODE_8XH200)
MODELS = {
    "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-V3.1": DEEPSEEK_V31,
    "DeepSeek-V3.2": DEEPSEEK_V32,
    "GLM-4.7-Flash": GLM_4_7_FLASH,
    "Kimi-K2-Thinking": KIMI_K2_THINKING,
}
"""Models by the name of their directory; a line without such a name is for DeepSeek-V3."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The GPUs of a command line."""

    device: Device
    nodes: int = 1
    gpus_per_node: int = 8


ONE_H100, ONE_NODE, TWO_NODES = Machine(H100, 1, 1), Machine(LEAST_H200), Machine(H100, 2)
DECODE, PREFILL = Machine(H100, 18), Machine(H100, 4)
FILES = {
    "README.md": (ONE_H100, ONE_NODE),
    "docs/batch.md": (ONE_H100, ONE_NODE),
    "docs/disaggregation.md": (PREFILL, DECODE),
    "docs/kernels_int4.md": (ONE_NODE,),
    "docs/models.md": (ONE_H100,),
    "docs/multi_host.md": (TWO_NODES, TWO_NODES, DECODE, TWO_NODES),
    "docs/sparse_attention.md": (ONE_NODE,),
    "docs/tools.md": (ONE_NODE,),
    "launch/batch.py": (ONE_H100,),
    "launch/serve.py": (ONE_H100, ONE_NODE),
    "deploy/slurm/decode_ep144.sh": (DECODE,),
    "deploy/slurm/prefill_ep32.sh": (PREFILL,),
    "deploy/slurm/single_node.sh": (ONE_NODE,),
    "deploy/kubernetes/decode/decode.yaml": (DECODE, DECODE),
    "deploy/kubernetes/prefill/prefill.yaml": (PREFILL, PREFILL),
    "deploy/kubernetes/pair/pair.yaml": (ONE_NODE, ONE_NODE),
}
"""The machine of each command line with a model's directory, in order, by file."""
WITHOUT_MACHINE = {
    "docs/expert_parallel.md",
    "docs/router.md",
    "docs/training.md",
    "docs/tuning.md",
    "launch/train.py",
}
"""Files whose command lines are for any machine, or for a small model of one's own."""
_SERVES = re.compile(
    r"-m (?:launch\.(?:serve|batch)|deploy\.node) (?:[^\n\\]|\\\n)*--model(?: |=)[^\s](?:[^\n\\#]|\\\n)*"
)


def command_lines(file: str) -> list[list[str]]:
    """Returns the arguments of each command line of a file."""
    text = (ROOT / file).read_text()
    if file.endswith(".yaml"):
        parts = [part for part in yaml.safe_load_all(text) if part]
        return [list(args) for part in parts for args in _containers(part) if any("--model" in a for a in args)]
    found = [match for match in _SERVES.findall(text) if "..." not in match]
    lines = (re.sub(r"\s{3,}[a-z].*", "", match.replace("\\\n", " ")) for match in found)
    return [shlex.split(line.removesuffix("'") if line.count("'") % 2 else line) for line in lines]


def _containers(part: Any) -> list[list[str]]:
    if isinstance(part, list):
        return [args for each in part for args in _containers(each)]
    if not isinstance(part, dict):
        return []
    own = [part["args"]] if "args" in part else []
    return own + [args for each in part.values() for args in _containers(each)]


def files_with_commands() -> set[str]:
    """Returns the files of README, docs, launch and deploy/ that have command lines with a model's directory."""
    places = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "launch").glob("*.py")]
    places += [each for each in (ROOT / "deploy").rglob("*") if each.suffix in (".sh", ".yaml", ".md")]
    names = [each.relative_to(ROOT).as_posix() for each in places]
    return {name for name in names if command_lines(name)}


def model_in(arguments: list[str]) -> str:
    """Returns the name of the model that a command line serves."""
    named = re.search(r"--model(?: |=)\S*?([^/\s]+)(?:\s|$)", " ".join(arguments))
    return named[1] if named and named[1] in MODELS else "DeepSeek-V3"


def options_in(arguments: list[str]) -> EngineOptions:
    """Returns the engine's options among arguments; ignores the others."""
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


def served(model: ModelConfig, machine: Machine, options: EngineOptions) -> tuple[Layout, Programs]:
    """Returns a server's layout and programs, from shapes, with the smallest pool."""
    cache_dtype = "fp8" if options.kv_cache_dtype == "fp8" else "bfloat16"
    deployment = Deployment(
        "served",
        machine.device,
        machine.nodes,
        machine.gpus_per_node,
        decode_requests=1,
        expert_parallel=options.enable_expert_parallel,
        redundant_experts=options.num_redundant_experts,
        kv_cache_dtype=cache_dtype,
    )
    planned = planning.lay_out(model, deployment)
    hardware = Hardware(deployment.ranks, machine.nodes, is_cpu=False)
    pages = pages_of_one(model, options)
    dtypes = EngineDtypes(jnp.dtype(jnp.bfloat16), cache_dtype)
    cfg = engine_config(planned.model, options, hardware, dtypes, pages=pages)
    parts = EngineComponents(
        planned.functions, planned.params, planned.model, cfg, planned.mesh, tokenizer=Path("tokenizer.json")
    )
    layout, programs = lay_out(parts, JOB_KINDS)
    programs.store = ReadPrograms()
    return layout, programs


def shallow(model: ModelConfig) -> ModelConfig:
    """Returns the model with two MoE layers: its loops are scans, so programs take the same memory."""
    return dataclasses.replace(model, num_hidden_layers=model.first_k_dense_replace + 2)


@dataclasses.dataclass(frozen=True)
class Line:
    """A command line: its file, its model's name, its machine, its options."""

    file: str
    model: str
    machine: Machine
    options: EngineOptions

    @property
    def key(self) -> str:
        """Under what `working.json` knows it: all that its programs' memory depends on."""
        names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_redundant_experts", "enable_eplb")
        shape = f"{self.model}, {self.machine.nodes} x {self.machine.gpus_per_node}"
        return f"{shape}: " + " ".join(f"{n}={getattr(self.options, n)}" for n in names)


@functools.cache
def all_lines() -> tuple[Line, ...]:
    """Returns every command line."""
    return tuple(
        Line(file, model_in(line), machine, options_in(line))
        for file, machines in FILES.items()
        for machine, line in zip(machines, command_lines(file), strict=True)
    )


def working_of_plan(deployment: Deployment) -> int:
    """Returns the working memory in `launch.plan`."""
    planned = planning.lay_out(shallow(DEEPSEEK_V3), deployment)
    return measure(planned.engine, planned.programs)


def working_of_server(line: Line) -> int:
    """Returns the working memory in a server."""
    layout, programs = served(shallow(MODELS[line.model]), line.machine, line.options)
    return measure(layout.cfg, programs)


@functools.cache
def written() -> dict[str, int]:
    """Returns the contents of `working.json`."""
    return json.loads(WORKING.read_text())


def main() -> None:
    """Writes `working.json`."""
    known: dict[str, int] = {}
    for line in all_lines():
        if line.key not in known:
            known[line.key] = working_of_server(line)
            print(f"{known[line.key] / 1e9:.3f} GB  {line.key}", flush=True)
    for deployment in PUBLISHED:
        known[f"plan {deployment.name}"] = working_of_plan(deployment)
        print(f"{known[f'plan {deployment.name}'] / 1e9:.3f} GB  plan {deployment.name}", flush=True)
    WORKING.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
