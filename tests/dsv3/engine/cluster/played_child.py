"""A follower's process without jax, which executes its order's `load`, one word after the other."""

import os
import signal
import sys
import threading
import time

from dsv3.engine.cluster.link import FollowerReport, Incarnation, Link
from dsv3.processes.child import link_to_parent


def _exit_on_signal(*_: object) -> None:
    os._exit(0)


def main() -> None:
    """Reports that it is alive ten times per second until it ends."""
    link = Link(link_to_parent())
    order = link.receive_order()
    if order is None:
        sys.exit(0)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    number = 0 if order.last is None else order.last.number + 1
    threading.Thread(target=beat, args=(link,), daemon=True).start()
    print(f"life {number}: {order.load}", flush=True)
    words = order.load.split("; ")[min(number, order.load.count("; "))]
    for word in words.split():
        match word:
            case "begin":
                link.send(FollowerReport("joined", Incarnation(number, "a")))
            case "serve":
                link.send(FollowerReport("serving"))
            case "waits":
                link.send(FollowerReport("waiting"))
            case "alone":
                link.send(FollowerReport("alone"))
            case "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "deaf":  # to signals
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case "ask":  # for the end
                os.kill(os.getppid(), signal.SIGTERM)
            case "wait":
                time.sleep(60)
            case status:
                os._exit(int(status))


def beat(link: Link) -> None:
    while True:
        link.send(FollowerReport())
        time.sleep(0.1)


if __name__ == "__main__":
    main()
