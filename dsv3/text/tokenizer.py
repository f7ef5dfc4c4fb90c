"""The tokenizer of a model directory: text to token ids, token ids to bytes. No code from the directory is run.

Reads `tokenizer.json` (the `tokenizers` library's format), or Kimi's `tiktoken.model` or Mistral's `tekken.json`, and
`tokenizer_config.json` beside it. Byte-level BPE is what the DeepSeek family uses and the only kind supported: each
token stands for a fixed string of bytes, so that text can be produced token by token in linear time.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import tokenizers

from dsv3.files import IS_POINTER, is_pointer, open_regular
from dsv3.text import deepseek_v4, deepseek_v32, tekken_file, tiktoken_file
from dsv3.text.encoder_file import EncoderFileError, read_constants
from dsv3.text.special_tokens import SpecialTokens
from dsv3.text.tiktoken_file import TokenizerError

_PART_CHARS = 64 * 1024


class TokenizerNotFound(TokenizerError):
    """The model directory has none of `tokenizer.json`, `tiktoken.model` and `tekken.json`."""


class Tokenizer:
    """Byte-level BPE tokenizer with the special tokens and the chat template that came with it.

    `vocab_size` counts the ids the tokenizer knows (0 .. vocab_size - 1, with possible gaps); a model's logits may be
    wider. `markers` are the special tokens that it reads in their hidden form; none but for `hiding_special_tokens`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: dict[str, Any],
        chat_template: str | None = None,
        markers: SpecialTokens | None = None,
    ):
        _require_byte_level(backend)
        self.markers = markers or SpecialTokens()
        self._backend, self._config = backend, config
        self._backend.no_truncation()
        self._backend.no_padding()
        self.chat_template = chat_template
        self.special_tokens = _special_tokens(config)
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.max_token_chars = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        self._add_bos: bool | None = config.get("add_bos_token")
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    @classmethod
    def from_directory(cls, directory: str | Path) -> Self:
        """Reads the tokenizer of a Hugging Face model directory.

        Raises TokenizerNotFound where there is none, TokenizerError for files that cannot be used.
        """
        directory = Path(directory)
        backend = _from_json(directory / "tokenizer.json")
        config = _read_json(directory / "tokenizer_config.json")
        if backend is None:
            if (directory / tekken_file.FILE).is_file():
                config = tekken_file.CONFIG | config
            backend = _converted(directory, config)
        return cls(backend, config, _chat_template(directory, config))

    def hiding_special_tokens(self) -> "Tokenizer":
        """Returns a tokenizer with the same ids that encodes special tokens only in their hidden form.

        These are the added tokens, whether called special or not (`<think>` is not), except single characters and white
        space, which vocabularies add for other reasons. Raises TokenizerError for a vocabulary in which ordinary tokens
        form one, too.
        """
        added = self._backend.get_added_tokens_decoder()
        kept = [i for i, token in added.items() if token.special or (len(token.content) > 1 and token.content.strip())]
        markers = SpecialTokens([added[i].content for i in kept])
        try:
            backend = tokenizers.Tokenizer.from_str(_with_hidden(self._backend.to_str(), markers))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"tokenizer.json: special tokens cannot be hidden ({error})") from None
        hiding = Tokenizer(backend, self._config, self.chat_template, markers)
        for i in kept:
            if hiding.encode(markers.hidden[added[i].content], add_special_tokens=False) != [i]:
                raise TokenizerError(f"tokenizer.json: {added[i].content!r} cannot be distinguished from text")
        return hiding

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`.

        With `add_special_tokens` they begin with one beginning-of-sequence token.

        Releases the interpreter lock, so that a thread can encode a huge text. Raises TokenizerError for text that is
        not Unicode (a lone surrogate).
        """
        use_post_processor = add_special_tokens and self._add_bos is None
        try:
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=use_post_processor)
        except TypeError:
            raise TokenizerError("the text is not valid Unicode (a lone surrogate)") from None
        ids: list[int] = encoding.ids
        if not add_special_tokens or self.bos_token_id is None:
            return ids
        if self._add_bos and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids[1:] if ids[:2] == [self.bos_token_id] * 2 else ids

    def surely_exceeds(self, text: str, limit: int) -> bool:
        """Returns whether a text certainly has more than `limit` tokens, after encoding little more than those.

        The library needs 120 bytes of memory per byte of a text, so a text that is too long should not be encoded
        whole. Tokens are counted part by part. A cut breaks one token, into its bytes at worst, and a part has at least
        four times as many tokens. So the parts have less than twice the tokens of the whole.
        """
        count, length = 0, max(_PART_CHARS, 4 * self.max_token_chars**2)
        for start in range(0, len(text), length):
            count += len(self.encode(text[start : start + length], add_special_tokens=False))
            if count > 2 * limit:
                return True
        return False

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids; bytes that are not UTF-8 become U+FFFD, unknown ids are dropped."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in token_ids if i not in skipped).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Returns a token's bytes; empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = _to_bytes(self._backend.id_to_token(token_id) or "")
        return known

    def token_text(self, token_id: int) -> str | None:
        """Returns a token's text; None where its bytes are not whole characters of UTF-8."""
        try:
            return self._texts[token_id]
        except KeyError:
            try:
                text: str | None = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                text = None
            self._texts[token_id] = text
            return text

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token of the vocabulary; None for an unknown one."""
        return self._backend.token_to_id(token)

    def _id_of(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.id_of(self.markers.hidden.get(token, token))


def _byte_of_char() -> dict[str, int]:
    """Returns GPT-2's alphabet: printable Latin-1 bytes map to themselves, the others to U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
_CHAR_OF_BYTE = {byte: char for char, byte in _BYTE_OF_CHAR.items()}


def _from_json(path: Path) -> tokenizers.Tokenizer | None:
    """Reads a tokenizer.json; None without one."""
    if not path.is_file():
        return None
    try:
        with open_regular(path) as file:
            if is_pointer(file.peek(64)):
                raise ValueError(IS_POINTER)
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{path}: {error}") from None


def _converted(directory: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """Converts a tokenizer of another format."""
    if (directory / tiktoken_file.FILE).is_file():
        return tiktoken_file.read_tiktoken(directory, config, _CHAR_OF_BYTE)
    if (directory / tekken_file.FILE).is_file():
        return tekken_file.read_tekken(directory, _CHAR_OF_BYTE)
    files = f"tokenizer.json, {tiktoken_file.FILE} and {tekken_file.FILE}"
    raise TokenizerNotFound(f"{directory} has none of {files}: prompts must be token ids")


def _to_bytes(token: str) -> bytes:
    """Returns a token's bytes; a special token outside the alphabet is its own UTF-8, as in the library."""
    try:
        return bytes(_BYTE_OF_CHAR[c] for c in token)
    except KeyError:
        return token.encode()


def _with_hidden(source: str, markers: SpecialTokens) -> str:
    """Returns a tokenizer's JSON with special tokens in their hidden form."""
    parts, hidden = json.loads(source), markers.hidden
    for added in parts["added_tokens"]:
        added["content"] = hidden.get(added["content"], added["content"])
    parts["model"]["vocab"] = {hidden.get(token, token): i for token, i in parts["model"]["vocab"].items()}
    return json.dumps(parts)


def _require_byte_level(backend: tokenizers.Tokenizer) -> None:
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds != ["ByteLevel"]:
        raise TokenizerError(f"tokenizer.json: decoder {kinds} is not supported, only byte-level BPE (ByteLevel) is")


def _read_json(path: Path) -> dict[str, Any]:
    return tiktoken_file.read_object(path) if path.is_file() else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Returns `bos_token`, `eos_token` ..., which are strings or objects with a `content` field."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def encoder_note(directory: Path) -> str | None:
    """Returns what the model's encoder file gives its prompts, and what is refused without; None for other models.

    Raises TokenizerError for an invalid file.
    """
    config = _read_json(directory / "tokenizer_config.json")
    if _stored_template(directory, config) is not None or (own := _own_format(directory)) is None:
        return None
    try:
        refused = own.refused(read_constants(directory / own.ENCODER))
    except EncoderFileError as error:
        raise TokenizerError(str(error)) from None
    state = "found" if (directory / own.ENCODER).is_file() else "missing"
    without = f"; it has no text for {', '.join(refused)}: requests with one of these are refused" if refused else ""
    return f"message encoder: {own.ENCODER} {state}{without}"


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """Returns the chat template of a directory.

    DeepSeek-V3.2 and V4 have none: theirs is made of the texts of their encoder file.
    """
    if (stored := _stored_template(directory, config)) is not None or (own := _own_format(directory)) is None:
        return stored
    try:
        return own.chat_template(read_constants(directory / own.ENCODER))
    except EncoderFileError as error:
        raise TokenizerError(str(error)) from None


def _stored_template(directory: Path, config: dict[str, Any]) -> str | None:
    """Reads `chat_template.jinja`, else the template of `tokenizer_config.json`, "default" among several."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{file}: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _own_format(directory: Path) -> ModuleType | None:
    """Returns the module with the prompt format of a model whose checkpoint has an encoder in place of a template."""
    model_type = _read_json(directory / "config.json").get("model_type")
    return {"deepseek_v32": deepseek_v32, "deepseek_v4": deepseek_v4}.get(str(model_type))
