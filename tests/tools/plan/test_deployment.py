"""Deployments: the published ones, and those of a user's file."""

import dataclasses
import json

import pytest

from configs.deployments import DECODE_EP144, DEPLOYMENTS, DEVICES, H800, PREFILL_EP32
from tools.plan.deployment import Deployment, DeploymentError, read_deployment

H800_UNIT = Deployment("unit", H800, 2, decode_requests=16)


def test_published_deployments() -> None:
    assert (PREFILL_EP32.devices, PREFILL_EP32.redundant_experts) == (32, 32)
    assert (DECODE_EP144.devices, DECODE_EP144.ranks) == (144, 144)
    assert DECODE_EP144.memory_utilization == 0.9
    assert all(name == deployment.name for name, deployment in DEPLOYMENTS.items())


def test_a_toml_file(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('device = "H800"\nnodes = 2\ndecode_requests = 16\nmax_model_len = 8192\n')
    assert read_deployment(path, DEVICES) == Deployment("mine", H800, 2, decode_requests=16, max_model_len=8192)


def test_a_json_file_may_describe_its_device(tmp_path) -> None:
    device = {"name": "H20", "memory_bytes": 96e9, "hbm_bytes_per_second": 4e12, "fp8_flops": 296e12}
    device |= {"bf16_flops": 148e12, "node_link": 360e9, "cross_link": 50e9, "multiprocessors": 78}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "h20", "device": device, "nodes": 1, "prefill_tokens": 4096}))
    read = read_deployment(path, DEVICES)
    assert (read.name, read.device.name, read.device.memory_bytes) == ("h20", "H20", 96_000_000_000)
    assert (read.device.multiprocessors, H800.multiprocessors) == (78, 132)


def test_a_file_may_have_drafts(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'device = "H800"\nnodes = 2\ndecode_requests = 16\nacceptance = [0.8, 0.5]\n'
        '[speculative_config]\nmethod = "mtp"\nnum_speculative_tokens = 2\n'
    )
    read = read_deployment(path, DEVICES)
    assert (read.drafts, read.accepted) == (2, (0.8, 0.5))
    assert (H800_UNIT.drafts, H800_UNIT.accepted) == (0, ())


def test_large_batches_may_have_no_drafts() -> None:
    ranges = [[1, 64, 2]]
    config = {"method": "mtp", "num_speculative_tokens_per_batch_size": ranges}
    assert dataclasses.replace(H800_UNIT, decode_requests=65, speculative_config=config).drafts == 0
    few = dataclasses.replace(H800_UNIT, decode_requests=64, speculative_config=config, acceptance=0.5)
    assert few.accepted == (0.5, 0.25)


GOOD = {"device": "H800", "nodes": 1, "decode_requests": 8}
DRAFTS = {"method": "mtp"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"reserved_multiprocessors": 132},
            "reserved_multiprocessors 132 must be at least 0 and below the device's 132",
        ),
        ({"device": "B200"}, "device 'B200' is not one of H800, H100, H200"),
        ({"device": {"name": "H20"}}, "device.memory_bytes is missing"),
        ({"device": 80}, "device is 80, but must be Device"),
        ({"nodes": "four"}, "nodes is 'four', but must be int"),
        ({"nodes": 1.5}, "nodes is 1.5, but must be int"),
        ({"nodes": True}, "nodes is True"),
        ({"nodes": 0}, "nodes 0 must be above 0"),
        ({"decode_requests": 0}, "at least one must be above 0"),
        ({"kv_cache_dtype": "int4"}, "'int4' is not one of bfloat16, fp8"),
        ({"fp4": "bf16"}, "fp4 'bf16' is not one of keep, fp8"),
        ({"decode_request": 8}, "decode_request is not a field"),
        ({"memory_utilization": 1.5}, "memory_utilization 1.5"),
        ({"prefix_hit_rate": 1.0}, "prefix_hit_rate 1.0"),
        ({"prefix_hit_rate": float("nan")}, "prefix_hit_rate is nan"),
        ({"redundant_experts": 32, "expert_parallel": False}, "needs expert_parallel"),
        ({"speculative_config": DRAFTS}, "acceptance is missing"),
        ({"acceptance": 0.8}, "acceptance 0.8 without drafts"),
        ({"speculative_config": DRAFTS, "acceptance": [0.8, 0.5]}, "are not 1 shares"),
        ({"speculative_config": DRAFTS, "acceptance": "0.8"}, "acceptance is '0.8'"),
        ({"speculative_config": DRAFTS, "acceptance": 1.5}, "acceptance: 1.5 is neither a number from 0 to 1"),
        ({"speculative_config": {"method": "eagle"}, "acceptance": 0.5}, "method: 'eagle' is not one of"),
        ({"speculative_config": {"method": "ngram"}, "acceptance": 0.5}, "only 'mtp' and 'dspark' can be planned"),
        ({"speculative_config": 1, "acceptance": 0.5}, "speculative_config is 1"),
        ({"tensor_parallel": 3}, "tensor_parallel 3 must divide gpus_per_node 8"),
    ],
)
def test_errors_name_file_and_field(tmp_path, change, message) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(DeploymentError, match=r"mine\.json") as caught:
        read_deployment(path, DEVICES)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mine.yaml", "", "must end in .json or .toml"),
        ("mine.json", "{", "cannot be read"),
        ("mine.json", "[]", "contains a list"),
        ("mine.toml", "nodes == 1", "cannot be read"),
    ],
)
def test_unreadable_files(tmp_path, name, text, message) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DeploymentError, match=message):
        read_deployment(tmp_path / name, DEVICES)


def test_a_missing_field_is_named(tmp_path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"device": "H800", "decode_requests": 8}))
    with pytest.raises(DeploymentError, match="nodes is missing"):
        read_deployment(path, DEVICES)
