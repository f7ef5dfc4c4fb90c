"""Runs every client that an environment has against this server.

  python -m benchmarks.clients --python CLIENTS/bin/python
  python -m benchmarks.clients --python CLIENTS/bin/python --aiperf AIPERF/bin/python --only aiperf

`benchmarks/clients.md` says what to install into these environments: clients are no dependencies of ours. Two servers
are started: the bundled model, and a stand-in that repeats the conversation, since the bundled model calls no tools.
Exit status 0: every check of every client that is there has passed.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.clients.checking import MODEL
from benchmarks.instances import SERVE, is_healthy, serving
from benchmarks.record import ROOT, Cell, Report, parser_of, run
from tests.dsv3.server import serving as stand_in
from tests.dsv3.text import dialects

PASSED = "passed"
_CLIENT_S = 900
_ARGUMENTS = ["--tool_call_parser=deepseek_v31", "--max_model_len=2048", "--batch_dir={scratch}/batches",
              f"--served_model_name={MODEL}"]  # fmt: skip


class Client(NamedTuple):
    """A client: its package, and the command that runs it, where `{url}` is the bundled model's server."""

    package: str
    command: list[str]
    saw: str = ""
    """What of its output a tool's row shows, as a regular expression; a script of ours prints its own rows."""
    is_offline: bool = True
    """Whether it runs with the hub switched off."""


def _script(name: str) -> list[str]:
    return ["-m", f"benchmarks.clients.{name}", "{url}", "{tools_url}"]


_LM_EVAL = "model={model},base_url={url}/v1/completions,tokenizer={root}/dsv3/bundled,num_concurrent=2,max_length=2048"
CLIENTS = (
    Client("openai", _script("use_openai")),
    Client("anthropic", _script("use_anthropic")),
    Client("litellm", _script("use_litellm")),
    Client(
        "lm_eval",
        [
            *("-m", "lm_eval", "run", "--model", "local-completions", "--model_args", _LM_EVAL),
            *("--tasks", "tiny_python", "--include_path", "benchmarks/clients/lm_eval_task"),
        ],
        r"acc *\|[^|]*\| *[\d.]+",
    ),
    Client(
        "schemathesis",
        [
            *("-m", "schemathesis.cli", "--config-file", "benchmarks/clients/schemathesis.toml"),
            *("run", "{url}/openapi.json", "--max-examples", "20", "--request-timeout", "60"),
            *("--exclude-path", "/flush_cache", "--seed", "1"),
        ],
        r"(?:Test cases:\n(?:.+\n)+)|\d+ generated.*",
    ),
    Client(
        "locust",
        [
            *("-m", "locust", "-f", "benchmarks/clients/locustfile.py", "--headless", "--only-summary"),
            *("--users", "8", "--spawn-rate", "8", "--run-time", "15s", "--host", "{url}"),
        ],
        r"Aggregated +\d+ +\S+",
    ),
    Client(
        "aiperf",
        [
            *("-m", "aiperf", "profile", "--model", "{model}", "--url", "{url}", "--endpoint-type", "chat"),
            *("--streaming", "--concurrency", "4", "--request-count", "16", "--tokenizer", "{root}/dsv3/bundled"),
            *("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16", "--ui", "none"),
            *("--artifact-dir", "{scratch}"),
        ],
        r"Request Count[^\n]*?\d+",
        is_offline=False,  # else it takes the tokenizer's directory for a name in a hub's cache
    ),
)


def main(report: Report) -> int:
    """Reports the table; returns the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("--python", required=True, help="interpreter of the environment that has the clients")
    parser.add_argument("--aiperf", help="interpreter of another one, for aiperf")
    parser.add_argument("--only", nargs="*", help="packages to run, all of them if not given")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, _servers(Path(scratch)) as places:
        rows = (
            row
            for client in CLIENTS
            if not asked.only or client.package in asked.only
            for row in _run(client, asked, places | {"scratch": scratch})
        )
        table = report.table("Checks", ["client", "check", "verdict", "saw"], rows)
    return 0 if table.rows and all(row[2] == PASSED for row in table.rows) else 1


@contextlib.contextmanager
def _servers(scratch: Path) -> Iterator[dict[str, str]]:
    """Yields what stands for the places in commands, the two servers' addresses among them."""
    arguments = [argument.format(scratch=scratch) for argument in _ARGUMENTS]
    (scratch / "tools").mkdir()
    with (
        stand_in.running(dialects.write(scratch / "tools")) as tools,
        serving(*arguments, command=SERVE, **_environment()) as bundled,
    ):
        yield {"url": bundled.url, "tools_url": tools.url, "model": MODEL, "root": str(ROOT)}
        assert is_healthy(bundled.url), "the server did not survive its clients"


def _environment(is_offline: bool = True) -> dict[str, str]:
    offline = {name: "1" for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if is_offline}
    offline["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    return {**os.environ, **offline, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "none"}


def _run(client: Client, asked: argparse.Namespace, places: dict[str, str]) -> Iterator[list[Cell]]:
    """Yields a client's rows: those that a script of ours prints, or one for a tool's exit status."""
    python = asked.aiperf if client.package == "aiperf" and asked.aiperf else asked.python
    version = _version(client.package, python)
    name = f"{client.package} {version}"
    if not version:
        return
    command = [python, *(re.sub(r"\{(\w+)\}", lambda found: places[found[1]], part) for part in client.command)]
    environment = _environment(client.is_offline)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_CLIENT_S)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    for line in lines:
        yield _row(name, line["check"], line["passed"], line["saw"])
    if not lines:
        found = re.search(client.saw, done.stdout + done.stderr) if client.saw else None
        saw = " ".join(found[0].split()) if found else (done.stdout + done.stderr)[-300:]
        yield _row(name, " ".join(client.command[1:3]), done.returncode == 0 and found is not None, saw)
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-6000:], file=sys.stderr)


def _row(client: str, check: str, passed: bool, saw: str) -> list[Cell]:
    saw = saw.replace("|", "\\|").replace("\n", " ")
    return [client, check, PASSED if passed else "**failed**", f"`{saw}`" if saw else ""]


def _version(package: str, python: str) -> str:
    """Returns the version that an environment has of a package, "" for none."""
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    done = subprocess.run([python, "-c", code, package], capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    run(main)
