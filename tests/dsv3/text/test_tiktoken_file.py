"""A tiktoken.model becomes a tokenizer with the ids of tiktoken itself."""

import base64
import json
import string
from pathlib import Path

import pytest
import tiktoken
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from dsv3.text import tiktoken_file
from dsv3.text.chat_template import ChatTemplate
from dsv3.text.tiktoken_file import own_pattern, read_ranks
from dsv3.text.tokenizer import Tokenizer, TokenizerError, TokenizerNotFound, _to_bytes

CORPUS = [
    "def add(x, y):\n        return x + y\n\n\nclass A:\n    pass\r\n",
    "It's what they'll say: WE'RE 1234567 times 89% done, don't we? " + " " * 20,
    "数学是研究数量、结构以及空间等概念的一门学科。日本語のテキスト 한국어 héllo wörld 🙂🙂 ñandú",
    "\t\tindented\t\ttext   with   runs    of     spaces \n \n  \n",
]
NAMED = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_middle|>": 17, "<think>": 22}
TEMPLATE = (
    "{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>"
    "{%- endif -%}{%- for message in messages -%}<|im_user|>{{ message.name or message.role }}<|im_middle|>"
    "{{ message.content }}<|im_end|>{%- endfor -%}"
)


def trained() -> dict[bytes, int]:
    """Ranks as tiktoken has them: single bytes first, and then what a trainer merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(tokenizers.Regex(tiktoken_file._PATTERN), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, whole])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    ordered = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return {_to_bytes(token): rank for token, rank in ordered}


def write(directory: Path, ranks: dict[bytes, int], **config: object) -> Path:
    directory.mkdir(exist_ok=True)
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items()]
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    first = len(ranks)
    named = {str(first + i): {"content": name, "special": name != "<think>"} for name, i in NAMED.items()}
    settings = {"added_tokens_decoder": named, "bos_token": "[BOS]", "eos_token": "[EOS]", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | config))
    return directory


RANKS = trained()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, tiktoken.Encoding]:
    directory = write(tmp_path_factory.mktemp("kimi"), RANKS)
    names = {i: name for name, i in NAMED.items()}
    first = len(RANKS)
    special = {names.get(i, f"<|reserved_token_{first + i}|>"): first + i for i in range(256)}
    oracle = tiktoken.Encoding("kimi", pat_str=tiktoken_file._PATTERN, mergeable_ranks=RANKS, special_tokens=special)
    return Tokenizer.from_directory(directory), oracle


PIECES = [
    *CORPUS,
    *NAMED,
    *("<|reserved_token_9999|>", "'ſ", "I'LL", "ß's", "'tis", "\x00", "\u0085", "\x0b", "\u3000", "\u200b", "\ufeff"),
    *("  \r\n\r\n x", "𝟘𝟙𝟚𝟛", "Ⅷ", "ΑΒγ", "ǅ", "a\u0301\u0301", "々〆", "𠀀", "１２３４", "\U0001f3f3\ufe0f\u200d"),
]
TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(alphabet=" \n\r\t'sStTlLdD9aA文", max_size=40),
    st.lists(st.sampled_from(PIECES), max_size=4).map("".join),
)


@settings(deadline=None, max_examples=400)
@given(TEXTS)
@example(" " * 300)
@example("\n" * 100 + " " * 77 + "x")
@example("a" * 500)
@example(string.printable * 3)
@example("".join(map(chr, range(1, 0x3000))))
def test_ids_are_those_of_tiktoken(pair: tuple[Tokenizer, tiktoken.Encoding], text: str) -> None:
    ours, oracle = pair
    if any(0xD800 <= ord(c) < 0xE000 for c in text):
        return
    ids = oracle.encode(text, allowed_special="all")
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_have_the_models_ids(pair: tuple[Tokenizer, tiktoken.Encoding]) -> None:
    ours, _ = pair
    first = len(RANKS)
    assert (ours.bos_token_id, ours.eos_token_id) == (first, first + 1)
    assert ours.vocab_size == first + 256
    assert ours.encode("[BOS]x<|im_end|>")[::2] == [first, first + 2], (
        "text alone gets no [BOS], as in the models' code"
    )
    assert first + 22 not in ours.special_token_ids
    assert first + 100 in ours.special_token_ids
    hiding = ours.hiding_special_tokens()
    assert len(hiding.encode("<|im_end|>")) > 1
    assert hiding.encode(hiding.markers.hide("<|im_end|>")) == [first + 2]


def test_the_chat_template_of_the_directory(pair: tuple[Tokenizer, tiktoken.Encoding]) -> None:
    ours, oracle = pair
    assert ours.chat_template is not None
    template = ChatTemplate(ours.chat_template, ours.special_tokens)
    tool = {"type": "function", "function": {"name": "f"}}
    text = template.render([{"role": "user", "content": "It's 数学"}], tools=[tool], add_generation_prompt=False)
    assert text.startswith('<|im_system|>tool_declare<|im_middle|>[{"type":"function","function":{"name":"f"}}]')
    assert text.endswith("<|im_user|>user<|im_middle|>It's 数学<|im_end|>")
    assert ours.encode(text) == oracle.encode(text, allowed_special="all")


def test_the_pattern_is_the_models_own(tmp_path: Path) -> None:
    code = 'import os\nclass T:\n    pat_str = "|".join([r"""\\p{N}""", r"[^\\p{N}]+"])\nos.abort()\n'
    (write(tmp_path, RANKS) / "tokenization_kimi.py").write_text(code)
    assert own_pattern(tmp_path) == r"\p{N}|[^\p{N}]+"
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.decode([ours.encode("12")[0]]) == "1"
    for odd in ("pat_str = f()", "pat_str = 5", "pat_str = ''.join(x)", "(", "pat_str = '('"):
        (tmp_path / "tokenization_kimi.py").write_text(odd)
        assert own_pattern(tmp_path) in (None, "(")
    with pytest.raises(TokenizerError, match="pattern"):
        Tokenizer.from_directory(tmp_path)


GOOD = base64.b64encode(b"a").decode()


@pytest.mark.parametrize(
    "content, text",
    [
        (b"", "256 single bytes"),
        (b"!!! 0\n", "not a token in base64"),
        (f"{GOOD} x\n".encode(), "not a token in base64"),
        (f"{GOOD} 1\n".encode(), "rank 1"),
        (f"{GOOD} 0\n{GOOD} 1\n".encode(), "duplicate"),
        (b" 0\n", "0 bytes"),
        (base64.b64encode(b"a" * 2000) + b" 0\n", "2000 bytes"),
        (b"\xff\xfe\x00" * 50, "not a token in base64"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=text):
        read_ranks(tmp_path / "tiktoken.model")
    with pytest.raises(TokenizerError, match=text):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("named", [{"5": {"content": "x"}}, {"x": {}}, [], {"99999999": {}}])
def test_special_tokens_out_of_range_are_refused(tmp_path: Path, named: object) -> None:
    directory = write(tmp_path, RANKS, added_tokens_decoder=named)
    if named == []:
        assert Tokenizer.from_directory(directory).bos_token_id is None
        return
    with pytest.raises(TokenizerError, match=r"added_tokens_decoder|special token"):
        Tokenizer.from_directory(directory)


def test_a_directory_without_either_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerNotFound, match=r"tiktoken\.model"):
        Tokenizer.from_directory(tmp_path)
