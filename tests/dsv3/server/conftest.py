"""Servers that tests share; each starts when first used, and ends with this package."""

from pathlib import Path

import pytest

from tests.dsv3.server import serving
from tests.dsv3.text import dialects, tiny

KEY = "sk-secret-key"


@pytest.fixture(scope="package")
def model_dir(tmp_path_factory):
    """A model directory with the files that an API server reads."""
    return tiny.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package")
def server(model_dir):
    """Fast fake engine, tokenizer, chat template with reasoning markers; exchanges pages with other instances."""
    with serving.running(model_dir, factory_options={"transfer_address": "[fd00::1]:7000,host1:7001"}) as server:
        yield server


@pytest.fixture(scope="package")
def slow_server(model_dir):
    """Two sequences run, three wait, 10 ms per step."""
    limits = {"max_num_seqs": 2, "max_num_queued_reqs": 3}
    with serving.running(model_dir, engine=limits, factory_options={"step_s": 0.01}) as server:
        yield server


@pytest.fixture(scope="package")
def bare_server(tmp_path_factory):
    """No tokenizer."""
    with serving.running(tmp_path_factory.mktemp("bare")) as server:
        yield server


@pytest.fixture(scope="package")
def locked_server(model_dir, tmp_path_factory):
    """An API key is needed; profiles may be taken."""
    options = {"api_key": KEY, "profile_dir": str(tmp_path_factory.mktemp("profiles") / "new")}
    with serving.running(model_dir, options=options) as server:
        server.profiles = Path(options["profile_dir"])
        yield server


@pytest.fixture(scope="package")
def tool_server(tmp_path_factory):
    """A model with DeepSeek-V3.1's tool calls, detected from its tokens and template."""
    with serving.running(dialects.write(tmp_path_factory.mktemp("tools"))) as server:
        yield server
