"""The cache identity changes with everything that pages depend on."""

import dataclasses

from dsv3.config.identity import CacheIdentity, fingerprint, model_identity
from tests.dsv3.engine.toy import toy_config

IDENTITY = CacheIdentity(
    weights="w", tokenizer="t", model="m", cache_dtype="bfloat16", compute_dtype="float32", fp8="keep", page_size=64
)


def test_every_field_changes_the_fingerprint():
    changed = [
        dataclasses.replace(IDENTITY, **{field.name: "other" if isinstance(value, str) else value + 1})
        for field in dataclasses.fields(IDENTITY)
        for value in [getattr(IDENTITY, field.name)]
    ]
    prints = {fingerprint(each.text) for each in (IDENTITY, *changed)}
    assert len(prints) == 1 + len(changed)
    assert dataclasses.replace(IDENTITY).text == IDENTITY.text


def test_rotation_and_layers_change_the_model_identity():
    digests = {model_identity(toy_config(**changes)) for changes in ({}, {"rope_theta": 2.0}, {"num_hidden_layers": 2})}
    assert len(digests) == 3
