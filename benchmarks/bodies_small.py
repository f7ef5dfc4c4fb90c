"""The way of a small chat from its body to the engine, for `benchmarks.bodies --small`: parse, encode, prepare, submit.

There is no connection, no template worker and no engine. Prints microseconds of processor time per chat: the least of
some blocks, since other work on the machine only adds.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from dsv3.scheduler.request import RequestRules
from dsv3.server.config import ServerConfig
from dsv3.server.engine.client import EngineClient
from dsv3.server.engine.messages import EngineInfo
from dsv3.server.serving.handlers import KINDS
from dsv3.server.serving.service import Service
from dsv3.text.tokenizer import Tokenizer

_BLOCKS, _COUNT = 20, 500


class _Templates:
    async def render(self, request) -> str:
        return "".join(message["content"] for message in request.messages)


class _Wire:
    def is_closing(self) -> bool:
        return False

    def write(self, frame) -> None:
        pass


async def main(model_dir: str) -> None:
    rules = RequestRules(vocab_size=500, max_model_len=4096)
    engine = EngineClient(max_num_queued_reqs=64)
    engine.info, engine.state, engine._transport = EngineInfo(rules, max_num_seqs=64, num_pages=64), "ready", _Wire()
    service = Service(ServerConfig(Path(), ("tiny",)), engine, Tokenizer.from_directory(Path(model_dir)), _Templates())
    messages = [{"role": role, "content": "Hello there, you."} for role in ("system", "user", "assistant", "user")]
    body = json.dumps({"model": "tiny", "messages": messages, "max_tokens": 9, "temperature": 0.6, "stream": True})
    kind, data, blocks = KINDS["/v1/chat/completions"], body.encode(), []
    for _ in range(_BLOCKS):
        started = time.process_time()
        for _ in range(_COUNT):
            answer = kind(service, data)
            await answer.prepare()
            answer.start(lambda event: None, lambda error: None)
            answer.close()
        blocks.append(1e6 * (time.process_time() - started) / _COUNT)
    print(f"{min(blocks):.1f}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
