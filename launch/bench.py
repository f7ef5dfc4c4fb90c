"""Measures a running OpenAI-compatible server (this one, vLLM, SGLang) under load.

  python -m launch.bench serve --url=http://127.0.0.1:8000 --concurrency=16
  python -m launch.bench serve --url=http://127.0.0.1:8000 --request_rate=4 --goodput=ttft:2000,itl:100
  python -m launch.bench sweep --url=http://127.0.0.1:8000 --concurrencies=1,4,16,64 --plot=pressure.svg

--concurrency alone is a closed loop: as many requests at a time, the next one when one ends. --request_rate is an open
loop: requests are due at random times whether or not earlier ones have ended, and latencies count from then.
sweep measures one closed loop after the other, and shows what a user gets against what all get together.
An interrupt ends the load and reports what was measured; a second one ends the process at once.
docs/benchmarking.md defines every figure.
"""

import asyncio
import importlib.util
import json
import pathlib
import sys
from typing import Any

import uvloop
from absl import flags as absl_flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from launch import flags
from tools.bench import metrics, report, serve, sweep
from tools.bench.interrupt import Interrupts
from tools.bench.workload import RandomPrompts

_URL = absl_flags.DEFINE_string("url", "http://127.0.0.1:8000", "Load the server at this address, with or without /v1.")
_ENDPOINT = absl_flags.DEFINE_enum("endpoint", "completions", ["completions", "chat"], "Load this route.")
_MODEL = absl_flags.DEFINE_string("model", None, "Ask for this model; default: the first one that the server lists.")
_API_KEY = absl_flags.DEFINE_string("api_key", None, "Send this key as bearer token.")
_CONCURRENCY = absl_flags.DEFINE_integer(
    "concurrency",
    None,
    "Keep this many requests in flight. With --request_rate it is an upper bound, and time held back is latency.",
)
_REQUEST_RATE = absl_flags.DEFINE_float(
    "request_rate", None, "Send this many requests per second; inf sends all at once."
)
_BURSTINESS = absl_flags.DEFINE_float(
    "burstiness", 1.0, "Draw gaps from a gamma distribution of this shape: 1 is a Poisson process, less is burstier."
)
_NUM_PROMPTS = absl_flags.DEFINE_integer(
    "num_prompts", None, "Measure this many requests; default: 100, or all of the dataset."
)
_NUM_WARMUPS = absl_flags.DEFINE_integer(
    "num_warmups", 1, "Send this many requests with other prompts before the measured ones."
)
_DATASET = absl_flags.DEFINE_string(
    "dataset",
    None,
    "Read requests from this JSON Lines file: prompt (text or token ids) or messages, and optionally max_tokens.",
)
_INPUT_LEN = absl_flags.DEFINE_integer(
    "input_len", 512, "Send random prompts of this many tokens, their prefix not counted."
)
_OUTPUT_LEN = absl_flags.DEFINE_integer("output_len", 128, "Ask for this many tokens, where the dataset does not say.")
_RANGE_RATIO = absl_flags.DEFINE_float(
    "range_ratio", 0.0, "Draw lengths of prompts and answers up to this share above and below their means."
)
_PREFIX_LEN = absl_flags.DEFINE_integer(
    "prefix_len", 0, "Begin each random prompt with this many tokens that other prompts share."
)
_NUM_PREFIXES = absl_flags.DEFINE_integer("num_prefixes", 1, "Use this many different shared prefixes.")
_PROMPT_KIND = absl_flags.DEFINE_enum(
    "prompt_kind",
    "auto",
    ["auto", "token_ids", "text"],
    "Make random prompts of token ids, drawn from what the server's /tokenize makes of common words, or of those words "
    "(about a token each). auto: ids where the server has /tokenize and the endpoint takes ids.",
)
_VOCAB_SIZE = absl_flags.DEFINE_integer("vocab_size", None, "Draw token ids below this without asking /tokenize.")
_TEMPERATURE = absl_flags.DEFINE_float("temperature", 0.0, "Sample at this temperature.")
_IGNORE_EOS = absl_flags.DEFINE_boolean("ignore_eos", True, "Make answers exactly as long as asked for.")
_EXTENSIONS = absl_flags.DEFINE_boolean(
    "extensions",
    True,
    "Send ignore_eos and return_token_ids; turn it off for servers that refuse fields OpenAI has not.",
)
_TIMEOUT = absl_flags.DEFINE_float("timeout", 600.0, "Count a request as failed after this many seconds.")
_GOODPUT = absl_flags.DEFINE_list(
    "goodput",
    [],
    "Count requests within these limits in milliseconds as good: ttft, itl, tpot, e2e, as in ttft:2000,itl:100.",
)
_SEED = absl_flags.DEFINE_integer("seed", 0, "Draw prompts and arrival times from this seed.")
_CONCURRENCIES = absl_flags.DEFINE_list(
    "concurrencies",
    ["1", "2", "4", "8", "16", "32", "64"],
    "sweep: keep these many requests in flight, one after the other.",
)
_REQUESTS_PER_USER = absl_flags.DEFINE_integer(
    "requests_per_user", 8, "sweep: measure this many requests at each concurrency, times the concurrency."
)
_DEVICES = absl_flags.DEFINE_integer(
    "devices", 1, "sweep: divide tokens per second by this many devices of the server."
)
_PLOT = absl_flags.DEFINE_string("plot", None, "sweep: draw the curve to this SVG or PNG file.")
_OUTPUT = absl_flags.DEFINE_string("output", None, "Write the report as JSON to this file.")


