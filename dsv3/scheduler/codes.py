"""What a sampler gives for a place where no token of the vocabulary stands, in descending order."""

NOT_FINITE = -1
"""Sampled for a row whose logits are not finite."""
NOTHING = -2
"""Fills a row of several tokens behind those that were accepted, where there was a draft.

It stands first in a row that shall not sample: of padding, or of a step that is computed again."""
UNDRAFTED = -3
"""Does so where there was none."""
