"""What a request wants its answers held to: OpenAI's `response_format` or vLLM's `structured_outputs`, as a grammar.

A grammar is written and compiled before anything is sent to the engine, in a process that can be killed.
"""

from dsv3.server.answers.errors import invalid, unavailable
from dsv3.server.answers.schema import ResponseFormat, SampledRequest
from dsv3.server.answers.service import Service
from dsv3.server.asking import WorkerDied
from dsv3.server.limits import WorkersBusy
from dsv3.structured_outputs import StructuredOutputsParams
from dsv3.text.answer_grammar import Wanted
from dsv3.text.matcher import GrammarError, VocabularyError

MAX_TOTAL_CHARS = 2**24
"""Characters of the grammars of all prompts of one request: they go to the engine with each."""


def constraint_of(request: SampledRequest) -> StructuredOutputsParams | None:
    """Returns the constraint of a request, None where it has none; raises ApiError where it has two."""
    wanted = None if request.response_format is None else _of_format(request.response_format)
    if wanted is not None and request.structured_outputs is not None:
        raise invalid("structured_outputs: response_format asks for something already; send one", "structured_outputs")
    return wanted or request.structured_outputs


def _of_format(given: ResponseFormat) -> StructuredOutputsParams | None:
    if given.type == "text":
        return None
    if given.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    schema = None if given.json_schema is None else given.json_schema.schema
    if schema is None:
        raise invalid("response_format: json_schema.schema is missing", "response_format")
    return StructuredOutputsParams(json=schema)


async def made_grammar(service: Service, wanted: Wanted, field: str, prompts: int = 1) -> str:
    """Returns the grammar of an answer, which is known to compile.

    Raises ApiError: 400 that names `field` and says what is wrong with it, 503 where too many grammars wait.
    """
    rules = service.require_ready().rules
    if service.grammars is None or not rules.takes_grammars:
        what = "this server holds no answer to a grammar: it has no tokenizer, or overrules drafts for a benchmark"
        raise invalid(f"{field}: {what}", field, "unsupported_parameter")
    try:
        grammar = await service.grammars.make(wanted, rules)
        if prompts * len(grammar) > MAX_TOTAL_CHARS:
            raise invalid(f"{field}: too large for {prompts} prompts in one request; send several", field)
    except (GrammarError, VocabularyError) as error:
        service.metrics.add("grammars_refused", 1)
        raise invalid(f"{field}: {str(error).removeprefix(f'{field}: ')}", field) from None
    except WorkerDied as error:
        service.metrics.rejected("failed")
        raise unavailable(str(error), "grammar_worker_died") from None
    except WorkersBusy as error:
        raise service.busy(error) from None
    return grammar
