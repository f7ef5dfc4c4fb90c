"""A tekken.json becomes a tokenizer with tiktoken's ids for the same ranks, after Mistral's special tokens."""

import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import example, given, settings

from dsv3.text.tokenizer import Tokenizer, TokenizerError
from tests.dsv3.text.test_tiktoken_file import RANKS, TEXTS

NUM_SPECIAL = 20
NAMED = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 9: "[TOOL_CALLS]"}
UNUSED = 30
"""Tokens of the file beyond its stated size."""
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def content() -> dict[str, Any]:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in RANKS.items()
    ]
    return {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(vocab),
            "default_vocab_size": NUM_SPECIAL + len(vocab) - UNUSED,
            "default_num_special_tokens": NUM_SPECIAL,
            "version": "v13",
        },
        "vocab": vocab,
        "special_tokens": [{"rank": i, "token_str": text, "is_control": True} for i, text in NAMED.items()],
    }


def write(directory: Path, value: object) -> Path:
    (directory / "tekken.json").write_text(json.dumps(value))
    return directory


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, tiktoken.Encoding]:
    used = {token: rank for token, rank in RANKS.items() if rank < len(RANKS) - UNUSED}
    oracle = tiktoken.Encoding("mistral", pat_str=PATTERN, mergeable_ranks=used, special_tokens={})
    return Tokenizer.from_directory(write(tmp_path_factory.mktemp("mistral"), content())), oracle


@settings(deadline=None, max_examples=200)
@given(TEXTS)
@example("It's 12345 </p>\n\n//\r\n  x" + " " * 40)
@example("".join(map(chr, range(1, 0x1000))))
def test_ids_are_those_of_tiktoken_after_the_special_tokens(
    pair: tuple[Tokenizer, tiktoken.Encoding], text: str
) -> None:
    """Mistral's code encodes text with tiktoken, which has no special tokens, and adds their number to each id."""
    ours, oracle = pair
    if any(0xD800 <= ord(c) < 0xE000 for c in text) or any(marker in text for marker in NAMED.values()):
        return
    ids = [rank + NUM_SPECIAL for rank in oracle.encode_ordinary(text)]
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.encode(text) == [1, *ids]
    assert ours.decode(ids) == text


def test_special_tokens_have_the_first_ids(pair: tuple[Tokenizer, tiktoken.Encoding]) -> None:
    ours, oracle = pair
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
    assert ours.vocab_size == NUM_SPECIAL + len(RANKS) - UNUSED
    assert ours.special_token_ids == frozenset(range(NUM_SPECIAL))
    ids = [rank + NUM_SPECIAL for rank in oracle.encode_ordinary("It's")]
    assert ours.encode("[INST]It's[/INST]") == [1, 3, *ids, 4]
    assert ours.encode("<SPECIAL_19>", add_special_tokens=False) == [19]
    hiding = ours.hiding_special_tokens()
    assert not set(hiding.encode("[INST]</s>", add_special_tokens=False)) & set(range(NUM_SPECIAL))
    assert hiding.encode(hiding.markers.hide("[INST]"), add_special_tokens=False) == [3]


def test_a_tokenizer_config_overrides_the_defaults(tmp_path: Path) -> None:
    (write(tmp_path, content()) / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert Tokenizer.from_directory(tmp_path).encode("[INST]") == [3]


def changed(path: str, value: object) -> Any:
    """The content with the value at `path` changed."""
    whole = {"content": copy.deepcopy(content())}
    *above, last = path.split("/")
    at: Any = whole
    for key in above:
        at = at[int(key) if isinstance(at, list) else key]
    at[int(last) if isinstance(at, list) else last] = value
    return whole["content"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("content", [], "expected an object"),
        ("content/config", None, "no pattern"),
        ("content/config/pattern", "(", "pattern that splits text"),
        ("content/config/default_vocab_size", True, "default_vocab_size is True"),
        ("content/config/default_vocab_size", 10**9, "expected an integer up to"),
        ("content/config/default_num_special_tokens", 10**6, "do not fit a vocabulary"),
        ("content/vocab", {}, "not a list of"),
        ("content/vocab/5", {"rank": 5}, r"vocab\[5\] has no rank"),
        ("content/vocab/5", 7, r"vocab\[5\] has no rank"),
        ("content/vocab/5/token_bytes", "!", r"vocab\[5\] has no rank"),
        ("content/vocab/5/token_bytes", "", r"vocab\[5\] has rank 5 and 0 bytes"),
        ("content/vocab/5/rank", 6, r"vocab\[5\] has rank 6"),
        ("content/vocab/300/token_bytes", "QQ==", "token 300 is a duplicate"),
        ("content/vocab/5/token_bytes", "QUJDREVG", "single bytes have no rank"),
        ("content/special_tokens", None, "special_tokens is not a list"),
        ("content/special_tokens/0/rank", NUM_SPECIAL, "expected 0 to 19"),
        ("content/special_tokens/0/token_str", "", "has no token_str"),
        ("content/special_tokens/0/token_str", "<s>", "has a duplicate"),
        ("content/special_tokens/0/token_str", "a", "is also an ordinary token"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, path: str, value: object, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_directory(write(tmp_path, changed(path, value)))


def test_deeply_nested_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_bytes(b"[" * 100_000)
    with pytest.raises(TokenizerError, match=r"tekken\.json: nested too deeply"):
        Tokenizer.from_directory(tmp_path)
