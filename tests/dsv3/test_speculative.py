"""`--speculative_config`: what it means, and what it refuses by field and value."""

import pytest

from dsv3.config.options import EngineOptions
from dsv3.config.speculative import SpeculativeConfig


def test_one_number_holds_for_every_size() -> None:
    config = SpeculativeConfig.from_json({"method": "mtp", "num_speculative_tokens": 2})
    assert config is not None
    assert [config.drafts(size) for size in (1, 4, 256)] == [2, 2, 2] and config.most_drafts == 2


def test_drafts_by_the_size_of_the_batch() -> None:
    ranges = [[1, 8, 3], [9, 64, 1], [65, 256, 0]]
    config = SpeculativeConfig.from_json({"method": "mtp", "num_speculative_tokens_per_batch_size": ranges})
    assert config is not None
    assert [config.drafts(size) for size in (1, 8, 9, 64, 65, 1000)] == [3, 3, 1, 1, 0, 0]


def test_the_default_is_one_draft_or_a_published_block() -> None:
    found = [SpeculativeConfig.from_json({"method": method}) for method in ("mtp", "ngram", "dspark")]
    assert [config and config.most_drafts for config in found] == [1, 1, 5]


def test_no_drafts_at_all_are_no_speculation() -> None:
    assert SpeculativeConfig.from_json({"method": "mtp", "num_speculative_tokens": 0}) is None
    assert EngineOptions(speculative_config={"method": "ngram", "num_speculative_tokens": 0}).speculative is None


@pytest.mark.parametrize(
    ("rates", "shares", "chances"),
    [
        (0.5, (0.5, 0.25, 0.125), (0.5, 0.5, 0.5)),
        ([0.8, 0.4, 0.4], (0.8, 0.4, 0.4), (0.8, 0.5, 1.0)),
        ([1, 0, 0], (1, 0, 0), (1, 0, 0)),
    ],
)
def test_synthetic_rates_are_shares_of_all_rows(rates, shares, chances) -> None:
    given = {"method": "mtp", "num_speculative_tokens": 3, "synthetic_acceptance_rates": rates}
    config = SpeculativeConfig.from_json(given)
    assert config is not None
    assert (config.synthetic_rates, config.synthetic_chances) == (shares, chances)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "method: None is not one of mtp, ngram, dspark"),
        ({"method": "eagle"}, "method: 'eagle' is not one of mtp, ngram, dspark"),
        ({"method": "mtp", "num_speculative_tokens": 4}, "num_speculative_tokens: 4 is not an integer from 0 to 3"),
        ({"method": "dspark", "num_speculative_tokens": 8}, "num_speculative_tokens: 8 is not an integer from 0 to 7"),
        ({"method": "mtp", "num_speculative_tokens": True}, "num_speculative_tokens: True is not an integer"),
        ({"method": "mtp", "draft_model": "x"}, "draft_model: there is no such field"),
        ({"method": "mtp", "num_speculative_tokens_per_batch_size": 3}, "3 is not a list of"),
        (
            {"method": "mtp", "num_speculative_tokens_per_batch_size": [[1, 4]]},
            r"\[1, 4\] is not \[first, last, drafts\]",
        ),
        (
            {"method": "mtp", "num_speculative_tokens_per_batch_size": [[1, 4, 1], [4, 8, 0]]},
            "4 is not an integer from 5",
        ),
        ({"method": "ngram", "prompt_lookup_min": 4}, "prompt_lookup_max: 3 is not an integer from 4 to 8"),
        ({"method": "mtp", "synthetic_acceptance_rates": 0.8}, r"\[0.8\]: a coin would make the text"),
        ({"method": "mtp", "synthetic_acceptance_rates": True}, "True is neither a number from 0 to 1"),
        ({"method": "mtp", "synthetic_acceptance_rates": [1.5]}, r"\[1.5\] is neither a number from 0 to 1"),
        ({"method": "mtp", "synthetic_acceptance_rates": [0.5, 0.5]}, r"\[0.5, 0.5\] are not 1 shares"),
        (
            {"method": "mtp", "num_speculative_tokens": 2, "synthetic_acceptance_rates": [0.5, 0.6]},
            r"\[0.5, 0.6\] are not 2 shares, one per draft, that never rise",
        ),
        (
            {"method": "mtp", "num_speculative_tokens": 1, "num_speculative_tokens_per_batch_size": [[1, 4, 1]]},
            "says it already",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_field_and_value(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"speculative_config: .*{message}"):
        EngineOptions(speculative_config=given)
