"""The kinds of answers, by the paths under which clients ask for them."""

from dsv3.api.answers.answer import Answer
from dsv3.api.answers.chat import ChatAnswer
from dsv3.api.answers.completions import CompletionAnswer

KINDS: dict[str, type[Answer]] = {"/v1/chat/completions": ChatAnswer, "/v1/completions": CompletionAnswer}
