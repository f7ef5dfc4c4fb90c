"""Plan and server account for the same memory, and every documented command line fits its GPUs.

The programs' working memory is in `working.json` (`python -m tests.tools.plan.command_lines`).
"""

import functools

import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import DECODE_EP144, NODE_8XH200, PREFILL_EP32
from dsv3.config.engine import pages_for
from dsv3.engine import communication
from dsv3.engine.build import account_for
from dsv3.engine.device.pool import SLACK
from dsv3.engine.device.programs import Key
from dsv3.engine.limits import pages_of_one, staging_bytes
from dsv3.engine.memory import DeviceMemory, MemoryAccount, local_bytes
from dsv3.model import AttentionForm
from tests.tools.plan import command_lines
from tests.tools.plan.command_lines import MODELS, Line
from tools.plan.deployment import Deployment
from tools.plan.memory import memory_of
from tools.plan.programs import cache_tokens, lay_out

pytestmark = pytest.mark.aot
MEAN = 4989
"""Tokens of a request, the mean of DeepSeek's fleet."""
SCRIPTS = {
    DECODE_EP144: "deploy/slurm/decode_ep144.sh",
    PREFILL_EP32: "deploy/slurm/prefill_ep32.sh",
    NODE_8XH200: "deploy/slurm/single_node.sh",
}


@functools.cache
def server_account(line: Line) -> MemoryAccount:
    """Returns the memory account of a server with this command line."""
    known = command_lines.written().get(line.key)
    assert known is not None, f"{line.key}: make working.json again: python -m tests.tools.plan.command_lines"
    layout, _ = command_lines.served(MODELS[line.model], line.machine, line.options)
    total, utilization = line.machine.device.memory_bytes, line.options.gpu_memory_utilization
    memory = DeviceMemory(total, int(total * (utilization + SLACK)))
    return account_for(layout, memory, utilization, known + staging_bytes(line.options))


@pytest.mark.parametrize("file", command_lines.FILES)
def test_every_command_line_fits_its_gpus(file: str) -> None:
    """Fits all requests of the mean length at once, and one of the greatest length."""
    lines = [line for line in command_lines.all_lines() if line.file == file]
    assert len(lines) == len(command_lines.FILES[file])
    for line in lines:
        found, options, model = server_account(line), line.options, MODELS[line.model]
        rows = options.max_num_seqs or 1
        needed = rows * pages_for(1024 if line.machine.gpus_per_node == 1 else MEAN, 64)
        assert found.pages >= needed, str(found)
        assert not options.max_model_len or found.pages >= pages_of_one(model, options)


def test_every_documented_command_line_is_checked() -> None:
    assert command_lines.files_with_commands() == command_lines.FILES.keys() | command_lines.WITHOUT_MACHINE


@pytest.mark.parametrize("deployment", SCRIPTS, ids=lambda deployment: deployment.name)
def test_plan_and_server_have_the_same_cache_size(deployment: Deployment) -> None:
    written = command_lines.written()
    [line] = [line for line in command_lines.all_lines() if line.file == SCRIPTS[deployment]]
    planned = memory_of(lay_out(DEEPSEEK_V3, deployment), written[f"plan {deployment.name}"])
    served = server_account(line)
    assert served.tokens == pytest.approx(planned.tokens_left, rel=0.02)
    assert served.tokens >= cache_tokens(deployment, 64)


def test_one_dense_layer_with_two_micro_batches_does_not_copy_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA unrolls a loop over one layer; then one micro-batch reads the pool while the other writes to it."""
    monkeypatch.setattr(communication, "worth_overlapping", lambda *_: True)
    [line] = [line for line in command_lines.all_lines() if line.model == "Kimi-K2-Thinking"]
    layout, programs = command_lines.served(command_lines.shallow(MODELS[line.model]), line.machine, line.options)
    program = programs.get(Key("decode", 256, AttentionForm.ABSORBED))
    assert "micro_batch_1" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < local_bytes(layout.pages) / 2
