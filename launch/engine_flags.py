"""Flags of the commands that load a model into an engine, under the names vLLM's users know."""

from pathlib import Path

from absl import flags as absl_flags

from launch import flags

_MODEL = absl_flags.DEFINE_string("model", None, "Hugging Face model directory; the bundled model if not given.")
_NAMES = absl_flags.DEFINE_list(
    "served_model_name", [], "Names clients may use, separated by commas; the directory's name if not given."
)
_DTYPE = absl_flags.DEFINE_enum(
    "dtype", "auto", ["auto", "float32", "bfloat16"], "Of weights and cache; auto: float32 on a CPU, else bfloat16."
)
_FP8 = absl_flags.DEFINE_enum(
    "fp8", "keep", ["keep", "dequantize"], "What becomes of FP8 weights: kept in memory as FP8, or turned into --dtype."
)
_MAX_MODEL_LEN = absl_flags.DEFINE_integer(
    "max_model_len", None, "Tokens of prompt and answer together; what the model was made for if not given.", 1
)
_MAX_NUM_SEQS = absl_flags.DEFINE_integer("max_num_seqs", None, "Sequences that run at once, on each device.", 1)
_MAX_BATCHED = absl_flags.DEFINE_integer("max_num_batched_tokens", None, "Prompt tokens of one step.", 1)
_MEMORY = absl_flags.DEFINE_float(
    "gpu_memory_utilization", 0.9, "Share of a device's memory for weights, cache and activations.", 0.01, 1.0
)
_DATA_PARALLEL = absl_flags.DEFINE_integer(
    "data_parallel_size",
    None,
    "Ranks that each serve requests, of --tensor_parallel_size devices; 1 if not given, all of several processes.",
    1,
)
_TENSOR_PARALLEL = absl_flags.DEFINE_integer(
    "tensor_parallel_size",
    1,
    "Devices of a rank, which split attention heads and MLP widths; above 1 it implies --enable_expert_parallel.",
    1,
)
_EXPERT_PARALLEL = absl_flags.DEFINE_bool(
    "enable_expert_parallel", False, "Spread the routed experts over all devices; without it each holds all."
)
_REDUNDANT = absl_flags.DEFINE_integer(
    "num_redundant_experts", 0, "Additional copies of experts, so that the devices divide all copies.", 0
)
_TRANSPORT = absl_flags.DEFINE_enum(
    "expert_transport",
    "auto",
    ["auto", "ring", "all_to_all", "hierarchical", "ragged"],
    "How tokens reach their experts; auto chooses by a cost model, never ragged, which needs GPUs.",
)
_EPLB = absl_flags.DEFINE_bool(
    "enable_eplb", False, "Move experts between devices while serving, so that all have an even load."
)
_EPLB_INTERVAL = absl_flags.DEFINE_integer("eplb_interval", 3000, "Steps between two decisions to move experts.", 1)
_EPLB_THRESHOLD = absl_flags.DEFINE_float(
    "eplb_threshold", 0.9, "Experts move where the devices' mean load is below this share of the busiest's.", 0.0, 1.0
)
_PREFIX_CACHING = absl_flags.DEFINE_bool("enable_prefix_caching", True, "Reuse the cache of equal prompt beginnings.")
_SEED = absl_flags.DEFINE_integer("seed", 0, "Of the random numbers of requests that bring no seed.")
_CACHE_DIR = absl_flags.DEFINE_string(
    "compilation_cache_dir", None, "Where compiled programs are kept; the user's cache directory if not given."
)


def model_dir() -> Path:
    """The model's directory; raises UsageError where there is none."""
    directory = Path(_MODEL.value) if _MODEL.value else _bundled()
    if not (directory / "config.json").is_file():
        raise flags.UsageError(f"--model {directory}: no config.json there; give a Hugging Face model directory")
    return directory.resolve()


def model_names() -> tuple[str, ...]:
    """Names of the model in requests; the first is the one answers carry."""
    return tuple(_NAMES.value) or (Path(_MODEL.value).resolve().name if _MODEL.value else "dsv3-tiny",)


def engine_options() -> dict[str, object]:
    """Fields of `dsv3.engine.build.EngineOptions`."""
    return {
        "dtype": _DTYPE.value,
        "fp8": _FP8.value,
        "max_model_len": _MAX_MODEL_LEN.value,
        "max_num_seqs": _MAX_NUM_SEQS.value,
        "max_num_batched_tokens": _MAX_BATCHED.value,
        "gpu_memory_utilization": _MEMORY.value,
        "data_parallel_size": _DATA_PARALLEL.value,
        "tensor_parallel_size": _TENSOR_PARALLEL.value,
        "enable_expert_parallel": _EXPERT_PARALLEL.value,
        "num_redundant_experts": _REDUNDANT.value,
        "expert_transport": _TRANSPORT.value,
        "enable_eplb": _EPLB.value,
        "eplb_interval": _EPLB_INTERVAL.value,
        "eplb_threshold": _EPLB_THRESHOLD.value,
        "enable_prefix_caching": _PREFIX_CACHING.value,
        "seed": _SEED.value,
        "compilation_cache_dir": _CACHE_DIR.value,
    }


def _bundled() -> Path:
    """Without `dsv3.engine.build.bundled_model`, which imports jax."""
    import dsv3

    return Path(dsv3.__file__).parent / "bundled"
