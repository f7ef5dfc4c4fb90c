"""A worker for `test_worker_process`; each request names an action."""

import os
import signal
import time

from dsv3.server.worker_process import serve_requests


def answer(body: bytes) -> str:
    """Returns the id of this process."""
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
    return str(os.getpid())


if __name__ == "__main__":
    serve_requests(lambda setup: answer, str, 2**33)
