"""`python -m launch.plan` on the command line."""

import json
import subprocess
import sys

import pytest

from tests.launch import preloaded


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run(*arguments, command="plan")


@pytest.mark.aot
def test_one_node_of_80_gb_is_refused(tmp_path) -> None:
    written = tmp_path / "plan.json"
    result = plan("node_8xh800", f"--json={written}", f"--plot={tmp_path / 'plan.png'}")
    assert result.returncode == 1, result.stderr
    assert "does not fit" in result.stdout
    assert "98.621" in result.stdout
    plan_json = json.loads(written.read_text())
    assert plan_json["verdict"]["fits"] is False
    assert (
        plan_json["memory"]["needed"]
        == sum(plan_json["memory"]["weights"].values()) + 44_902_121_472 + (plan_json["memory"]["state"])
    )
    assert plan_json["steps"] == []
    assert not (tmp_path / "plan.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode_ep288",), "neither one of prefill_ep32, decode_ep144, node_8xh200, node_8xh800, v4_flash_2xh200"),
        (("decode_ep144", "--model=/nowhere"), "nor a directory with a config.json"),
        (("decode_ep144", "--json=/nowhere/plan.json"), "its directory does not exist"),
        (("decode_ep144", "--speculative_config=mtp"), "--speculative_config: 'mtp' is not a JSON object"),
        (("decode_ep144", "--acceptance=high"), "--acceptance: 'high' is not a number"),
        (("decode_ep144", "--acceptance=0.8"), "without drafts: give speculative_config"),
        ((), "expected DEPLOYMENT"),
        (("train", "--mesh=stage=2,rows=2"), "'rows=2' is not AXIS=SIZE"),
        (("node_8xh200", "--mesh=stage=2"), "--mesh is for train"),
        (
            ("v4_flash_4xh200", "--model=deepseek_v4_flash", "--prefill=node_8xh200"),
            "--prefill needs compiled programs; plans of deepseek_v4_flash are made from shapes",
        ),
        (("fleet",), "fleet needs --traffic=day6"),
        (("fleet", "--traffic=day7"), "value should be one of <day6>"),
        (("fleet", "--traffic=day6", "--plot=x.png"), "fleet takes no --plot"),
        (("fleet", "--traffic=day6", "--gpu_hour=0"), "--gpu_hour 0: must be a number above 0"),
        (("fleet", "--traffic=day6", "--gpu_hour=nan"), "--gpu_hour nan: must be a number above 0"),
        (("fleet", "--traffic=day6", "--model=kimi_k2"), "give --prefill_plan for --model kimi_k2"),
        (("fleet", "--traffic=day6", "--decode_plan=/nowhere"), "/nowhere: cannot be read"),
        (("decode_ep144", "--traffic=day6"), "--traffic is for fleet"),
    ],
)
def test_errors_are_one_line_with_status_2(arguments, message) -> None:
    result = plan(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_training_run_is_planned(tmp_path) -> None:
    written = tmp_path / "plan.json"
    result = plan("train", "--config=tiny", "--mesh=stage=2,expert=2", "--micro_batches=4", f"--json={written}")
    assert result.returncode == 0, result.stderr
    assert "31.9 ms" in result.stdout
    written_plan = json.loads(written.read_text())
    assert written_plan["fits"]
    assert len(written_plan["memory"]) == 2
    rows, choices = 4 * 256 * 192 * 2, 2 * 256 * (2 + 2) * 4
    assert written_plan["pair_wire_bytes"] == rows + choices, "a line for each of 256 tokens, and ids and weights"


@pytest.mark.aot
@pytest.mark.parametrize(("fp4", "status"), [("keep", 0), ("fp8", 1)])
def test_deepseek_v4_is_planned_from_shapes(fp4: str, status: int, tmp_path) -> None:
    """Two H200 hold DeepSeek-V4-Flash with FP4 experts, and not with FP8 ones."""
    path, written = tmp_path / "two.toml", tmp_path / "plan.json"
    path.write_text(f'device = "H200"\nnodes = 1\ngpus_per_node = 2\ndecode_requests = 8\nfp4 = "{fp4}"\n')
    result = plan(str(path), "--model=deepseek_v4_flash", f"--json={written}")
    assert result.returncode == status, result.stderr
    assert ("does not fit" in result.stdout) == bool(status)
    assert "1,761,280" in result.stdout, "a page of 256 tokens in bfloat16"
    assert json.loads(written.read_text())["verdict"]["fits"] == (not status)


@pytest.mark.aot
def test_a_file_whose_devices_do_not_divide_the_experts(tmp_path) -> None:
    path = tmp_path / "three.toml"
    path.write_text('device = "H800"\nnodes = 3\ndecode_requests = 8\n')
    result = plan(str(path))
    assert result.returncode == 2
    assert (
        "three: 256 expert replicas do not divide over 24 devices: add redundant experts to reach 264" in result.stderr
    )


def test_the_published_day_is_planned_without_jax(tmp_path) -> None:
    written = tmp_path / "fleet.json"
    arguments = ["x", "fleet", "--traffic=day6", f"--json={written}"]
    code = (
        "import runpy, sys\n"
        f"sys.argv = {arguments!r}\n"
        "try:\n    runpy.run_module('launch.plan', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as ended:\n    assert not ended.code\n"
        "assert 'jax' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "226.75" in result.stdout and "$87,072" in result.stdout
    fleet = json.loads(written.read_text())
    assert fleet["terms"] == {"token_bytes": 70_272, "gpu_hour": 2.0}
    assert fleet["as_charted"]["nodes"] == 226.75
