"""`X-data-parallel-rank`: a router that knows the ranks' caches says where a request runs, as with vLLM."""

import re

from dsv3.server.answers.errors import invalid

RANK_HEADER = "x-data-parallel-rank"
_RANK = re.compile(r"[0-9]{1,6}")


def rank_of(header: str | None) -> int | None:
    """Returns the rank that a header names, None without one; ApiError 400 for what is no number.

    `dsv3.scheduler.prepare` knows which ranks there are.
    """
    if header is None:
        return None
    if not _RANK.fullmatch(header.strip()):
        raise invalid(f"{RANK_HEADER}: expected the number of a rank, counted from 0", RANK_HEADER)
    return int(header)
