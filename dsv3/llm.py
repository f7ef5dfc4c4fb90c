"""The notebook face: a model, prompts in, texts out.

from dsv3 import LLM, SamplingParams
outputs = LLM().generate(["def add(a, b):"], SamplingParams(temperature=0, max_tokens=32))
print(outputs[0].outputs[0].text)
"""

import contextlib
import dataclasses
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv3.declaration import options_text, refuse_unknown, signature_with
from dsv3.engine.build import build_engine, bundled_model, rich_progress
from dsv3.engine.device.executor import LocalExecutor
from dsv3.model.inspection import Hook, Inspection, inspect
from dsv3.model.params import Params
from dsv3.options import EngineOptions
from dsv3.prepare import PreparedRequest, fan_out, prepare
from dsv3.request import EngineOutput, EngineRequest, InvalidRequest, QueueFull, TokenLogprobs
from dsv3.sampling_params import SamplingParams
from dsv3.text.answer_grammar import Wanted, answer_grammar
from dsv3.text.chat_template import ChatTemplate
from dsv3.text.output import EndReason, OutputStream
from dsv3.text.parsers import ParserOptions, Parsers
from dsv3.text.tokenizer import Tokenizer, TokenizerNotFound

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclasses.dataclass
class Completion:
    """One answer. `logprobs` has an entry for each token if they were asked for; `error` explains "error"."""

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: EndReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclasses.dataclass
class RequestOutput:
    """A prompt (`prompt` is None where token ids were given) with its `n` answers.

    `prompt_logprobs` has an entry for each token of the prompt if they were asked for, None for the first.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclasses.dataclass
class _Answer:
    """An answer on its way."""

    parent: RequestOutput
    completion: Completion
    stream: OutputStream


class LLM:
    """A model on this machine's devices.

    Args:
      model: a Hugging Face model directory; None is the small model that ships with the package.
      progress: show progress bars while the model loads, compiles and answers.
      The others are the engine's options; they are listed below.

    A directory without a tokenizer serves prompts of token ids; texts are then empty. Raises TypeError for an option
    that does not exist, ValueError for one that cannot be.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, *, progress: bool = True, **options: Any) -> None:
        refuse_unknown(EngineOptions, options, ("model", "progress"))
        directory = Path(model) if model is not None else bundled_model()
        self._progress = progress
        self.tokenizer = _tokenizer(directory)
        self._template: ChatTemplate | None = None
        self.engine = build_engine(directory, EngineOptions(**options), progress=progress)
        self._next_id = 0
        bar, update = rich_progress()
        with bar if progress else contextlib.nullcontext():
            self.engine.warm_up(update if progress else None)

    __doc__ = f"{__doc__}\n    Options of the engine (defaults in parentheses):\n{options_text(EngineOptions)}\n"
    __signature__ = signature_with(__init__, EngineOptions)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Continues one prompt or several, each a text or token ids; results are in the order of the prompts.

        `sampling_params` and `priority` (lower is earlier) are for all prompts, or one for each. Raises InvalidRequest
        where a prompt can never be served, or held to what `structured_outputs` says (none has been started then),
        ValueError for text without a tokenizer.
        """
        several = _as_list(prompts)
        each = _one_each(sampling_params, len(several))
        outputs = [self._output(p, s) for p, s in zip(several, each, strict=True)]
        return self._run(outputs, each, _priorities(priority, len(several)), [""] * len(each))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Answers a conversation, or several, written with the model's chat template.

        A message is a mapping with "role" and "content". Where the model reasons, `structured_outputs` are for what
        follows. Raises TemplateError where the template refuses a message.
        """
        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        each = _one_each(sampling_params, len(several))
        template, tokenizer = self._chat_template(), self._need_tokenizer()
        outputs, grammars = [], []
        for conversation, params in zip(several, each, strict=True):
            text = template.render(
                conversation,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                kwargs=chat_template_kwargs,
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
            outputs.append(RequestOutput(text, ids, [Completion(i) for i in range(params.n)]))
            grammars.append(self._grammar(text, params))
        return self._run(outputs, each, _priorities(priority, len(several)), grammars)

    def _grammar(self, prompt: str, params: SamplingParams) -> str:
        """Returns what the answer to a rendered conversation is held to; raises InvalidRequest."""
        if params.structured_outputs is None:
            return ""
        tokenizer = self._need_tokenizer()
        parsers = Parsers(ParserOptions(), tokenizer, tokenizer.chat_template)
        try:
            wanted = Wanted(constraint=params.structured_outputs, reasoning=parsers.reasoning(prompt))
            return answer_grammar(wanted, parsers.dialect, parsers.marker_ids.get)
        except ValueError as error:
            raise InvalidRequest(f"structured_outputs: {error}") from None

    def inspect(
        self,
        prompt: Prompt,
        *,
        layers: Sequence[int] | None = None,
        attention: bool = True,
        hook: Hook | None = None,
    ) -> Inspection:
        """Shows what each layer does with each token of a prompt: hidden states, latents, attention, router.

        The engine, its cache and its counters stay as they are: this is a program of its own, from position 0. See
        `dsv3.model.inspection.inspect` for the arguments and the shapes. Raises InvalidRequest for a prompt that could
        not be served, ValueError where the experts are spread over devices, and as `inspect` does.
        """
        executor = self.engine.executor
        params = executor.devices.params if isinstance(executor, LocalExecutor) else None
        if not isinstance(params, Params):
            raise ValueError("inspect: the experts are spread over devices; make an LLM without enable_expert_parallel")
        ids = self._output(prompt, SamplingParams(max_tokens=1)).prompt_token_ids
        whole = EngineRequest(request_id=0, prompt_token_ids=ids, sampling=SamplingParams(max_tokens=1))
        prepare(whole, self.engine.rules)
        return inspect(params, self.engine.model_cfg, ids, layers=layers, attention=attention, hook=hook)

    def _output(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        answers = [Completion(i) for i in range(params.n)]
        if isinstance(prompt, str):
            return RequestOutput(prompt, self._need_tokenizer().encode(prompt), answers)
        return RequestOutput(None, list(prompt), answers)

    def _run(
        self, outputs: list[RequestOutput], each: list[SamplingParams], priorities: list[int], grammars: list[str]
    ) -> list[RequestOutput]:
        """Feeds the engine as its queue allows and gathers answers until all are complete."""
        waiting: deque[tuple[PreparedRequest, _Answer]] = deque()
        rules = self.engine.rules
        for output, params, priority, grammar in zip(outputs, each, priorities, grammars, strict=True):
            whole = EngineRequest(
                request_id=self._next_id,
                prompt_token_ids=output.prompt_token_ids,
                sampling=params,
                priority=priority,
                grammar=grammar,
            )
            prepared = prepare(whole, rules)
            self.engine.check_grammar(prepared.grammar)
            requests = fan_out(prepared)
            self._next_id += len(requests)
            for request, completion in zip(requests, output.outputs, strict=True):
                stream = OutputStream(self.tokenizer, params)
                waiting.append((request, _Answer(output, completion, stream)))
        waiting = deque(sorted(waiting, key=lambda each: each[0].priority))
        live: dict[int, _Answer] = {}
        with self._bar(len(waiting)) as update:
            try:
                while waiting or live:
                    self._feed(waiting, live)
                    for result in self.engine.step():
                        self._take(result, live)
                    update(len(waiting) + len(live))
            finally:
                self._abandon(live)
        return outputs

    def _feed(self, waiting: deque[tuple[PreparedRequest, _Answer]], live: dict[int, _Answer]) -> None:
        while waiting:
            request, answer = waiting[0]
            try:
                self.engine.submit(request)
            except QueueFull:
                return
            live[request.request_id] = answer
            waiting.popleft()

    def _take(self, result: EngineOutput, live: dict[int, _Answer]) -> None:
        answer = live.get(result.request_id)
        if answer is None:
            return  # aborted after a stop string
        completion = answer.completion
        delta = answer.stream.push(result.token_ids, result.finish_reason, result.stop_token_id)
        answer.parent.num_cached_tokens = max(answer.parent.num_cached_tokens, result.num_cached_tokens)
        if (told := result.prompt_logprobs) is not None:
            known = answer.parent.prompt_logprobs or [None]
            answer.parent.prompt_logprobs = [*known, *told.behind(len(known)).tokens()]
        completion.text += delta.text
        completion.token_ids += result.token_ids[: delta.num_tokens]
        if result.logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + result.logprobs[: delta.num_tokens]
        if delta.finish_reason is not None:
            completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
            completion.error = result.error
            del live[result.request_id]
            if result.finish_reason is None:
                self.engine.abort(result.request_id)

    def _abandon(self, live: dict[int, _Answer]) -> None:
        """Leaves nothing behind in the engine, also after an interrupt."""
        for request_id in live:
            self.engine.abort(request_id)
        while self.engine.has_work:
            self.engine.step()

    @contextlib.contextmanager
    def _bar(self, total: int) -> Iterator[Any]:
        if not self._progress:
            yield lambda left: None
            return
        bar, update = rich_progress("generating")
        with bar:
            yield lambda left: update(total - left, total, f"{left} left" if left else "done")

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            tokenizer = self._need_tokenizer()
            if tokenizer.chat_template is None:
                raise ValueError("this model has no chat template; use generate with a prompt of your own")
            self._template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
        return self._template

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer.json, nor another tokenizer; give prompts as token ids")
        return self.tokenizer


def _tokenizer(directory: Path) -> Tokenizer | None:
    try:
        return Tokenizer.from_directory(directory)
    except TokenizerNotFound:
        return None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling parameters for {count} prompts; give one, or one for each prompt")
    return list(params)


def _priorities(given: int | Sequence[int], count: int) -> list[int]:
    if isinstance(given, int):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{len(given)} priorities for {count} prompts; give one, or one for each prompt")
    return list(given)
