"""Plan and server keep one account, and every command line for GPUs fits the GPUs that it is written for.

What programs take is in `working.json` (`python -m tests.tools.plan.command_lines`); `test_plan.py` compiles some.
"""

import functools

import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import DECODE_EP144, NODE_8XH200, PREFILL_EP32
from dsv3.config.engine import pages_for
from dsv3.config.options import EngineOptions
from dsv3.engine.device.pool import SLACK
from dsv3.engine.limits import pages_of_one, staging_bytes
from dsv3.engine.memory import DeviceMemory, MemoryAccount
from dsv3.engine.sizing import account_of
from tests.tools.plan import command_lines
from tests.tools.plan.command_lines import Machine
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
def server_account(machine: Machine, options: EngineOptions, working: int) -> MemoryAccount:
    """The account of a server with the options."""
    layout, _ = command_lines.served(machine, options)
    total, utilization = machine.device.memory_bytes, options.gpu_memory_utilization
    memory = DeviceMemory(total, int(total * (utilization + SLACK)))
    return account_of(layout, memory, utilization, working + staging_bytes(options))


@pytest.mark.parametrize("file", command_lines.FILES)
def test_every_command_line_fits_its_gpus(file: str) -> None:
    """All requests of the mean length at once, and one of the greatest that was asked for."""
    lines = [line for line in command_lines.all_lines() if line[0] == file]
    assert len(lines) == len(command_lines.FILES[file])
    for _, machine, options in lines:
        known = command_lines.written().get(command_lines.key_of(machine, options))
        assert known is not None, "make working.json again: python -m tests.tools.plan.command_lines"
        found = server_account(machine, options, known)
        rows = options.max_num_seqs or 1
        needed = rows * pages_for(MEAN, 64) if machine.model is DEEPSEEK_V3 else rows * pages_for(1024, 64)
        assert found.pages >= needed, str(found)
        assert not options.max_model_len or found.pages >= pages_of_one(machine.model, options)


@pytest.mark.parametrize("deployment", SCRIPTS, ids=lambda deployment: deployment.name)
def test_the_plan_has_the_room_that_the_server_has(deployment: Deployment) -> None:
    written = command_lines.written()
    [(_, machine, options)] = [line for line in command_lines.all_lines() if line[0] == SCRIPTS[deployment]]
    planned = memory_of(lay_out(DEEPSEEK_V3, deployment), written[f"plan {deployment.name}"])
    served = server_account(machine, options, written[command_lines.key_of(machine, options)])
    assert served.tokens == pytest.approx(planned.tokens_left, rel=0.02)
    assert served.tokens >= cache_tokens(deployment)
