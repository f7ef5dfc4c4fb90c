"""Mistral's `tekken.json` as a tokenizer of the `tokenizers` library, converted in memory.

The file has the pattern that splits text, byte strings with their ranks, and special tokens. Special tokens have the
ids from 0 on, as many as the file says, and the ranks follow, up to the vocabulary size that the file states.
"""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from dsv3.text.tiktoken_file import MAX_TOKEN_BYTES, TokenizerError, byte_pairs, read_object, require_all_bytes

FILE = "tekken.json"
CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
"""Defaults for `tokenizer_config.json`, which is seldom there: Mistral's code begins each text with <s>."""

_MAX_TOKENS = 2**20


def read_tekken(directory: Path, char_of_byte: Mapping[int, str]) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a directory with a tekken.json.

    `char_of_byte` maps each byte to its character in a byte-level BPE vocabulary.

    Raises:
      TokenizerError: the file is damaged, its ranks have gaps, or a special token is out of range.
    """
    path = directory / FILE
    content = read_object(path)
    settings = content.get("config")
    if not isinstance(settings, dict) or not isinstance(settings.get("pattern"), str):
        raise TokenizerError(f"{path}: config has no pattern")
    size, count = (_number(path, settings, name) for name in ("default_vocab_size", "default_num_special_tokens"))
    if not 0 < count < size:
        raise TokenizerError(f"{path}: {count} special tokens do not fit a vocabulary of {size}")
    ranks = _ranks(path, content.get("vocab"), size - count)
    special = _special_tokens(path, content.get("special_tokens"), count)
    try:
        tokenizer = byte_pairs(ranks, settings["pattern"], char_of_byte, special)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=True) for marker in special])
    return tokenizer


def _number(path: Path, settings: Mapping[str, Any], name: str) -> int:
    value = settings.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_TOKENS:
        raise TokenizerError(f"{path}: config.{name} is {value!r}, expected an integer up to {_MAX_TOKENS}")
    return value


def _ranks(path: Path, entries: Any, count: int) -> dict[bytes, int]:
    """Returns the first `count` byte strings with their ranks."""
    if not isinstance(entries, list) or len(entries) < count:
        raise TokenizerError(f"{path}: vocab is not a list of {count} or more tokens")
    ranks: dict[bytes, int] = {}
    for number, entry in enumerate(entries[:count]):
        token = _token(path, number, entry)
        if token in ranks:
            raise TokenizerError(f"{path}: token {number} is a duplicate")
        ranks[token] = number
    require_all_bytes(path, ranks)
    return ranks


def _token(path: Path, number: int, entry: Any) -> bytes:
    """Returns the bytes of an entry of the vocabulary."""
    try:
        rank, token = entry["rank"], base64.b64decode(entry["token_bytes"], validate=True)
    except (KeyError, TypeError, ValueError, binascii.Error):
        raise TokenizerError(f"{path}: vocab[{number}] has no rank and token_bytes in base64") from None
    if rank != number or not 0 < len(token) <= MAX_TOKEN_BYTES:
        raise TokenizerError(f"{path}: vocab[{number}] has rank {rank!r} and {len(token)} bytes")
    return token


def _special_tokens(path: Path, entries: Any, count: int) -> list[str]:
    """Returns the special tokens of the ids 0 to `count` - 1; those without a text are named as in Mistral's code."""
    if not isinstance(entries, list):
        raise TokenizerError(f"{path}: special_tokens is not a list; files older than version 7 are not supported")
    special = {i: f"<SPECIAL_{i}>" for i in range(count)}
    for number, entry in enumerate(entries):
        rank, text = (entry.get("rank"), entry.get("token_str")) if isinstance(entry, dict) else (None, None)
        if not isinstance(rank, int) or isinstance(rank, bool) or rank not in special:
            raise TokenizerError(f"{path}: special_tokens[{number}] has rank {rank!r}, expected 0 to {count - 1}")
        if not isinstance(text, str) or not text:
            raise TokenizerError(f"{path}: special_tokens[{number}] has no token_str")
        special[rank] = text
    if len(set(special.values())) < count:
        raise TokenizerError(f"{path}: special_tokens has a duplicate")
    return list(special.values())
