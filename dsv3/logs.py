"""What the processes of a server log, and how; imports no jax."""

import logging
import os
import sys


def configure_logging() -> None:
    """Has jax warn only, through its own handler, and say in a line why a GPU plugin does not start.

    Told to use the CPU it does not say that at all.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("jax").setLevel(logging.WARNING)
    logging.getLogger("jax").propagate = False
    plugins = logging.getLogger("jax._src.xla_bridge")
    plugins.addFilter(_without_traceback)
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        plugins.setLevel(logging.CRITICAL)


def _without_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and record.exc_info[1] is not None:
        record.msg, record.args = f"{record.getMessage()}: {record.exc_info[1]}", ()
        record.exc_info = record.exc_text = None
    return True
