"""Encodes documents to token arrays on disk, and makes the batch of each training step.

A batch depends only on the step's number and the configuration, so a resumed run has the same data as an uninterrupted
one and saves no position.
"""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from training import corpus
from training.chat_pairs import chat_pairs
from training.config import TrainingConfig
from training.tokenizer import BOS_ID, EOS_ID, PAD_ID, encode_chat, train_tokenizer

PROMPT_END_EVERY = 400
"""Average distance in characters between two cuts of a document (`encode_document`)."""
_MAX_VOCAB = 2**16


@dataclasses.dataclass(frozen=True)
class Data:
    """Token streams `train` and `held_out`, [tokens], and conversations `chat`, [rows, sequence_length], all uint16.

    `held_out_bytes` is the length of the held-out text in UTF-8, for bits per byte.
    """

    tokenizer: Tokenizer
    train: np.ndarray
    held_out: np.ndarray
    chat: np.ndarray
    held_out_bytes: int


def prepare(directory: Path, config: TrainingConfig) -> Data:
    """Opens the tokenizer and token arrays in `directory`; the first call creates them from the standard library.

    Raises ValueError for a vocabulary whose ids need more than 16 bits, and where the arrays were made for another
    vocabulary or length of rows.
    """
    if config.model.vocab_size > _MAX_VOCAB:
        raise ValueError(f"vocab_size {config.model.vocab_size}: ids are kept in 16 bits, so at most {_MAX_VOCAB}")
    if not (directory / "data.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory, config)
    arrays = {name: np.load(directory / f"{name}.npy", mmap_mode="r") for name in ("train", "held_out", "chat")}
    facts = json.loads((directory / "data.json").read_text())
    for name, value in _made_for(config).items():
        if facts.get(name, value) != value:
            raise ValueError(f"{directory} was made for {name} {facts[name]}, not {value}; give another --output")
    return Data(
        Tokenizer.from_file(str(directory / "tokenizer.json")), **arrays, held_out_bytes=facts["held_out_bytes"]
    )


def _write(directory: Path, config: TrainingConfig) -> None:
    train, held_out = corpus.split_documents(corpus.documents(corpus.standard_library()))
    of_packages = corpus.package_texts(config.packages, held_out)
    tokenizer = train_tokenizer((doc.text for doc in train), config.model.vocab_size)
    tokenizer.save(str(directory / "tokenizer.json"))
    rng = np.random.default_rng(config.seed)
    texts = train * config.library_copies + [doc for docs in of_packages.values() for doc in docs]
    np.save(directory / "train.npy", encode_documents(tokenizer, texts, rng))
    np.save(directory / "held_out.npy", encode_documents(tokenizer, held_out, None))
    conversations = [encode_chat(tokenizer, *pair) for pair in chat_pairs(train)]
    np.save(directory / "chat.npy", pack(conversations, config.sequence_length, rng))
    facts = _made_for(config) | {
        "training_documents": len(train),
        "held_out_documents": [doc.name for doc in held_out],
        "training_bytes": _bytes(train),
        "held_out_bytes": _bytes(held_out),
        "conversations": len(conversations),
        "packages": {name: corpus.facts(name) | {"bytes": _bytes(docs)} for name, docs in of_packages.items()},
    }
    (directory / "data.json").write_text(json.dumps(facts, indent=1))


def _made_for(config: TrainingConfig) -> dict[str, int]:
    """Returns the settings that other token arrays would need."""
    return {"vocab_size": config.model.vocab_size, "sequence_length": config.sequence_length}


def _bytes(docs: list[corpus.Document]) -> int:
    return sum(len(doc.text.encode()) for doc in docs)


def encode_documents(tokenizer: Tokenizer, docs: list[corpus.Document], rng: np.random.Generator | None) -> np.ndarray:
    """Returns one stream of ids, uint16 [tokens], with eos after every document."""
    stream: list[int] = []
    for doc in docs:
        stream.extend(encode_document(tokenizer, doc.text, rng))
        stream.append(EOS_ID)
    return np.asarray(stream, np.uint16)


def encode_document(tokenizer: Tokenizer, text: str, rng: np.random.Generator | None) -> list[int]:
    """Returns the ids of `text`. With `rng` it is encoded in pieces that end after a space, as users' prompts often do.

    The tokenizer joins a space to the word after it. Without the cuts the model would never see a space as a separate
    token, and could not continue a prompt such as "def ".
    """
    blanks = [i + 1 for i in range(len(text) - 1) if text[i] == " " and not text[i + 1].isspace()] if rng else []
    if rng is None or not blanks:
        return tokenizer.encode(text, add_special_tokens=False).ids
    count = min(len(blanks), 1 + len(text) // PROMPT_END_EVERY)
    cuts = [0, *sorted(rng.choice(blanks, count, replace=False).tolist()), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
    return [i for e in tokenizer.encode_batch(pieces, add_special_tokens=False) for i in e.ids]


def pack(conversations: list[list[int]], length: int, rng: np.random.Generator) -> np.ndarray:
    """Shuffles conversations and packs them into padded rows of `length` ids; drops longer ones, cuts none."""
    rows: list[list[int]] = [[]]
    for index in rng.permutation(len(conversations)).tolist():
        ids = conversations[index]
        if len(ids) > length:
            continue
        if len(rows[-1]) + len(ids) > length:
            rows.append([])
        rows[-1].extend(ids)
    return np.asarray([row + [PAD_ID] * (length - len(row)) for row in rows], np.uint16)


def batch(data: Data, config: TrainingConfig, step: int) -> np.ndarray:
    """Returns the rows of training step `step`, int32 [batch_size, sequence_length]; every row begins with bos."""
    chat_step = step - (config.steps - config.chat_steps)
    chat_rows = round(config.batch_size * config.chat_fraction) if chat_step >= 0 else 0
    first = step * config.batch_size - max(chat_step, 0) * chat_rows
    rows = [text_row(data.train, config, first + i) for i in range(config.batch_size - chat_rows)]
    rows += [_chat_row(data.chat, config, chat_step * chat_rows + i) for i in range(chat_rows)]
    return np.stack(rows).astype(np.int32)


def text_row(stream: np.ndarray, config: TrainingConfig, index: int) -> np.ndarray:
    """Returns row `index` of an endless series of rows [sequence_length]; each epoch has a new order and offset.

    A row has consecutive documents separated by eos, without a mask, as in the DeepSeek-V3 report (4.1). Raises
    ValueError if the stream is shorter than one row.
    """
    width = config.sequence_length - 1
    per_epoch = (len(stream) - width) // width
    if per_epoch < 1:
        raise ValueError(f"{len(stream)} tokens are too few for rows of {config.sequence_length}")
    epoch, within = divmod(index, per_epoch)
    rng = np.random.default_rng((config.seed, epoch))
    offset = rng.integers(width)
    start = offset + rng.permutation(per_epoch)[within] * width
    return np.concatenate([[BOS_ID], stream[start : start + width]])


def _chat_row(chat: np.ndarray, config: TrainingConfig, index: int) -> np.ndarray:
    epoch, within = divmod(index, len(chat))
    return chat[np.random.default_rng((config.seed, 1, epoch)).permutation(len(chat))[within]]


def held_out_batches(data: Data, config: TrainingConfig, limit: int | None = None) -> list[np.ndarray]:
    """Returns all batches of full rows of the held-out stream, or `limit` batches spread evenly over it.

    Raises ValueError if the stream does not fill one batch.
    """
    width = config.sequence_length - 1
    rows = len(data.held_out) // width
    if rows < config.batch_size:
        raise ValueError(f"{len(data.held_out)} held-out tokens do not fill a batch of {config.batch_size} rows")
    table = data.held_out[: rows * width].reshape(rows, width)
    table = np.concatenate([np.full((rows, 1), BOS_ID), table], axis=1).astype(np.int32)
    count = rows // config.batch_size
    chosen = range(count) if limit is None or limit >= count else [i * count // limit for i in range(limit)]
    return [table[i::count][: config.batch_size] for i in chosen]
