"""The kinds of answers, by the paths under which clients ask for them."""

from dsv3.server.protocol.anthropic import MESSAGES
from dsv3.server.serving.anthropic import MessagesHandler
from dsv3.server.serving.chat import ChatHandler
from dsv3.server.serving.completions import CompletionHandler
from dsv3.server.serving.generate import GenerateHandler
from dsv3.server.serving.handler import RequestHandler
from dsv3.server.serving.responses import ResponsesHandler

KINDS: dict[str, type[RequestHandler]] = {
    "/v1/chat/completions": ChatHandler,
    "/v1/completions": CompletionHandler,
    "/v1/responses": ResponsesHandler,
    MESSAGES: MessagesHandler,
    "/inference/v1/generate": GenerateHandler,
}