def main(command: str) -> int:
    """Runs one load test, or several; returns the exit status: 1 if no request completed.

    The first SIGINT or SIGTERM ends the load, and what was measured is reported; the second ends the process at once.
    """
    if command not in _COMMANDS:
        raise flags.UsageError(f"unknown command {command!r}; the commands are {' and '.join(_COMMANDS)}")
    for name, path in (("output", _OUTPUT.value), ("plot", _PLOT.value)):
        if path and not pathlib.Path(path).absolute().parent.is_dir():
            raise flags.UsageError(f"--{name} {path}: there is no such folder")
    interrupts = Interrupts("launch.bench")
    try:
        result = uvloop.run(interrupts.run(_COMMANDS[command](Console(stderr=True))))
    except serve.BenchError as error:
        print(f"launch.bench: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        print("launch.bench: interrupted before anything was measured", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        raise flags.UsageError(str(error)) from error
    return _show(command, result)


def _show(command: str, result: dict[str, Any]) -> int:
    Console().print(report.render(result) if command == "serve" else sweep.render(result))
    if _OUTPUT.value:
        pathlib.Path(_OUTPUT.value).write_text(json.dumps(result, indent=1) + "\n")
    if command == "sweep" and _PLOT.value:
        sweep.draw(result, pathlib.Path(_PLOT.value))
    loads = [result] if command == "serve" else result["points"]
    return 0 if any(load["requests"]["completed"] for load in loads) else 1


def _options(concurrency: int | None) -> serve.ServeOptions:
    prompts = RandomPrompts(
        _INPUT_LEN.value, _OUTPUT_LEN.value, _RANGE_RATIO.value, _PREFIX_LEN.value, _NUM_PREFIXES.value
    )
    return serve.ServeOptions(
        url=_URL.value,
        prompts=prompts,
        endpoint=_ENDPOINT.value,
        model=_MODEL.value,
        api_key=_API_KEY.value,
        num_prompts=_NUM_PROMPTS.value,
        num_warmups=_NUM_WARMUPS.value,
        concurrency=concurrency,
        request_rate=_REQUEST_RATE.value,
        burstiness=_BURSTINESS.value,
        prompt_kind=_PROMPT_KIND.value,
        vocab_size=_VOCAB_SIZE.value,
        dataset=pathlib.Path(_DATASET.value) if _DATASET.value else None,
        temperature=_TEMPERATURE.value,
        ignore_eos=_IGNORE_EOS.value,
        extensions=_EXTENSIONS.value,
        timeout_s=_TIMEOUT.value,
        limits=tuple(map(metrics.Limit.parse, _GOODPUT.value)),
        seed=_SEED.value,
    )


def _sweep_options() -> sweep.SweepOptions:
    if _CONCURRENCY.value is not None or _REQUEST_RATE.value is not None or _NUM_PROMPTS.value is not None:
        raise ValueError("sweep takes --concurrencies and --requests_per_user, and no other load")
    if _PLOT.value and pathlib.Path(_PLOT.value).suffix not in (".svg", ".png"):
        raise ValueError(f"--plot {_PLOT.value}: must end in .svg or .png")
    if _PLOT.value and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: install the 'plots' extra")
    try:
        concurrencies = tuple(map(int, _CONCURRENCIES.value))
    except ValueError:
        raise ValueError(f"--concurrencies {','.join(_CONCURRENCIES.value)}: must be integers") from None
    return sweep.SweepOptions(concurrencies, _REQUESTS_PER_USER.value, _DEVICES.value)


async def _serve(console: Console) -> dict[str, Any]:
    options = _options(_CONCURRENCY.value)
    with _progress(console) as progress:
        task = progress.add_task("warming up", total=None)
        return await serve.run(
            options,
            lambda total: progress.update(task, description="requests", total=total),
            lambda record: progress.advance(task),
        )


async def _sweep(console: Console) -> dict[str, Any]:
    options = _sweep_options()
    load = _options(options.concurrencies[0])
    with _progress(console) as progress:
        task = progress.add_task("warming up", total=None)
        return await sweep.run(
            load,
            options,
            lambda concurrency, total: progress.reset(task, description=f"{concurrency} at a time", total=total),
            lambda record: progress.advance(task),
        )


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, refresh_per_second=2, transient=True)


_COMMANDS = {"serve": _serve, "sweep": _sweep}


if __name__ == "__main__":
    flags.run(main, positional="COMMAND")
