"""Hides from a process what only Linux has, as far as it can be hidden: put this directory in front on PYTHONPATH.

Python imports this before anything else. Names are removed from their modules, flags of `preadv` and a bound on
addresses are refused, and files under /proc, /sys and /dev/shm are not there. `sys.platform` stays: on macOS the
standard library needs modules that are not here.
"""

import fcntl
import mmap
import os
import resource
import select
import signal
import socket
import sys

_NAMES = {
    os: "O_DIRECT O_TMPFILE O_PATH O_NOATIME memfd_create eventfd pidfd_open posix_fadvise posix_fallocate fdatasync "
    "splice copy_file_range sched_getaffinity sched_setaffinity sched_setscheduler sched_param SCHED_IDLE SCHED_BATCH "
    "getrandom pipe2 unshare setns",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo",
    socket: "TCP_INFO TCP_USER_TIMEOUT SOCK_CLOEXEC SOCK_NONBLOCK MSG_CMSG_CLOEXEC MSG_NOSIGNAL SO_PEERCRED",
    select: "epoll",
    mmap: "MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_POPULATE_WRITE MAP_POPULATE MAP_HUGETLB",
    fcntl: "F_SETPIPE_SZ F_GETPIPE_SZ F_OFD_SETLK F_OFD_SETLKW F_ADD_SEALS",
    resource: "prlimit",
}
_HIDDEN = ("/proc", "/sys", "/dev/shm")


def _is_hidden(path: object) -> bool:
    text = os.fsdecode(path) if isinstance(path, str | bytes) else ""
    return any(text == root or text.startswith(f"{root}/") for root in _HIDDEN)


def _absent(path: object) -> FileNotFoundError:
    return FileNotFoundError(2, "hidden from this test", path)


def _refuse_open(event: str, arguments: tuple) -> None:
    if event in ("open", "os.listdir", "os.scandir") and _is_hidden(arguments[0]):
        raise _absent(arguments[0])


def _hiding_stat(real):
    def stat(path, **kwargs):
        if _is_hidden(path if isinstance(path, int) else os.fspath(path)):
            raise _absent(path)
        return real(path, **kwargs)

    return stat


def _plain_preadv(descriptor, buffers, offset, _real=os.preadv):
    return _real(descriptor, buffers, offset)


def _setrlimit(kind, limits, _real=resource.setrlimit):
    if kind == resource.RLIMIT_AS:  # an Apple process has reserved more addresses than it would ever be allowed
        raise ValueError("current limit exceeds maximum limit")
    _real(kind, limits)


for _module, _names in _NAMES.items():
    for _name in [*_names.split(), *(name for name in dir(_module) if _module is os and name.startswith("RWF_"))]:
        if hasattr(_module, _name):
            delattr(_module, _name)
os.preadv, resource.setrlimit = _plain_preadv, _setrlimit
os.stat, os.lstat = _hiding_stat(os.stat), _hiding_stat(os.lstat)
sys.addaudithook(_refuse_open)
