"""The kinds of answers, by the paths under which clients ask for them."""

from dsv3.server.answers.answer import Answer
from dsv3.server.answers.chat import ChatAnswer
from dsv3.server.answers.completions import CompletionAnswer
from dsv3.server.answers.faces.generate import GenerateAnswer
from dsv3.server.answers.faces.messages import MessagesAnswer
from dsv3.server.answers.faces.messages_schema import MESSAGES
from dsv3.server.answers.faces.responses import ResponsesAnswer

KINDS: dict[str, type[Answer]] = {
    "/v1/chat/completions": ChatAnswer,
    "/v1/completions": CompletionAnswer,
    "/v1/responses": ResponsesAnswer,
    MESSAGES: MessagesAnswer,
    "/inference/v1/generate": GenerateAnswer,
}
