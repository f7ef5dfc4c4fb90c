"""Logging of a server's processes; imports no jax."""

import logging
import os
import sys

_PLUGINS = logging.getLogger("jax._src.xla_bridge")
_MAX_ERRORS = 8
_errors: list[str] = []


def configure_logging() -> None:
    """Logs to standard error from INFO on; jax logs warnings only, through its own handler.

    A GPU plugin that does not start is logged in one line without traceback, or not at all with JAX_PLATFORMS=cpu.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("jax").setLevel(logging.WARNING)
    logging.getLogger("jax").propagate = False
    _PLUGINS.addFilter(_without_traceback)
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        _PLUGINS.setLevel(logging.CRITICAL)


def plugin_errors() -> str:
    """Returns jax's warnings about plugins that did not start, joined; "" without any."""
    return "; ".join(_errors)


def _without_traceback(record: logging.LogRecord) -> bool:
    record.msg, record.args = _text(record), ()
    record.exc_info = record.exc_text = None
    return True


def _record_error(record: logging.LogRecord) -> bool:
    if record.levelno >= logging.WARNING and (text := _text(record)) not in _errors and len(_errors) < _MAX_ERRORS:
        _errors.append(text)
    return True


def _text(record: logging.LogRecord) -> str:
    cause = record.exc_info[1] if record.exc_info else None
    return record.getMessage() if cause is None else f"{record.getMessage()}: {cause}"


# Not a handler: with one, Python's last-resort handler would print nothing in programs that configure no logging.
_PLUGINS.addFilter(_record_error)
