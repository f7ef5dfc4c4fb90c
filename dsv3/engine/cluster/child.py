"""A follower's process, as its supervisor starts it: `python -m dsv3.engine.cluster.child`.

jax is imported before the supervisor's order is read, so that a standby process has that behind it. The process ends at
once when its supervisor does.
"""

import importlib
import os
import threading
import time
from pathlib import Path
from typing import NoReturn

from dsv3.engine.cluster.link import FollowerReport, Link
from dsv3.logs import configure_logging
from dsv3.processes.child import import_uncollected, link_to_parent

ALIVE_S = 0.5


def main() -> NoReturn:
    """Follows the leader once the supervisor orders it."""
    configure_logging()
    link = Link(link_to_parent())
    threading.Thread(target=_beat, args=(link,), name="pulse", daemon=True).start()
    import_uncollected("dsv3.engine.cluster.follower")
    from dsv3.engine.cluster import follower

    order = link.receive_order()
    if order is None:
        os._exit(0)
    threading.Thread(target=_end_with, args=(link,), name="supervisor", daemon=True).start()
    module, _, name = order.load.partition(":")
    load = getattr(importlib.import_module(module), name)
    follower.run(order.cluster, Path(order.model_dir), order.engine, load, order.last, link.send)


def _beat(link: Link) -> None:
    while True:
        link.send(FollowerReport())
        time.sleep(ALIVE_S)


def _end_with(link: Link) -> NoReturn:
    link.wait_for_end()
    os._exit(1)


if __name__ == "__main__":
    main()
