"""Failures of an instance, and what clients may hear of them."""


class ClusterError(ValueError):
    """The instance cannot start or go on; the message says which process is the cause, and is fit for clients."""


class KernelCheckError(ValueError):
    """Kernels were to be checked at the start, and the checks cannot run, or say what no other backend can mend."""


def public_text(error: BaseException) -> str:
    """Returns what clients may hear of a failure: other texts may carry a path or a part of a prompt."""
    return str(error) if isinstance(error, ClusterError) else type(error).__name__
