"""Failures of an instance, and how they are reported to clients. No jax: API servers import it."""


class ClusterError(ValueError):
    """The instance cannot start or continue; the message names the process at fault, and is safe to show to clients."""


class KernelCheckError(ValueError):
    """The kernel checks cannot run, or a kernel failed its check and has no fallback."""


def public_text(error: BaseException) -> str:
    """Returns the text of a failure for clients: other messages may contain a path or a part of a prompt."""
    return str(error) if isinstance(error, ClusterError) else type(error).__name__
