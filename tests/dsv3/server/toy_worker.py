"""A worker for `test_worker_process`; each request names an action."""

import os
import signal
import time

from dsv3.server.worker_process import serve_requests


def answer(body: bytes) -> bytearray:
    """Returns a frame with the id of this process."""
    match body:
        case b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        case b"work":
            while True:
                pass
        case b"search":
            sum(range(10**12))  # one call that never looks at signals
        case b"sleep":
            time.sleep(1.0)
        case b"hang":
            time.sleep(60.0)
    reply = str(os.getpid()).encode()
    return bytearray(len(reply).to_bytes(4, "little") + reply)


if __name__ == "__main__":
    serve_requests(answer, 2**33)
