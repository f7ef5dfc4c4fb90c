"""The configuration files of model directories to `ModelConfig` and back, family by family.

What a file says is either understood, known to carry no meaning for inference, or refused with a `ConfigError` that
names the field: a setting that is silently ignored is a model that silently computes something else.
"""

from dsv3.config.hugging_face.deepseek import FAMILIES, from_hf
from dsv3.config.hugging_face.directory import config_digest, has_config, load_config, stored_dtype, to_hf
from dsv3.config.hugging_face.fields import ConfigError

__all__ = ["FAMILIES", "ConfigError", "config_digest", "from_hf", "has_config", "load_config", "stored_dtype", "to_hf"]
