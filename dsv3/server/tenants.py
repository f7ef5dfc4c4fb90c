"""Who may use a server: each API key stands for a tenant, and logs and metrics call it by its name.

Keys are kept as digests. The file has a key per line, with a name before it if the operator gives one:

    # comment
    acme       sk-0c1f...
    operator   sk-77ab...
"""

import hashlib
import hmac
import os
import re
from collections.abc import Iterator, Sequence

import msgspec

from dsv3.config.server_options import Isolation, ServerOptions
from dsv3.files import read_secret

MAX_TENANTS = 1024
OPERATOR = "operator"
"""The tenant that may do what concerns all, where there are several: read the metrics, empty the cache."""

_MAX_FILE_BYTES = 2**19
_MIN_NAMED_KEY = 16  # also tells a name from a key, should somebody write them the other way round
_NAME = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(rb"[\x21-\x7e]+")


class Tenant(msgspec.Struct, frozen=True):
    """The holder of a key. `digest` is the key's, empty for a key that was withdrawn; `salt` goes into prefix keys.

    Both come from the key and not from the name, since names may move to other keys.
    """

    name: str
    digest: bytes
    salt: str


class Tenants:
    """The tenants of a server in their places, those that were withdrawn among them; without any, it is open to all."""

    def __init__(self, tenants: Sequence[Tenant] = ()):
        self.replace(tenants)

    def replace(self, tenants: Sequence[Tenant]) -> None:
        """Takes other tenants; those that there were keep their places."""
        self.all = tuple(tenants)
        self._indices = {tenant.name: place for place, tenant in enumerate(self.all)}

    @property
    def has_several(self) -> bool:
        """Whether more than one has a key."""
        return sum(bool(tenant.digest) for tenant in self.all) > 1

    def index_of(self, tenant: Tenant) -> int:
        """Returns where a tenant's counts lie: the place of its name."""
        return self._indices[tenant.name]

    def find(self, key: bytes) -> Tenant | None:
        """Returns the tenant with that key, in a time that says nothing of the keys: all of them are compared."""
        digest, found = _digest(key), None
        for tenant in self.all:
            if hmac.compare_digest(digest, tenant.digest):
                found = tenant
        return found


def load_tenants(options: ServerOptions) -> tuple[Tenant, ...]:
    """Returns the tenants that a server's options name; raises ValueError, which says no part of a key."""
    if options.api_key_file is not None:
        try:
            return _read(options.api_key_file)
        except (OSError, ValueError) as error:
            raise ValueError(f"api_key_file: {error}") from None
    if options.api_key is None:
        return ()
    if not _KEY.fullmatch(options.api_key.encode()):
        raise ValueError("api_key: a key is printable ASCII without blanks, and not empty")
    return (_tenant(b"key1", options.api_key.encode()),)


def reload_tenants(options: ServerOptions, old: Sequence[Tenant]) -> tuple[Tenant, ...]:
    """Returns the tenants of the key file as it is now, in the places of the old ones; raises ValueError."""
    if not os.path.isfile(options.api_key_file or ""):  # a pipe would block, and can be read only once
        raise ValueError("api_key_file: not a regular file")
    found = {tenant.name: tenant for tenant in load_tenants(options)}
    kept = [found.pop(tenant.name, Tenant(tenant.name, b"", "")) for tenant in old]
    if (count := len(kept) + len(found)) > MAX_TENANTS:
        raise ValueError(f"api_key_file: {count} names since the start, at most {MAX_TENANTS} are counted")
    return (*kept, *found.values())


def cache_salt(isolation: Isolation, tenant: Tenant | None, given: str | None) -> str:
    """Returns what a request's prefix keys start from: what the client gave, behind what it cannot choose.

    No salt of a client contains NUL, so none makes another tenant's.
    """
    if tenant is None or isolation == "none":
        return given or ""
    return f"{tenant.salt}\0{given or ''}"


def _read(path: str) -> tuple[Tenant, ...]:
    tenants: list[Tenant] = []
    lines: dict[str | bytes, int] = {}
    for number, name, key in _entries(path):
        tenant = _tenant(name, key)
        for what, value in (("name", tenant.name), ("key", tenant.digest)):
            if (first := lines.setdefault(value, number)) != number:
                raise ValueError(f"{path}: line {number} has the {what} of line {first}")
        tenants.append(tenant)
    if not 1 <= len(tenants) <= MAX_TENANTS:
        raise ValueError(f"{path}: {len(tenants)} keys, expected 1 to {MAX_TENANTS}")
    return tuple(tenants)


def _entries(path: str) -> Iterator[tuple[int, bytes, bytes]]:
    """Yields line number, name and key of each entry; a key without a name is called by its line: key3."""
    for number, line in enumerate(read_secret(path, _MAX_FILE_BYTES).splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith(b"#"):
            continue
        *name, key = fields
        if len(name) > 1 or not _KEY.fullmatch(key) or not all(map(_NAME.fullmatch, name)):
            text = "expected KEY or NAME KEY, the key of printable ASCII, the name of letters, digits and . _ -"
            raise ValueError(f"{path}: line {number}: {text}")
        if name and len(key) < _MIN_NAMED_KEY:
            raise ValueError(f"{path}: line {number}: a key of at least {_MIN_NAMED_KEY} characters follows its name")
        yield number, name[0] if name else b"key%d" % number, key


def _tenant(name: bytes, key: bytes) -> Tenant:
    return Tenant(name.decode(), _digest(key), _digest(b"dsv3 cache salt\0" + key).hex())


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
