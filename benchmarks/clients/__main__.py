"""Other people's clients against this server, unmodified.

  python -m benchmarks.clients --python CLIENTS/bin/python [--only NAME...]

`benchmarks/clients.md` says what to install into that environment: clients are no dependencies of ours. A client that
the environment lacks is left out. Exit status 0 means that all that are there have passed. OpenAI's client needs no
command: the server's tests use it.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarks.instances import SERVE, serving
from benchmarks.record import ROOT, Cell, Report, arguments, run

_LIMIT_S = 900
_ANTHROPIC = """
import sys, anthropic
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120)
question = {"messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 8}
city = {"type": "object", "properties": {"city": {"enum": ["Hangzhou"]}}, "required": ["city"]}
tool = {"name": "get_weather", "description": "Returns the weather.", "input_schema": city}
model = client.models.list().data[0].id

whole = client.messages.create(model=model, extra_body={"temperature": 0}, **question)
assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 8, whole
counted = client.messages.count_tokens(model=model, messages=question["messages"]).input_tokens
assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens, (counted, whole.usage)
with client.messages.stream(model=model, extra_body={"temperature": 0}, **question) as events:
    text, final = "".join(events.text_stream), events.get_final_message()
assert text == whole.content[0].text == final.content[0].text, (text, whole, final)

forced = {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 200}
with client.messages.stream(model=model, **question | forced) as events:
    kinds, final = [event.type for event in events], events.get_final_message()
[call] = [block for block in final.content if block.type == "tool_use"]
assert call.input == {"city": "Hangzhou"} and final.stop_reason == "tool_use", final
result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
turns = [{"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
client.messages.create(model=model, tools=[tool], max_tokens=4, messages=question["messages"] + turns)

unknown = {"model": "other"}, anthropic.NotFoundError
invalid = {"model": model, "extra_body": {"top_p": 2}}, anthropic.BadRequestError
for change, kind in (unknown, invalid):
    try:
        client.messages.create(**question, **change)
    except kind as error:
        assert error.body["error"]["message"], error
    else:
        raise AssertionError(f"{change} was taken")
print(f"{len(kinds)} events, {call.name}({call.input})")
"""
_MODEL = "model={model},base_url={url}/v1/completions,tokenizer=dsv3/bundled,num_concurrent=2,max_length=2048"
CLIENTS = {
    "anthropic": (["-c", _ANTHROPIC, "{url}"], r"\d+ events, .*"),
    "lm_eval": (
        [
            *("-m", "lm_eval", "run", "--model", "local-completions", "--model_args", _MODEL),
            *("--tasks", "tiny_python", "--include_path", "benchmarks/clients/lm_eval_task"),
        ],
        r"acc *\|[^|]*\| *[\d.]+",
    ),
    "schemathesis": (
        [
            *("-m", "schemathesis.cli", "--config-file", "benchmarks/clients/schemathesis.toml"),
            *("run", "{url}/openapi.json", "--max-examples", "20", "--request-timeout", "60"),
            *("--exclude-path", "/flush_cache", "--seed", "1"),
        ],
        r"(?:Test cases:\n(?:.+\n)+)|\d+ generated.*",
    ),
}
"""The arguments of Python that run each client, and what of its output a row shows, as a regular expression."""


def main(report: Report) -> int:
    """Reports a row per client; returns the exit status."""
    given = arguments(__doc__, python=sys.executable, only=tuple(CLIENTS))
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--tool_call_parser=deepseek_v31", "--max_model_len=2048", f"--batch_dir={folder}")
        with serving(*flags, command=SERVE) as server:
            rows = (row for name in given.only for row in _run(name, given.python, server.url))
            table = report.table("Clients", ["client", "version", "passed", "output"], rows)
    return 0 if table.rows and all(row[2] == "yes" for row in table.rows) else 1


def _run(name: str, python: str, url: str) -> Iterator[list[Cell]]:
    """Runs a client and yields its row; yields nothing where the environment lacks the client."""
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    version = subprocess.run([python, "-c", code, name], capture_output=True, text=True).stdout.strip()
    if not version:
        return
    words, shown = CLIENTS[name]
    places = {"url": url, "model": "dsv3-tiny"}
    command = [python, *(re.sub(r"\{(url|model)\}", lambda found: places[found[1]], word) for word in words)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    environment = os.environ | offline
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
    output = done.stdout + done.stderr
    found = re.search(shown, output)
    if done.returncode or not found:
        print(output[-6000:], file=sys.stderr)
    passed = "yes" if found and not done.returncode else "no"
    yield [name, version, passed, " ".join(found[0].split()).replace("|", " ") if found else None]


if __name__ == "__main__":
    run(main)
