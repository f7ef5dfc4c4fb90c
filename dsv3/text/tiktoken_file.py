"""Kimi's and Moonlight's `tiktoken.model` as a tokenizer of the `tokenizers` library, converted in memory.

The file lists byte strings with their ranks. Two adjacent tokens merge where their bytes together have a rank, the
lowest first. The library needs pairs instead of ranks: all that make a token, in the order of its rank. The pattern
that splits text before that is a literal in the model's own `tokenization_*.py`, which is parsed. No code from the
directory is run.
"""

import ast
import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from dsv3.files import open_regular, read_json

FILE = "tiktoken.model"
_MAX_BYTES = 2**26
MAX_TOKEN_BYTES = 2**10
_RESERVED = 256  # ids after the ranks that the models reserve for special tokens
_LETTERS = r"\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}{_LETTERS}*[\p{{Ll}}\p{{Lm}}{_LETTERS}+{_ENDINGS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}{_LETTERS}+[\p{{Ll}}\p{{Lm}}{_LETTERS}*{_ENDINGS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""The pattern of Kimi-K2 and Moonlight, for directories without their code."""


class TokenizerError(ValueError):
    """The tokenizer's files are invalid, or a text cannot be encoded."""


def read_tiktoken(directory: Path, config: Mapping[str, Any], char_of_byte: Mapping[int, str]) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a directory with a tiktoken.model and the special tokens of tokenizer_config.json.

    Args:
      config: the content of tokenizer_config.json; its `added_tokens_decoder` names the ids after the ranks.
      char_of_byte: maps each byte to its character in a byte-level BPE vocabulary.

    Raises:
      TokenizerError: the file is damaged, its ranks have gaps, or a special token has an id out of range.
    """
    ranks = read_ranks(directory / FILE)
    try:
        tokenizer = byte_pairs(ranks, own_pattern(directory) or _PATTERN, char_of_byte)
    except TokenizerError as error:
        raise TokenizerError(f"{directory}: {error}") from None
    tokenizer.add_tokens(list(_special_tokens(config, len(ranks))))
    return tokenizer


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises TokenizerError where there is none."""
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected an object, found {type(value).__name__}")
    return value


def byte_pairs(
    ranks: Mapping[bytes, int], pattern: str, char_of_byte: Mapping[int, str], special: Sequence[str] = ()
) -> tokenizers.Tokenizer:
    """Returns byte-level BPE that merges by `ranks` within the parts that `pattern` splits text into.

    Ids are those of the `special` tokens, from 0 on, and then the ranks. Raises TokenizerError for an invalid
    pattern, and for a special token that is also an ordinary one.
    """
    texts = {token: "".join(map(char_of_byte.__getitem__, token)) for token in ranks}
    if both := sorted(set(special) & set(texts.values())):
        raise TokenizerError(f"the special token {both[0]!r} is also an ordinary token")
    vocabulary = {token: number for number, token in enumerate(special)}
    vocabulary |= {texts[token]: len(special) + rank for token, rank in ranks.items()}
    merges = [(texts[left], texts[right]) for left, right in pairs(ranks)]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    try:
        cut = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"the pattern that splits text is invalid: {error}") from None
    whole_pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, whole_pieces])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def read_ranks(path: Path) -> dict[bytes, int]:
    """Returns the byte strings of a tiktoken.model with their ranks, in the order of these.

    Raises:
      TokenizerError: the file is invalid or too long, or its ranks are not 0, 1, 2 and so on.
    """
    try:
        with open_regular(path) as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise TokenizerError(f"{path}: is longer than {_MAX_BYTES} bytes")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(filter(None, content.splitlines())):
        token, rank = _line(path, line)
        if rank != number or token in ranks:
            raise TokenizerError(f"{path}: line {number + 1} has rank {rank}, or a duplicate token")
        ranks[token] = rank
    require_all_bytes(path, ranks)
    return ranks


def require_all_bytes(path: Path, ranks: Mapping[bytes, int]) -> None:
    """Raises TokenizerError where a single byte has no rank: text with it could not be encoded."""
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise TokenizerError(f"{path}: {len(missing)} single bytes have no rank, such as {missing[0]}")


def _line(path: Path, line: bytes) -> tuple[bytes, int]:
    token, _, rank = line.partition(b" ")
    try:
        read = base64.b64decode(token, validate=True), int(rank)
    except (binascii.Error, ValueError):
        raise TokenizerError(f"{path}: {line[:80]!r} is not a token in base64 with its rank") from None
    if not 0 < len(read[0]) <= MAX_TOKEN_BYTES:
        raise TokenizerError(f"{path}: a token has {len(read[0])} bytes, not 1 to {MAX_TOKEN_BYTES}")
    return read


def pairs(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yields all pairs of tokens that form a token, in the order of its rank, of one token the lowest ranks first."""
    for token in ranks:
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        made = [(ranks[left], ranks[right], left, right) for left, right in cuts if left in ranks and right in ranks]
        for *_, left, right in sorted(made):
            yield left, right


def own_pattern(directory: Path) -> str | None:
    """Returns the literal `pat_str` of the model's tokenization_*.py; None without one."""
    for path in sorted(directory.glob("tokenization_*.py")):
        try:
            with open_regular(path) as file:
                tree = ast.parse(file.read(2**20))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        assigned = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
        found = (_literal(node.value) for node in assigned if "pat_str" in map(ast.unparse, node.targets))
        if (pattern := next(filter(None, found), None)) is not None:
            return pattern
    return None


def _literal(node: ast.expr) -> str | None:
    """Returns a string literal, or `"|".join([...])` of literals; None for anything else."""
    try:
        match node:
            case ast.Call(func=ast.Attribute(value=separator, attr="join"), args=[parts, *_]):
                value = ast.literal_eval(separator).join(ast.literal_eval(parts))
            case _:
                value = ast.literal_eval(node)
    except (ValueError, TypeError, AttributeError):
        return None
    return value if isinstance(value, str) else None


def _special_tokens(config: Mapping[str, Any], first: int) -> Iterator[AddedToken]:
    """Yields the special tokens from the id `first` on; those without a text are named as in the models' code."""
    named = config.get("added_tokens_decoder") or {}
    if not isinstance(named, dict):
        raise TokenizerError("tokenizer_config.json: added_tokens_decoder is not an object")
    wrong = [i for i in named if not (isinstance(i, str) and i.isdigit() and first <= int(i) < first + _RESERVED)]
    if wrong:
        raise TokenizerError(
            f"tokenizer_config.json: special token {wrong[0]!r} is not an id from {first} to {first + _RESERVED - 1}"
        )
    for i in range(first, first + _RESERVED):
        given = named.get(str(i))
        entry = given if isinstance(given, dict) else {}
        content = entry.get("content")
        name = content if isinstance(content, str) and content else f"<|reserved_token_{i}|>"
        yield AddedToken(name, normalized=False, special=entry.get("special") is not False)
