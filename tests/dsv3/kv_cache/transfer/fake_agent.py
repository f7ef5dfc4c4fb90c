"""A NIXL agent within one process: the methods of `transfer.nixl.Agent`, over registered memory."""

import ctypes
import itertools
from collections.abc import Callable

_names = itertools.count()
_known: dict[bytes, "FakeAgent"] = {}


class FakeAgent:
    """Reads at the first `check_xfer_state`, after a call of `begins`, whose exception ends the transfer.

    While `hangs`, transfers stay in progress.
    """

    def __init__(self) -> None:
        self.name = f"agent {next(_names)}"
        self.registered: list[tuple[int, int]] = []
        self.remotes: dict[str, FakeAgent] = {}
        self.is_dead = self.hangs = False
        self.begins: Callable[[], None] = lambda: None
        _known[self.name.encode()] = self

    def register_memory(self, reg_list, mem_type: str) -> None:
        assert mem_type == "DRAM"
        self.registered += [(address, size) for address, size, _, _ in reg_list]

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        other = _known[metadata]
        self.remotes[other.name] = other
        return other.name

    def remove_remote_agent(self, agent: str) -> None:
        del self.remotes[agent]

    def get_xfer_descs(self, descs, mem_type: str):
        assert mem_type == "DRAM" and all(device == 0 for *_, device in descs)
        return descs

    def initialize_xfer(self, operation: str, local, remote, agent: str, message: bytes):
        assert operation == "READ" and message == b""
        for mine, theirs in zip(local, remote, strict=True):
            assert mine[1] == theirs[1]
            self._check(mine)
            self.remotes[agent]._check(theirs)
        return {
            "from": self.remotes[agent],
            "pieces": list(zip(local, remote, strict=True)),
            "done": False,
            "is_released": False,
        }

    def _check(self, piece) -> None:
        address, size, _ = piece
        if not any(start <= address and address + size <= start + length for start, length in self.registered):
            raise KeyError("NIXL_ERR_NOT_FOUND")

    def transfer(self, handle) -> str:
        assert not handle["is_released"]
        return "PROC"

    def check_xfer_state(self, handle) -> str:
        assert not handle["is_released"]
        if handle["done"]:
            return "DONE"
        if self.hangs:
            return "PROC"
        self.begins()
        if handle["from"].is_dead:
            raise ConnectionError("NIXL_ERR_REMOTE_DISCONNECT")
        for (here, size, _), (there, _, _) in handle["pieces"]:
            ctypes.memmove(here, there, size)
        handle["done"] = True
        return "DONE"

    def release_xfer_handle(self, handle) -> None:
        assert handle["done"]
        handle["is_released"] = True
