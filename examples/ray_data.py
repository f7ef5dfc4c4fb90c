"""Answers a table with Ray Data, in the two ways in which a server of this package fits in.

    python -m launch.serve &                                      # here, or anywhere
    python examples/ray_data.py http://127.0.0.1:8000 questions.parquet answers [--actors]

The table has columns `id` and `prompt`; the answers become a directory of Parquet files. By default each row is posted
by Ray's HTTP processor. With `--actors` a plain actor class posts a block of rows at a time, as many together as the
server runs. Needs `pip install 'dsv3[batch]'`.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.data.llm import HttpRequestProcessorConfig, build_processor

MAX_TOKENS = 32
PRIORITY = 100  # other requests of the server come first


def payload(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the body of a request; the row's number as its seed makes a row that is tried again the same."""
    messages = [{"role": "user", "content": row["prompt"]}]
    return {"messages": messages, "max_tokens": MAX_TOKENS, "seed": int(row["id"]), "priority": PRIORITY}


def answer(response: dict[str, Any]) -> str:
    """Returns the text of a server's answer."""
    return response["choices"][0]["message"]["content"]


def by_processor(rows: ray.data.Dataset, url: str) -> ray.data.Dataset:
    """Has Ray's processor post the rows. A block waits for its slowest row: blocks are large, and several at once."""
    config = HttpRequestProcessorConfig(url=f"{url}/v1/chat/completions", batch_size=128, concurrency=2, max_retries=5)
    processor = build_processor(
        config,
        preprocess=lambda row: {"id": row["id"], "prompt": row["prompt"], "payload": payload(row)},
        postprocess=lambda row: {"id": row["id"], "prompt": row["prompt"], "answer": answer(row["http_response"])},
    )
    return processor(rows)


class Asker:
    """Posts blocks of rows; a row that the server refuses gets the reason, and ends nothing."""

    def __init__(self, url: str, at_once: int = 64):
        self._url, self._at_once = f"{url}/v1/chat/completions", at_once

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        rows = [{"id": i, "prompt": prompt} for i, prompt in zip(block["id"], block["prompt"], strict=True)]
        with ThreadPoolExecutor(self._at_once) as threads:
            found = list(threads.map(self._ask, rows))
        return block | {"answer": [text for text, _ in found], "error": [error for _, error in found]}

    def _ask(self, row: dict[str, Any]) -> tuple[str, str]:
        """Returns a row's answer and error, one of which is empty; a busy server is asked again until it has room."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(payload(row)).encode(), headers)
        while True:
            try:
                with urllib.request.urlopen(request, timeout=600) as response:
                    return answer(json.load(response)), ""
            except urllib.error.HTTPError as error:
                if error.code not in (429, 503):
                    return "", error.read().decode("utf-8", "replace")
                time.sleep(float(error.headers.get("Retry-After", 1)))


def by_actors(rows: ray.data.Dataset, url: str) -> ray.data.Dataset:
    """Has actors post the rows; several, so that a block's slowest row keeps no one else waiting."""
    compute = ray.data.ActorPoolStrategy(size=2)
    return rows.map_batches(Asker, fn_constructor_args=(url,), batch_size=128, compute=compute, num_cpus=0.5)


def main(url: str, source: str, target: str, *options: str) -> None:
    """Reads, asks and writes."""
    rows = ray.data.read_parquet(source)
    answered = by_actors(rows, url) if "--actors" in options else by_processor(rows, url)
    answered.write_parquet(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
