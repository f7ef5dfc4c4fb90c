"""Mistral's `tekken.json` as a tokenizer of the `tokenizers` library, converted in memory.

The file has the pattern that cuts text, byte strings with their ranks, and markers. Markers have the ids from 0 on, as
many as the file says, and the ranks follow; of the ranks only the first count, up to the size that the file states.
"""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from dsv3.files import read_json
from dsv3.text.tiktoken_file import MAX_TOKEN_BYTES, TiktokenError, byte_pairs, require_all_bytes

FILE = "tekken.json"
CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
"""What `tokenizer_config.json` would say; such a directory seldom has one. Mistral's code begins each text with <s>."""

_MAX_TOKENS = 2**20


class TekkenError(ValueError):
    """A tekken.json cannot be used; the text says why."""


def read_tekken(directory: Path, char_of_byte: Mapping[int, str]) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a directory with a tekken.json.

    `char_of_byte` is how a vocabulary of byte-level BPE writes each byte.

    Raises:
      TekkenError: the file is damaged, its ranks have gaps, or a marker is not one that it has room for.
    """
    path = directory / FILE
    content = _read(path)
    settings = content.get("config")
    if not isinstance(settings, dict) or not isinstance(settings.get("pattern"), str):
        raise TekkenError(f"{path}: config has no pattern")
    size, count = (_number(path, settings, name) for name in ("default_vocab_size", "default_num_special_tokens"))
    if not 0 < count < size:
        raise TekkenError(f"{path}: {count} markers do not fit a vocabulary of {size}")
    ranks = _ranks(path, content.get("vocab"), size - count)
    markers = _markers(path, content.get("special_tokens"), count)
    try:
        tokenizer = byte_pairs(ranks, settings["pattern"], char_of_byte, markers)
    except TiktokenError as error:
        raise TekkenError(f"{path}: {error}") from None
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=True) for marker in markers])
    return tokenizer


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise TekkenError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise TekkenError(f"{path}: expected an object, found {type(content).__name__}")
    return content


def _number(path: Path, settings: Mapping[str, Any], name: str) -> int:
    value = settings.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_TOKENS:
        raise TekkenError(f"{path}: config.{name} is {value!r}, no number up to {_MAX_TOKENS}")
    return value


def _ranks(path: Path, entries: Any, count: int) -> dict[bytes, int]:
    """Returns the first `count` byte strings with their ranks."""
    if not isinstance(entries, list) or len(entries) < count:
        raise TekkenError(f"{path}: vocab is no list of {count} tokens or more")
    ranks: dict[bytes, int] = {}
    for number, entry in enumerate(entries[:count]):
        token = _token(path, number, entry)
        if token in ranks:
            raise TekkenError(f"{path}: token {number} stands twice")
        ranks[token] = number
    try:
        require_all_bytes(path, ranks)
    except TiktokenError as error:
        raise TekkenError(str(error)) from None
    return ranks


def _token(path: Path, number: int, entry: Any) -> bytes:
    """Returns the bytes of an entry of the vocabulary."""
    try:
        rank, token = entry["rank"], base64.b64decode(entry["token_bytes"], validate=True)
    except (KeyError, TypeError, ValueError, binascii.Error):
        raise TekkenError(f"{path}: vocab[{number}] has no rank and token_bytes in base64") from None
    if rank != number or not 0 < len(token) <= MAX_TOKEN_BYTES:
        raise TekkenError(f"{path}: vocab[{number}] has rank {rank!r} and {len(token)} bytes")
    return token


def _markers(path: Path, entries: Any, count: int) -> list[str]:
    """Returns the texts of the ids 0 to `count` - 1; those without one are called as Mistral's code does."""
    if not isinstance(entries, list):
        raise TekkenError(f"{path}: special_tokens is no list; files older than version 7 have none")
    markers = {i: f"<SPECIAL_{i}>" for i in range(count)}
    for number, entry in enumerate(entries):
        rank, text = (entry.get("rank"), entry.get("token_str")) if isinstance(entry, dict) else (None, None)
        if not isinstance(rank, int) or isinstance(rank, bool) or rank not in markers:
            raise TekkenError(f"{path}: special_tokens[{number}] has rank {rank!r}, none of 0 to {count - 1}")
        if not isinstance(text, str) or not text:
            raise TekkenError(f"{path}: special_tokens[{number}] has no token_str")
        markers[rank] = text
    if len(set(markers.values())) < count:
        raise TekkenError(f"{path}: special_tokens name a marker twice")
    return list(markers.values())
