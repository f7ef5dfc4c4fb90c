"""The bundled model: `tiny` with one more layer, half as many experts more, and ten times the text."""

import dataclasses

from configs import tiny
from training.config import TrainingConfig

MODEL = dataclasses.replace(tiny.MODEL, num_hidden_layers=5, n_routed_experts=24)

PACKAGES = (
    "absl-py", "aiohttp", "anyio", "asttokens", "attrs", "cffi", "charset-normalizer", "click", "cryptography",
    "distlib", "duckdb", "execnet", "executing", "fastjsonschema", "filelock", "flax", "fonttools", "fsspec",
    "grimp", "h11", "httpcore", "httpx", "huggingface_hub", "humanize", "import-linter", "iniconfig", "ipykernel",
    "ipython", "jax", "jedi", "Jinja2", "jsonschema", "jupyter_client", "jupyter_core", "markdown-it-py",
    "matplotlib", "msgpack", "mypy", "nbclient", "nbformat", "nodeenv", "numpy", "opt_einsum", "optax",
    "orbax-checkpoint", "packaging", "pandas", "parso", "pexpect", "pillow", "platformdirs", "pluggy", "pre_commit",
    "prometheus_client", "prompt_toolkit", "psutil", "pyarrow", "pycparser", "pydantic", "pyparsing", "pytest",
    "pytest-xdist", "python-dateutil", "PyYAML", "pyzmq", "referencing", "requests", "rich", "scipy", "simplejson",
    "sortedcontainers", "stack-data", "starlette", "tornado", "traitlets", "treescope", "triton",
    "typing-inspection", "typing_extensions", "urllib3", "virtualenv", "yarl", "zipp",
)  # fmt: skip
"""Packages of the environment of `constraints.txt`, with its versions; their metadata name their licences."""

TRAINING = TrainingConfig(
    model=MODEL,
    steps=9000,
    chat_steps=4000,
    chat_fraction=0.25,
    batch_size=16,
    sequence_length=256,
    learning_rate=3e-3,
    warmup_steps=200,
    router_bias_rate=0.003,
    compute_dtype="bfloat16",
    library_copies=6,
    packages=PACKAGES,
    eval_every=250,
    eval_batches=4,
    checkpoint_every=40,
)
