"""Models and deployments of command lines: published ones by name, model directories and deployment files."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import dsv3
from dsv3.config.hugging_face.directory import absent, has_config
from dsv3.config.server_options import ServiceOptions
from launch import flags

if TYPE_CHECKING:
    from dsv3.config.model import ModelConfig
    from tools.plan.deployment import Deployment

MODELS = {
    "deepseek_v3": ("deepseek_v3", "DEEPSEEK_V3"),
    "deepseek_v31": ("deepseek_v3", "DEEPSEEK_V31"),
    "deepseek_v32": ("deepseek_v3", "DEEPSEEK_V32"),
    "deepseek_v4_flash": ("deepseek_v4", "DEEPSEEK_V4_FLASH"),
    "deepseek_v4_flash_0731": ("deepseek_v4", "DEEPSEEK_V4_FLASH_0731"),
    "deepseek_v4_pro": ("deepseek_v4", "DEEPSEEK_V4_PRO"),
    "deepseek_v4_pro_0813": ("deepseek_v4", "DEEPSEEK_V4_PRO_0813"),
    "deepseek_v2": ("deepseek_v2", "DEEPSEEK_V2"),
    "deepseek_v2_lite": ("deepseek_v2", "DEEPSEEK_V2_LITE"),
    "kimi_k2": ("kimi", "KIMI_K2"),
    "kimi_k2_thinking": ("kimi", "KIMI_K2_THINKING"),
    "kimi_k25": ("kimi", "KIMI_K25"),
    "moonlight": ("kimi", "MOONLIGHT_16B_A3B"),
    "glm_4_7_flash": ("glm", "GLM_4_7_FLASH"),
    "glm_5": ("glm", "GLM_5"),
    "mistral_large_3": ("mistral", "MISTRAL_LARGE_3"),
    "mistral_small_4": ("mistral", "MISTRAL_SMALL_4"),
    "axk1": ("axk1", "AXK1"),
}
"""By the name of a published model: its module in `configs`, and the constant there."""


_BUNDLED = Path(dsv3.__file__).parent / "bundled"  # dsv3.engine.build.bundled_model imports jax


def model_dir(options: ServiceOptions) -> Path:
    """Returns the directory of the model to serve; raises UsageError if there is none."""
    directory = Path(options.model) if options.model else _BUNDLED
    if not has_config(directory):
        raise flags.UsageError(f"--model: {absent(directory)}")
    return directory.resolve()


def model_names(options: ServiceOptions) -> tuple[str, ...]:
    """Returns the names of that model in requests; responses carry the first."""
    return options.served_model_name or (Path(options.model).resolve().name if options.model else "dsv3-tiny",)


def model(name: str) -> "ModelConfig":
    """Returns a model's configuration by its name or directory; raises UsageError if there is none."""
    if name in MODELS:
        module, constant = MODELS[name]
        return getattr(importlib.import_module(f"configs.{module}"), constant)
    from dsv3.config.hugging_face import ConfigError, load_config

    if not has_config(name):
        raise flags.UsageError(f"--model {name}: neither one of {', '.join(MODELS)} nor a directory with a config.json")
    try:
        return load_config(Path(name))
    except ConfigError as error:
        raise flags.UsageError(f"--model {name}: {error}") from error


def deployment(name: str) -> "Deployment":
    """Returns a deployment by its name or file; raises UsageError if there is none."""
    from configs.deployments import DEPLOYMENTS, DEVICES
    from tools.plan.deployment import DeploymentError, read_deployment

    if name in DEPLOYMENTS:
        return DEPLOYMENTS[name]
    if not Path(name).is_file():
        raise flags.UsageError(f"{name} is neither one of {', '.join(DEPLOYMENTS)} nor a file")
    try:
        return read_deployment(Path(name), DEVICES)
    except DeploymentError as error:
        raise flags.UsageError(str(error)) from error
