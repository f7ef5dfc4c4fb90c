"""One declaration per option: every face shows the same, and a new field needs no other edit."""

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags as absl_flags

from dsv3 import LLM
from dsv3.batch.options import BatchOptions
from dsv3.config.declaration import option, options_of, options_text, refuse_unknown, signature_with
from dsv3.config.engine import EngineConfig
from dsv3.config.options import ClusterOptions, EngineOptions, Transport
from dsv3.config.server_options import ServerOptions, ServiceOptions
from dsv3.engine.fingerprint import fields_of, matching_options, program_options
from dsv3.processes import frames
from dsv3.server.engine import messages
from launch import cli, flags
from sharding.experts.transport_kind import TransportKind

CLUSTER = ClusterOptions(coordinator="host:80", num_processes=2, process_id=0, cluster_key_file="key")
FLAGS_OF = """
import importlib, json, sys
from absl import flags
module = importlib.import_module(sys.argv[1])
print(json.dumps({flag.name: flag.default for flag in flags.FLAGS.get_key_flags_for_module(module)}))
print("jax" in sys.modules)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class More(EngineOptions):
    """The engine's options and one more."""

    steps_ahead: int = option(2, "Launch this many steps ahead of --seed.", low=1, high=4)
    nickname: str | None = option(None, "Call the engine so.", agree=False, programs=False)


@pytest.mark.parametrize(
    ("command", "declared"),
    [
        ("launch.serve", (ServerOptions, EngineOptions, ClusterOptions)),
        ("launch.batch", (BatchOptions, ServiceOptions, EngineOptions)),
    ],
)
def test_every_option_is_a_flag_with_its_default_and_nothing_else_is(command: str, declared: tuple[type, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", FLAGS_OF, command], capture_output=True, text=True, check=True)
    shown, jax_imported = done.stdout.splitlines()
    assert json.loads(shown) == {
        each.name: list(each.default) if each.kind is tuple else each.default
        for cls in declared
        for each in options_of(cls)
    }
    assert jax_imported == "False"


def test_every_engine_option_is_a_parameter_of_a_notebook() -> None:
    parameters = dict(inspect.signature(LLM).parameters)
    assert list(parameters)[:2] == ["model", "progress"]
    defaults = {field.name: field.default for field in dataclasses.fields(EngineOptions)}
    assert {name: parameters[name].default for name in list(parameters)[2:]} == defaults
    assert all(f"{name} (" in (LLM.__doc__ or "") for name in defaults)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("max_model_length", "did you mean max_model_len?"), ("zzzz", "there are dtype, kv_")],
)
def test_a_notebook_names_the_nearest_option(name: str, hint: str) -> None:
    with pytest.raises(TypeError) as error:
        LLM(**{name: 3})
    assert f"{name} is not an option; {hint}" in str(error.value)


def test_processes_compare_what_they_must_agree_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    fields = fields_of(tmp_path, EngineOptions(), CLUSTER)
    declared = [each for cls in (EngineOptions, ClusterOptions) for each in options_of(cls)]
    assert {f"--{each.name}" for each in declared if each.terms.agree} == {k for k in fields if k.startswith("--")}
    alone = {"max_num_queued_reqs", "compilation_cache_dir", "transfer_address", "eplb_state"}
    alone |= {"kv_events_config", "step_metrics_config", "load_threads", "tuning"}
    assert {each.name for each in options_of(EngineOptions) if not each.terms.agree} == alone


def test_stored_programs_do_not_depend_on_what_only_the_host_uses() -> None:
    host = {
        "kv_store_size": 3.0,
        "seed": 7,
        "max_num_queued_reqs": 3,
        "enable_prefix_caching": False,
        "compilation_cache_dir": "/x",
        "load_threads": 3,
    }
    assert program_options(EngineOptions(**host)) == program_options(EngineOptions())
    assert program_options(EngineOptions(dtype="bfloat16")) != program_options(EngineOptions())
    limits = EngineConfig(64, 1)
    assert program_options(dataclasses.replace(limits, seed=1, identity="f")) == program_options(limits)
    assert program_options(dataclasses.replace(limits, num_pages=2)) != program_options(limits)


def test_every_limit_says_what_it_is() -> None:
    assert [each.name for each in options_of(EngineConfig)] == [f.name for f in dataclasses.fields(EngineConfig)]


