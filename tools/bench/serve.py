"""Runs one load test of a server: asks what it serves, makes the prompts, warms up, sends them, reports."""

import dataclasses
import datetime
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dsv3.http_client import Address, Client, RequestFailed
from tools.bench import drafts, loops, metrics
from tools.bench.stream import Record, complete
from tools.bench.workload import WORDS, Prompt, RandomPrompts, RequestFormat, arrival_offsets, load_dataset, repeat

REPORT_VERSION = 1
MIN_DISTINCT_TOKENS = 16
MAX_REPLY_BYTES = 1 << 24
# The warm-up sends other prompts, so that the measured ones are not in the server's prefix cache.
WARMUP_SEED_OFFSET = 1_000_003


class BenchError(Exception):
    """The load test cannot run; the message says what to change."""


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """What `python -m launch.bench serve` was asked for. The help of its flags says what each option means.

    Raises ValueError for values that contradict one another.
    """

    url: str
    prompts: RandomPrompts
    endpoint: str = "completions"
    model: str | None = None
    api_key: str | None = dataclasses.field(default=None, repr=False)
    num_prompts: int | None = None
    num_warmups: int = 1
    concurrency: int | None = None
    request_rate: float | None = None
    burstiness: float = 1.0
    prompt_kind: str = "auto"
    vocab_size: int | None = None
    dataset: pathlib.Path | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    extensions: bool = True
    timeout_s: float = 600.0
    limits: tuple[metrics.Limit, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is None and self.request_rate is None:
            raise ValueError("give --concurrency (closed loop), --request_rate (open loop) or both")
        for name in ("concurrency", "num_prompts", "vocab_size", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name.removesuffix('_s')} {value}: must be greater than 0")
        if self.num_warmups < 0:
            raise ValueError(f"--num_warmups {self.num_warmups}: must not be negative")
        if self.endpoint == "chat" and (self.prompt_kind == "token_ids" or self.vocab_size):
            raise ValueError("--endpoint=chat takes text, not --prompt_kind=token_ids or --vocab_size")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("--api_key: must be printable ASCII")
        if self.request_rate is not None:
            arrival_offsets(1, self.request_rate, self.burstiness, self.seed)

    def public(self) -> dict[str, Any]:
        """Returns the options as plain data for the report, without the key."""
        fields = dataclasses.asdict(self)
        del fields["api_key"]
        fields["dataset"] = str(self.dataset) if self.dataset else None
        if self.request_rate is not None and math.isinf(self.request_rate):
            fields["request_rate"] = "inf"  # JSON has no infinity
        fields["limits"] = {limit.metric: limit.milliseconds for limit in self.limits}
        return fields


@dataclasses.dataclass(frozen=True)
class Workload:
    """Everything that will be sent, made before the clock starts."""

    format: RequestFormat
    prompt_kind: str
    warmups: list[bytes]
    bodies: list[bytes]


async def run(
    options: ServeOptions, on_start: Callable[[int], None], on_record: Callable[[Record], None]
) -> dict[str, Any]:
    """Runs the load test and returns its report as plain data.

    `on_start(total)` is called when the measured load begins, `on_record` for each of its requests. Raises BenchError
    when the server cannot be reached or refuses the warm-up, ValueError for a dataset or an option that is wrong.
    """
    client = Client(Address.parse(options.url), options.api_key)
    try:
        workload = await make_workload(client, options)
        send = _sender(client, workload.format.path, options.timeout_s)
        await _warm_up(send, workload, options.concurrency or 1)
        offsets = None
        if options.request_rate is not None:
            offsets = arrival_offsets(len(workload.bodies), options.request_rate, options.burstiness, options.seed)
        counted = await drafts.read(client)
        on_start(len(workload.bodies))
        began_at = datetime.datetime.now(datetime.UTC)
        result = await loops.run(
            send, workload.bodies, concurrency=options.concurrency, offsets=offsets, on_record=on_record
        )
        made = drafts.report(counted, counted and await drafts.read(client))
    finally:
        await client.close()
    began_s = min((record.scheduled_s for record in result.records), default=0.0)
    return {
        "version": REPORT_VERSION,
        "started_at": began_at.isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "options": options.public() | {"model": workload.format.model, "prompt_kind": workload.prompt_kind},
        **metrics.summarize(result, options.limits),
        "drafts": made,
        "per_request": metrics.request_rows(result.records, began_s),
    }


async def make_workload(client: Client, options: ServeOptions) -> Workload:
    """Asks the server what the prompts depend on, and makes them."""
    model = options.model or await served_model(client)
    form = RequestFormat(options.endpoint, model, options.temperature, options.ignore_eos, options.extensions)
    units = await prompt_units(client, model, options)
    warmups = options.prompts.draw(options.num_warmups, units, options.seed + WARMUP_SEED_OFFSET)
    kind = "token_ids" if isinstance(units[0], int) else "text"
    if options.dataset is not None:
        kind, prompts = "dataset", _from_dataset(options.dataset, options)
    else:
        prompts = list(options.prompts.draw(options.num_prompts or 100, units, options.seed))
    return Workload(form, kind, [form.body(prompt) for prompt in warmups], [form.body(prompt) for prompt in prompts])


def _from_dataset(path: pathlib.Path, options: ServeOptions) -> list[Prompt]:
    prompts = load_dataset(path, options.prompts.output_len)
    return repeat(prompts, options.num_prompts or len(prompts), options.seed)


async def served_model(client: Client) -> str:
    """Returns the first model that the server lists. Raises BenchError where it lists none."""
    try:
        async with client.request("GET", "/v1/models") as response:
            listing = msgspec.json.decode(await response.read(MAX_REPLY_BYTES))
        return str(listing["data"][0]["id"])
    except RequestFailed as error:
        raise BenchError(f"GET /v1/models: {error}") from error
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise BenchError("GET /v1/models lists no model; name one with --model") from error


async def prompt_units(client: Client, model: str, options: ServeOptions) -> Sequence[int] | Sequence[str]:
    """Returns what random prompts are made of: token ids where the server gives them and the endpoint takes them.

    Elsewhere they are words. Raises BenchError where --prompt_kind asks for token ids and the server gives none.
    """
    if options.vocab_size is not None:
        return range(options.vocab_size)
    if options.endpoint == "chat" or options.prompt_kind == "text" or options.dataset is not None:
        return WORDS
    ids = await _tokenize(client, model, " ".join(WORDS))
    if len(ids) >= MIN_DISTINCT_TOKENS:
        return ids
    if options.prompt_kind == "token_ids":
        raise BenchError("the server's /tokenize gives no token ids; give --vocab_size or --prompt_kind=text")
    return WORDS


async def _tokenize(client: Client, model: str, text: str) -> list[int]:
    """Returns the distinct token ids of `text` by vLLM's route /tokenize; none where the server has no such route."""
    body = msgspec.json.encode({"model": model, "prompt": text, "add_special_tokens": False})
    try:
        async with client.request("POST", "/tokenize", body) as response:
            reply = msgspec.json.decode(await response.read(MAX_REPLY_BYTES))
        return sorted(set(msgspec.convert(reply["tokens"], list[int])))
    except (RequestFailed, msgspec.MsgspecError, KeyError, TypeError):
        return []


def _sender(client: Client, path: str, timeout_s: float) -> loops.Send:
    async def send(index: int, body: bytes, scheduled_s: float) -> Record:
        return await complete(client, path, body, index=index, scheduled_s=scheduled_s, timeout_s=timeout_s)

    return send


async def _warm_up(send: loops.Send, workload: Workload, concurrency: int) -> None:
    result = await loops.run(send, workload.warmups, concurrency=concurrency)
    if result.interrupted:
        raise BenchError("interrupted while warming up")
    for kind, failure in metrics.errors_by_kind(result.records).items():
        raise BenchError(
            f"{failure['count']} of {len(workload.warmups)} warm-up requests failed: {kind}: {failure['example']}"
        )
