"""Options of a batch besides those of its engine; declared as in `dsv3.config.options`."""

import dataclasses
from typing import Any, Literal

from dsv3.config.declaration import check, option
from dsv3.scheduler.request import MAX_PRIORITY

ANSWER_FIELDS = ("reasoning", "finish_reason", "error", "prompt_tokens", "completion_tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The rows to ask and the servers to ask. Raises ValueError for invalid values."""

    prompt_column: str | None = option(
        None, "Ask the text in this column of each row; default for a table: the conversation in its column messages."
    )
    endpoint: Literal["/v1/chat/completions", "/v1/completions"] = option(
        "/v1/chat/completions", "Ask a table's rows here; with /v1/completions --prompt_column is the whole prompt."
    )
    body: dict[str, Any] | None = option(
        None, "Ask every row of a table with these fields, a JSON object such as '{\"max_tokens\": 64}'."
    )
    answer_column: str = option(
        "answer", "Write a row's answer to this column, and its other results to columns with this prefix."
    )
    work_dir: str | None = option(
        None, "Keep work in progress in this directory; default: OUTPUT.work, where OUTPUT is a local file."
    )
    server: tuple[str, ...] = option(
        (), "Have running servers at these URLs, separated by commas, answer; default: an engine of this process."
    )
    server_api_key_file: str | None = option(
        None, "Read the servers' API key from this file, which must not be readable by other users."
    )
    server_timeout: float = option(600.0, "Give up when no server has answered for this many seconds.", above=0)
    concurrency: int | None = option(
        None,
        "Send each server at most this many requests at a time; default: twice its max_num_seqs, or 64.",
        low=1,
    )
    priority: int | None = option(
        None,
        "Send requests with this priority, where lower is earlier; default: 100, and none to other engines' servers.",
        low=-MAX_PRIORITY,
        high=MAX_PRIORITY,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.body is not None and {"messages", "prompt", "n"} & self.body.keys():
            raise ValueError(f"body: {self.body!r} must not have messages, prompt or n: each row is one request")
        if not self.server:
            for name in ("server_api_key_file", "concurrency", "priority"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: {getattr(self, name)!r} needs server")

    @property
    def answer_columns(self) -> tuple[str, ...]:
        """The columns that a table gets."""
        return (self.answer_column, *(f"{self.answer_column}_{field}" for field in ANSWER_FIELDS))
