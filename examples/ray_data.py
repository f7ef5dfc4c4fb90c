"""Completes the prompts of a table with Ray Data, by Ray's HTTP processor or by actors.

    python -m launch.serve &                                      # here, or anywhere
    python examples/ray_data.py http://127.0.0.1:8000 questions.parquet answers [--actors]

The table has columns `id` and `prompt`; the answers are written as a directory of Parquet files. By default Ray's HTTP
processor posts each row, with `--actors` an actor posts blocks of rows. Needs `pip install 'dsv3[batch]'`.
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
    """Returns the body of a request; the row's id as seed makes retries reproducible."""
    messages = [{"role": "user", "content": row["prompt"]}]
    return {"messages": messages, "max_tokens": MAX_TOKENS, "seed": int(row["id"]), "priority": PRIORITY}


def answer(response: dict[str, Any]) -> str:
    """Returns the text of a response."""
    return response["choices"][0]["message"]["content"]


def by_processor(rows: ray.data.Dataset, url: str) -> ray.data.Dataset:
    """Posts the rows by Ray's processor. A block waits for its slowest row, so blocks are large and concurrent."""
    config = HttpRequestProcessorConfig(url=f"{url}/v1/chat/completions", batch_size=128, concurrency=2, max_retries=5)
    processor = build_processor(
        config,
        preprocess=lambda row: {"id": row["id"], "prompt": row["prompt"], "payload": payload(row)},
        postprocess=lambda row: {"id": row["id"], "prompt": row["prompt"], "answer": answer(row["http_response"])},
    )
    return processor(rows)


class CompletionActor:
    """Posts blocks of rows; a refused row gets an error text and does not fail the others."""

    def __init__(self, url: str, concurrency: int = 64):
        self._url, self._concurrency = f"{url}/v1/chat/completions", concurrency

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        rows = [{"id": i, "prompt": prompt} for i, prompt in zip(block["id"], block["prompt"], strict=True)]
        with ThreadPoolExecutor(self._concurrency) as threads:
            found = list(threads.map(self._post, rows))
        return block | {"answer": [text for text, _ in found], "error": [error for _, error in found]}

    def _post(self, row: dict[str, Any]) -> tuple[str, str]:
        """Returns a row's answer and error, one of which is empty; retries while the server is busy."""
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
    """Posts the rows by two actors, so that one block's slowest row does not delay the other."""
    compute = ray.data.ActorPoolStrategy(size=2)
    return rows.map_batches(CompletionActor, fn_constructor_args=(url,), batch_size=128, compute=compute, num_cpus=0.5)


def main(url: str, source: str, target: str, *options: str) -> None:
    """Reads the table, completes its prompts and writes the answers."""
    rows = ray.data.read_parquet(source)
    answered = by_actors(rows, url) if "--actors" in options else by_processor(rows, url)
    answered.write_parquet(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
