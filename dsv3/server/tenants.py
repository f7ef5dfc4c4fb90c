"""API keys and tenants: each key belongs to a tenant, whose name labels logs and metrics.

Keys are stored as digests. The key file has a key per line, after an optional name:

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
"""The tenant that, among several, may use routes that concern all tenants, such as metrics."""

_MAX_FILE_BYTES = 2**19
_MIN_NAMED_KEY = 16  # also detects a key before a name
_NAME = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(rb"[\x21-\x7e]+")


class Tenant(msgspec.Struct, frozen=True):
    """The owner of a key. `digest` is the key's, empty for a removed key; `salt` goes into prefix keys.

    Both are derived from the key and not from the name, since a name may get another key.
    """

    name: str
    digest: bytes
    salt: str


class Tenants:
    """The tenants of a server at fixed indices, including removed ones; without tenants no key is required."""

    def __init__(self, tenants: Sequence[Tenant] = ()):
        self.replace(tenants)

    def replace(self, tenants: Sequence[Tenant]) -> None:
        """Replaces the tenants; existing names must keep their indices."""
        self.all = tuple(tenants)
        self._indices = {tenant.name: index for index, tenant in enumerate(self.all)}

    @property
    def has_several(self) -> bool:
        return sum(bool(tenant.digest) for tenant in self.all) > 1

    def index_of(self, tenant: Tenant) -> int:
        """Returns the index of a tenant's name, which is that of its counters."""
        return self._indices[tenant.name]

    def find(self, key: bytes) -> Tenant | None:
        """Returns the tenant with that key, in time independent of the keys: compares all of them."""
        digest, found = _digest(key), None
        for tenant in self.all:
            if hmac.compare_digest(digest, tenant.digest):
                found = tenant
        return found


def load_tenants(options: ServerOptions) -> tuple[Tenant, ...]:
    """Returns the tenants that a server's options name; raises ValueError, whose text contains no part of a key."""
    if options.api_key_file is not None:
        try:
            return _read(options.api_key_file)
        except (OSError, ValueError) as error:
            raise ValueError(f"api_key_file: {error}") from None
    if options.api_key is None:
        return ()
    if not _KEY.fullmatch(options.api_key.encode()):
        raise ValueError("api_key: expected printable ASCII without blanks, and not empty")
    return (_tenant(b"key1", options.api_key.encode()),)


def reload_tenants(options: ServerOptions, old: Sequence[Tenant]) -> tuple[Tenant, ...]:
    """Returns the tenants of the current key file, with the old ones at their indices; raises ValueError."""
    if not os.path.isfile(options.api_key_file or ""):  # a pipe can be read only once, and would block
        raise ValueError("api_key_file: not a regular file, which a reload needs")
    found = {tenant.name: tenant for tenant in load_tenants(options)}
    kept = [found.pop(tenant.name, Tenant(tenant.name, b"", "")) for tenant in old]
    if (count := len(kept) + len(found)) > MAX_TENANTS:
        raise ValueError(f"api_key_file: {count} names since the start, the limit is {MAX_TENANTS}; restart the server")
    return (*kept, *found.values())


def cache_salt(isolation: Isolation, tenant: Tenant | None, given: str | None) -> str:
    """Returns the salt of a request's prefix keys: the tenant's, by `isolation`, then the client's.

    A client's salt contains no NUL, so it cannot form another tenant's.
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
    """Yields line number, name and key of each entry; a key without a name is named after its line, such as key3."""
    for number, line in enumerate(read_secret(path, _MAX_FILE_BYTES).splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith(b"#"):
            continue
        *name, key = fields
        if len(name) > 1 or not _KEY.fullmatch(key) or not all(map(_NAME.fullmatch, name)):
            text = "expected KEY or NAME KEY, the key of printable ASCII, the name of letters, digits and . _ -"
            raise ValueError(f"{path}: line {number}: {text}")
        if name and len(key) < _MIN_NAMED_KEY:
            raise ValueError(
                f"{path}: line {number}: expected a key of at least {_MIN_NAMED_KEY} characters after a name"
            )
        yield number, name[0] if name else b"key%d" % number, key


def _tenant(name: bytes, key: bytes) -> Tenant:
    return Tenant(name.decode(), _digest(key), _digest(b"dsv3 cache salt\0" + key).hex())


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
