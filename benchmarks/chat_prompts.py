"""Processor time that a conversation costs a front and its template worker, and then the tokenizer.

  python -m benchmarks.chat_prompts [--seconds 3]

The template and tokenizer are the bundled model's. A second worker pays only where the first takes more than the front.
"""

import argparse
import asyncio
import json
import time
import types
from pathlib import Path

import psutil

import dsv3
from dsv3.server.config import ServerConfig
from dsv3.server.protocol.openai import ChatRequest
from dsv3.server.serving.prompts import RequestTools, chat_prompt
from dsv3.server.serving.request_parsing import read
from dsv3.server.serving.service import Service
from dsv3.server.templates import TemplatePool
from dsv3.text.tokenizer import Tokenizer

CONVERSATIONS = {
    "1 of 100": (1, 100),
    "9 of 6,144": (9, 6144),
    "701 of 40": (701, 40),
}


def body(messages: int, size: int) -> bytes:
    """The JSON of a request with so many messages of so many letters."""
    roles = ("user", "assistant")
    return json.dumps({"messages": [{"role": roles[i % 2], "content": "x" * size} for i in range(messages)]}).encode()


def processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def measure(seconds: float) -> None:
    """Prints the times of each conversation, asked for `seconds` long."""
    [file] = (Path(dsv3.__file__).parent / "bundled").rglob("tokenizer.json")
    tokenizer = Tokenizer.from_directory(file.parent)
    pool = TemplatePool(tokenizer.chat_template, tokenizer.special_tokens)
    service = Service(ServerConfig(Path(), ("m",)), types.SimpleNamespace(), tokenizer, pool)
    texts: list[str] = []

    async def note(text: str, **_: object) -> list[int]:
        texts.append(text)
        return []

    service.encode = note  # tokenising is timed by itself, in this thread
    before = psutil.Process().children()
    await pool.check()
    [worker] = set(psutil.Process().children()).difference(before)
    for name, shape in CONVERSATIONS.items():
        request = body(*shape)
        began, front, back, count = time.monotonic(), processor_s(psutil.Process()), processor_s(worker), 0
        while time.monotonic() < began + seconds:
            await chat_prompt(service, read(ChatRequest, request), RequestTools())
            count += 1
        front, back = processor_s(psutil.Process()) - front, processor_s(worker) - back
        began = time.process_time()
        tokenizer.encode(texts[-1], add_special_tokens=False)
        encode = time.process_time() - began
        ms = [f"{1e3 * each:.2f} ms" for each in (front / count, back / count, encode)]
        print(f"{name} letters: front {ms[0]}, worker {ms[1]}, tokenizer {ms[2]} ({count} times)")
    await pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each conversation")
    asyncio.run(measure(parser.parse_args().seconds))


if __name__ == "__main__":
    main()
