"""A process for `test_asking`: each question is what it has to do."""

import os
import signal
import time

from dsv3.server.worker_process import answer_questions


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
    told = str(os.getpid()).encode()
    return bytearray(len(told).to_bytes(4, "little") + told)


if __name__ == "__main__":
    answer_questions(answer, 2**33)
