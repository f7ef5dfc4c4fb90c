"""The model of a command line: its directory, and its names in requests."""

from pathlib import Path

import dsv3
from dsv3.config.hugging_face.directory import absent, has_config
from dsv3.config.server_options import ServiceOptions
from launch import flags

_BUNDLED = Path(dsv3.__file__).parent / "bundled"  # dsv3.engine.build.bundled_model imports jax


def model_dir(options: ServiceOptions) -> Path:
    """Returns the model's directory; raises UsageError if there is none."""
    directory = Path(options.model) if options.model else _BUNDLED
    if not has_config(directory):
        raise flags.UsageError(f"--model: {absent(directory)}")
    return directory.resolve()


def model_names(options: ServiceOptions) -> tuple[str, ...]:
    """Returns the model's names in requests; responses carry the first."""
    return options.served_model_name or (Path(options.model).resolve().name if options.model else "dsv3-tiny",)
