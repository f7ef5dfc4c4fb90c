"""A vocabulary for the toy: a letter for each token, so that answers can be constrained by grammars."""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.dsv3.engine import toy

END = "<end>"
LETTERS = '{}[]":,-.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRS0123456789 '[: toy.POISON - 1]


def tokenizer() -> tokenizers.Tokenizer:
    """Token 0 ends, token i is letter i - 1; the last one, which the toy never generates, is not a token."""
    written = {letter: "Ġ" if letter == " " else letter for letter in LETTERS}
    vocab = {END: toy.EOS} | {written[letter]: i for i, letter in enumerate(LETTERS, 1)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(END, special=True)])
    return backend


def write(directory: Path) -> Path:
    """Writes its `tokenizer.json` and returns the path."""
    path = directory / "tokenizer.json"
    tokenizer().save(str(path))
    return path


def text(tokens: list[int]) -> str:
    """The text of an answer's tokens, without its end."""
    return "".join(LETTERS[token - 1] for token in tokens if token != toy.EOS)
