"""The address of a store of pages (`--kv_store`): a directory, or a bucket of an object store."""

import urllib.parse
from pathlib import Path

_OBJECT_SCHEMES = ("s3", "gs", "memory")
_SETTINGS = {"endpoint": "endpoint", "region": "aws_region"}  # of an S3 address: tensorstore's names


def check_address(address: str) -> None:
    """Raises ValueError for an invalid address."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme in _OBJECT_SCHEMES:
        if parts.scheme != "memory" and not parts.netloc:
            raise ValueError(f"{address!r} names no bucket; write {parts.scheme}://BUCKET/PREFIX")
        _check_settings(address, parts)
    elif directory_of(address) is None:
        known = ", ".join(f"{scheme}://" for scheme in ("file", *_OBJECT_SCHEMES))
        raise ValueError(f"{address!r} is neither an absolute directory nor an address that starts with {known}")


def directory_of(address: str) -> Path | None:
    """Returns the directory of an address, None for an object store."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(urllib.parse.unquote(parts.path))
    return Path(address) if not parts.scheme and address.startswith("/") else None


def location_of(address: str, namespace: str) -> str | dict[str, str]:
    """Returns the location of `namespace` for tensorstore: an address, or a driver's fields."""
    parts = urllib.parse.urlsplit(address)
    if not parts.query:
        return f"{address.rstrip('/')}/{namespace}/"
    path = f"{urllib.parse.unquote(parts.path).strip('/')}/{namespace}/".lstrip("/")
    settings = {_SETTINGS[name]: value for name, value in _settings(parts).items()}
    return {"driver": "s3", "bucket": parts.netloc, "path": path, **settings}


def _check_settings(address: str, parts: urllib.parse.SplitResult) -> None:
    """Raises ValueError unless the query is an S3 server's endpoint and region."""
    settings = _settings(parts)
    unknown = sorted(settings.keys() - (_SETTINGS.keys() if parts.scheme == "s3" else ()))
    if unknown or (parts.query and not settings):
        raise ValueError(f"{address!r} may end with ?endpoint=URL&region=NAME after s3://, and no more")
    if "endpoint" in settings and not settings["endpoint"].startswith(("http://", "https://")):
        raise ValueError(f"{address!r} has endpoint {settings['endpoint']!r}; it must start with http:// or https://")


def _settings(parts: urllib.parse.SplitResult) -> dict[str, str]:
    return dict(urllib.parse.parse_qsl(parts.query))
