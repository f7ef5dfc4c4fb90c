"""Batches: they depend only on the step, rows begin with bos, conversations are never cut."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.training.conftest import TOY
from training import data as training_data
from training.config import TrainingConfig
from training.data import Data
from training.tokenizer import BOS_ID, EOS_ID, PAD_ID, train_tokenizer


@pytest.fixture
def toy_config() -> TrainingConfig:
    return dataclasses.replace(TOY, batch_size=2)


@pytest.fixture
def prepared(library: Path, tmp_path: Path, toy_config: TrainingConfig) -> Data:
    return training_data.prepare(tmp_path / "data", toy_config)


def test_arrays_are_made_once_and_the_same_anywhere(
    prepared: Data, library: Path, tmp_path: Path, toy_config: TrainingConfig
) -> None:
    other = training_data.prepare(tmp_path / "elsewhere", toy_config)
    (library / "module1.py").write_text("changed = True\n")
    reopened = training_data.prepare(tmp_path / "data", toy_config)
    for name in ("train", "held_out", "chat"):
        np.testing.assert_array_equal(getattr(prepared, name), getattr(other, name))
        np.testing.assert_array_equal(getattr(prepared, name), getattr(reopened, name))


@pytest.mark.usefixtures("prepared")
def test_arrays_are_not_taken_for_those_of_another_configuration(tmp_path: Path, toy_config: TrainingConfig) -> None:
    """A run that ended before its first checkpoint leaves its arrays to the next one in the same directory."""
    other_words = dataclasses.replace(toy_config, model=dataclasses.replace(toy_config.model, vocab_size=300))
    with pytest.raises(ValueError, match="made for vocab_size 320, not 300"):
        training_data.prepare(tmp_path / "data", other_words)
    with pytest.raises(ValueError, match="made for sequence_length 32, not 64"):
        training_data.prepare(tmp_path / "data", dataclasses.replace(toy_config, sequence_length=64))


def test_a_vocabulary_that_needs_more_than_16_bits_is_refused_at_once(tmp_path: Path, toy_config: TrainingConfig):
    many = dataclasses.replace(toy_config, model=dataclasses.replace(toy_config.model, vocab_size=2**16 + 1))
    with pytest.raises(ValueError, match="vocab_size 65537: ids are kept in 16 bits"):
        training_data.prepare(tmp_path / "data", many)


def test_a_batch_depends_on_the_step_alone(prepared: Data, toy_config: TrainingConfig) -> None:
    first, again = (training_data.batch(prepared, toy_config, 1) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert first.dtype == np.int32
    assert (first[:, 0] == BOS_ID).all()
    assert not np.array_equal(first, training_data.batch(prepared, toy_config, 0))


def test_an_epoch_visits_every_window_once(toy_config: TrainingConfig) -> None:
    stream, width = np.arange(1000, dtype=np.uint16), toy_config.sequence_length - 1
    per_epoch = (1000 - width) // width
    for epoch in range(2):
        rows = [training_data.text_row(stream, toy_config, epoch * per_epoch + i)[1:] for i in range(per_epoch)]
        tokens = np.sort(np.concatenate(rows))
        np.testing.assert_array_equal(tokens, np.arange(tokens[0], tokens[0] + per_epoch * width))


def test_chat_steps_mix_conversations_and_continue_the_text(prepared: Data, toy_config: TrainingConfig) -> None:
    plain, mixed, last = (training_data.batch(prepared, toy_config, step) for step in (1, 2, 3))
    conversations = {row.tobytes() for row in prepared.chat.astype(np.int32)}
    assert [row.tobytes() in conversations for row in plain] == [False, False]
    assert [row.tobytes() in conversations for row in mixed] == [False, True]
    np.testing.assert_array_equal(mixed[0], training_data.text_row(prepared.train, toy_config, 4))
    np.testing.assert_array_equal(last[0], training_data.text_row(prepared.train, toy_config, 5))


def test_too_little_text_is_refused(toy_config: TrainingConfig) -> None:
    with pytest.raises(ValueError, match="too few for rows of 32"):
        training_data.text_row(np.arange(40, dtype=np.uint16), toy_config, 0)


def test_packing_cuts_no_conversation() -> None:
    conversations = [[BOS_ID, *range(10, 10 + n), EOS_ID] for n in (3, 5, 9, 2, 30, 1)]
    rows = training_data.pack(conversations, 16, np.random.default_rng(0))
    assert rows.shape[1] == 16
    found = [int(i) for row in rows for i in row if i != PAD_ID]
    kept = [c for c in conversations if len(c) <= 16]
    assert sorted(found) == sorted(i for c in kept for i in c)
    for row in rows:
        assert row[0] == BOS_ID
        assert row[row != PAD_ID][-1] == EOS_ID


def test_encoding_in_pieces_keeps_the_text_and_shows_prompt_ends() -> None:
    text = "def name(value):\n    return value + value\n" * 50
    tokenizer = train_tokenizer([text], 281)
    ids = training_data.encode_document(tokenizer, text, np.random.default_rng(0))
    assert tokenizer.decode(ids) == text
    blank = tokenizer.encode(" ", add_special_tokens=False).ids
    assert ids.count(blank[0]) >= 1
    assert training_data.encode_document(tokenizer, text, None).count(blank[0]) == 0


def test_held_out_batches_have_one_shape_and_spread_over_the_text(prepared: Data, toy_config: TrainingConfig) -> None:
    stream = Data(prepared.tokenizer, prepared.train, np.arange(2000, dtype=np.uint16), prepared.chat, 2000)
    every = training_data.held_out_batches(stream, toy_config)
    assert {b.shape for b in every} == {(2, 32)}
    assert len(training_data.held_out_batches(stream, toy_config, 3)) == 3
    rows = {row[1] for b in every for row in b}
    assert len(rows) == 2 * len(every)
    assert len(training_data.held_out_batches(stream, dataclasses.replace(toy_config, batch_size=1), None)) == 64