def test_a_new_field_appears_everywhere() -> None:
    values = absl_flags.FlagValues()
    cli.define(More, values)
    flags.parse(["x", "--steps-ahead=3"], "", values)
    options = cli.read(More, values)
    assert options == More(steps_ahead=3)
    assert "--steps_ahead=INT\n        Launch this many steps ahead of --seed. (default 2)" in flags.help_text(
        "x", "", "", [values["steps_ahead"]]
    )
    parameter = signature_with(LLM.__init__, More).parameters["steps_ahead"]
    assert (parameter.default, parameter.annotation) == (2, int)
    assert "steps_ahead (2): Launch this many steps ahead of seed." in options_text(More)
    refuse_unknown(More, ["steps_ahead"])
    assert matching_options(options)["steps_ahead"] == program_options(options)["steps_ahead"] == "3"
    assert "nickname" not in matching_options(options) | program_options(options)
    with pytest.raises(ValueError, match="steps_ahead: 5 is not from 1 to 4"):
        More(steps_ahead=5)


def test_options_reach_the_engine_process_as_they_are() -> None:
    start = messages.Start("m:f", "/model", EngineOptions(max_num_seqs=3, gpu_memory_utilization=1), CLUSTER, {"a": 1})
    assert messages.to_engine.decode(frames.encode(start)[4:]) == start


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs: 0 is not at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs: True is not an integer"),
        ({"max_num_seqs": 2.5}, "max_num_seqs: 2.5 is not an integer"),
        ({"max_num_queued_reqs": None}, "max_num_queued_reqs: None is not an integer"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization: 0 is not above 0 and at most 1"),
        ({"gpu_memory_utilization": float("nan")}, "nan is not above 0 and at most 1"),
        ({"kv_store_size": float("inf")}, "kv_store_size: inf is not above 0 and at most 1073741824"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching: 1 is not True or False"),
        ({"dtype": "int4"}, "dtype: 'int4' is not one of auto, float32"),
        ({"enable_eplb": True}, "enable_eplb: True needs enable_expert_parallel"),
        (
            {"batch_invariant": True, "enable_expert_parallel": True, "enable_eplb": True},
            "batch_invariant: enable_eplb changes which devices sum",
        ),
        ({"kv_store": "/pages", "enable_prefix_caching": False}, "kv_store: '/pages' needs enable_prefix_caching"),
        ({"kv_store": "pages", "kv_offloading_size": 1.0}, "kv_store: 'pages' is neither an absolute directory"),
        ({"kv_offloading_size": 1.0, "enable_prefix_caching": False}, "1.0 needs enable_prefix_caching"),
        ({"transfer_address": "h:7"}, "transfer_address: 'h:7' needs transfer_key_file"),
        ({"transfer_key_file": "k"}, "transfer_key_file: 'k' needs kv_offloading_size"),
        ({"role": "prefill"}, "role: 'prefill' needs transfer_address"),
        ({"role": "decode"}, "role: 'decode' needs transfer_key_file"),
        ({"step_metrics_config": {"endpoint": "20380"}}, "step_metrics_config: endpoint: '20380' is not like"),
    ],
)
def test_values_that_cannot_be_say_what_can(wrong: dict, words: str) -> None:
    with pytest.raises(ValueError) as error:
        EngineOptions(**wrong)
    assert words in str(error.value)


def test_a_store_alone_has_host_memory_for_its_pages_to_pass() -> None:
    assert EngineOptions(kv_store="/pages").kv_offloading_size == 1
    assert EngineOptions(kv_store="/pages", transfer_key_file="k").kv_offloading_size == 1
    assert EngineOptions(kv_store="/pages", kv_offloading_size=0.5).kv_offloading_size == 0.5
    assert EngineOptions().kv_offloading_size == 0


def test_every_transport_that_may_be_named_exists() -> None:
    for name in Transport.__args__:
        TransportKind.from_name(name)
    with pytest.raises(ValueError, match=", ".join(Transport.__args__)):
        TransportKind.from_name("none")


def test_kv_events_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="kv_events_config: endpoint: '5557' is not like"):
        EngineOptions(kv_events_config={"endpoint": "5557"})
    on = {"enable_kv_cache_events": True}
    with pytest.raises(ValueError, match=r"kv_events_config: .* needs enable_prefix_caching"):
        EngineOptions(kv_events_config=on, enable_prefix_caching=False)
    assert EngineOptions(kv_events_config=on).kv_events_config == on
