"""What the processes of a server log, and how; imports no jax."""

import logging
import os
import sys

_PLUGINS = logging.getLogger("jax._src.xla_bridge")
_MOST_REASONS = 8
_reasons: list[str] = []


def configure_logging() -> None:
    """Has jax warn only, through its own handler, and say in a line why a GPU plugin does not start.

    Told to use the CPU it does not say that at all.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("jax").setLevel(logging.WARNING)
    logging.getLogger("jax").propagate = False
    _PLUGINS.addFilter(_without_traceback)
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        _PLUGINS.setLevel(logging.CRITICAL)


def plugin_troubles() -> str:
    """Returns why jax has started no GPU, in its own words as it logged them, "" where it has logged nothing."""
    return "; ".join(_reasons)


def _without_traceback(record: logging.LogRecord) -> bool:
    record.msg, record.args = _text(record), ()
    record.exc_info = record.exc_text = None
    return True


def _keep_reason(record: logging.LogRecord) -> bool:
    if record.levelno >= logging.WARNING and (text := _text(record)) not in _reasons and len(_reasons) < _MOST_REASONS:
        _reasons.append(text)
    return True


def _text(record: logging.LogRecord) -> str:
    cause = record.exc_info[1] if record.exc_info else None
    return record.getMessage() if cause is None else f"{record.getMessage()}: {cause}"


# A filter and no handler: a logger that has one is silent where nothing else is configured.
_PLUGINS.addFilter(_keep_reason)
