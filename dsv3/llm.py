"""The notebook interface: a model, prompts in, texts out.

from dsv3 import LLM, SamplingParams
outputs = LLM().generate(["def add(a, b):"], SamplingParams(temperature=0, max_tokens=32))
print(outputs[0].outputs[0].text)
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from dsv3.config.declaration import options_text, refuse_unknown, signature_with
from dsv3.config.options import EngineOptions
from dsv3.engine.build import build_engine, bundled_model
from dsv3.engine.engine import Engine
from dsv3.engine.operations import Operation, PauseMode, Sleep, UpdateWeights, Wake
from dsv3.model.inspection import Hook, Inspection, inspect
from dsv3.model.params import Params
from dsv3.progress import progress_bar
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import (
    EngineOutput,
    EngineRequest,
    ExpertIds,
    InvalidRequest,
    NotServing,
    PreparedRequest,
    QueueFull,
    TokenLogprobs,
    fan_out,
    join_routed_experts,
    prepare,
)
from dsv3.server.serving.service import sampling_defaults
from dsv3.text.call_grammar import AnswerConstraints, answer_grammar
from dsv3.text.chat_template import ChatTemplate, TemplateError, ToolMessages, uses_tools, with_tool_preamble
from dsv3.text.output import EndReason, OutputProcessor
from dsv3.text.parsers import Parsers
from dsv3.text.tokenizer import Tokenizer, TokenizerError, TokenizerNotFound

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Errors = Literal["raise", "return"]

_INVALID = (InvalidRequest, TemplateError, TokenizerError)  # errors of one prompt among several
_POLL_S = 0.02  # for a generation that ends while an operation waits
_LIBRARIES = frozenset({"dsv3", "jax", "sharding", "pallas_kernels"})


@dataclasses.dataclass
class Completion:
    """One completion. `logprobs` has an entry for each token if requested; `error` explains "error".

    `routed_experts` `[num_tokens - 1, num_moe_layers, K]`, uint8 or uint16, are those of the prompt's and the
    completion's tokens, if requested: the last token has not been computed.
    `weight_versions` names the weights that sampled the tokens: the number of the first token, and the version, for
    each version in turn.
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    routed_experts: np.ndarray | None = None
    finish_reason: EndReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    weight_versions: list[tuple[int, str]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class RequestOutput:
    """A prompt (`prompt` is None where token ids were given) with its `n` completions.

    `prompt_logprobs` has an entry for each token of the prompt if requested, None for the first. `weight_version` is
    the latest of the versions of its completions (`LLM.update_weights`).
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    weight_version: str = ""


@dataclasses.dataclass
class _RunningCompletion:
    parent: RequestOutput
    completion: Completion
    stream: OutputProcessor
    routed_experts: list[ExpertIds] = dataclasses.field(default_factory=list)


_Waiting = deque[tuple[PreparedRequest, _RunningCompletion]]


def release_on_error[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Removes references to arguments and intermediate results from the traceback of an exception in `function`.

    Notebooks keep the last traceback, and with its frames a model that has been deleted since. Frames of the user's own
    code, such as a hook's, are not cleared.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            _clear_frames(error)
            del args, kwargs
            raise

    return call


def _clear_frames(error: BaseException | None) -> None:
    seen = set()
    while error is not None and error not in seen:
        seen.add(error)
        traceback = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
                with contextlib.suppress(RuntimeError):  # a running frame
                    traceback.tb_frame.clear()
            traceback = traceback.tb_next
        error = error.__cause__ or error.__context__


class LLM:
    """A model on this machine's devices; a context manager that closes it.

    Args:
      model: a Hugging Face model directory; None is the small model that ships with the package.
      progress: show progress bars while the model loads, compiles and generates.
      The others are the engine's options; they are listed below.

    A directory without a tokenizer serves prompts of token ids; texts are then empty. Raises TypeError for an unknown
    option, ValueError for an invalid one.
    """

    @release_on_error
    def __init__(self, model: str | os.PathLike[str] | None = None, *, progress: bool = True, **options: Any) -> None:
        refuse_unknown(EngineOptions, options, ("model", "progress"))
        directory = Path(model) if model is not None else bundled_model()
        self._progress = progress
        self.tokenizer = _tokenizer(directory)
        self._template: ChatTemplate | None = None
        self._shows_tools = False
        self._defaults = SamplingParams(**sampling_defaults(directory))
        self._engine: Engine | None = build_engine(directory, EngineOptions(**options), progress=progress)
        self._next_id = 0
        self._stepping = threading.Lock()  # the thread that steps the engine has it
        with progress_bar("compiling") if progress else contextlib.nullcontext() as update:
            self.engine.warm_up(update)

    __doc__ = f"{__doc__}\n    Options of the engine (defaults in parentheses):\n{options_text(EngineOptions)}\n"
    __signature__ = signature_with(__init__, EngineOptions)

    @property
    def engine(self) -> Engine:
        """The engine. Raises ValueError once the model is closed."""
        if self._engine is None:
            raise ValueError("this LLM is closed; make a new one")
        return self._engine

    def close(self) -> None:
        """Frees the devices' memory at once, parameters and cache; no method works afterwards.

        It does so whatever still refers to this object: another variable, a notebook's `Out`, a traceback.
        """
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.executor.devices.delete()

    @property
    def weight_version(self) -> str:
        """The name of the weights: "default" until `update_weights` gives another one."""
        return self.engine.state.weight_version

    @release_on_error
    def update_weights(
        self,
        source: str | os.PathLike[str] | Mapping[str, Any] | Params,
        version: str | None = None,
        *,
        mode: PauseMode = "wait",
    ) -> None:
        """Serves other weights of the same model from now on, under the name `version`; None: the update's number.

        `source` is a checkpoint directory, a mapping of arrays by the names of a checkpoint's tensors, or the `Params`
        of a trainer (`dsv3.model.params`), whose arrays are copied from their devices. Each leaf keeps the type in
        which it is served, is quantized as on loading, and replaces the old one before the next is read; arrays of a
        mapping pass through host memory one by one. No program is compiled again. Another thread may be in `generate`:
        its requests finish first ("wait"), continue with their cache ("keep"), end ("abort"), or are computed again
        ("retract"). A prefix that was computed with other weights is never found.

        Raises OperationRefused, which names each leaf that is missing or unsuitable: nothing has changed then. Raises
        WeightsLost where it fails in the middle: nothing is served until an update has succeeded.
        """
        self._operate(UpdateWeights(source, version, mode))

    @release_on_error
    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Frees the devices' memory: the cache, and the weights, which level 1 keeps in host memory.

        After level 2 they must be updated once the model is awake. Programs stay. Requests of another thread's
        `generate` end. Raises OperationRefused where level 1 has no weights to keep.
        """
        self._operate(Sleep(level))

    @release_on_error
    def wake(self) -> None:
        """Allocates the cache again, empty, and copies the weights back that are in host memory."""
        self._operate(Wake())

    def _operate(self, operation: Operation) -> None:
        """Executes an operation: a thread in `generate` does so between two steps, or else this one."""
        done = self.engine.operate(operation)
        while not done.done():
            if self._stepping.acquire(timeout=_POLL_S):
                try:
                    if not done.done():
                        self.engine.step()
                finally:
                    self._stepping.release()
        done.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @release_on_error
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        errors: Errors = "raise",
    ) -> list[RequestOutput]:
        """Continues one prompt or several, each a text or token ids; results are in the order of the prompts.

        `sampling_params` and `priority` (lower is earlier) are for all prompts, or one for each; the default parameters
        are those of the model's generation_config.json, as in a server. Raises InvalidRequest for a prompt that can
        never be served, or whose `structured_outputs` are invalid, with its index among several; no prompt has started
        then. With `errors="return"` such a prompt gets completions with the finish_reason "error", and the others
        continue. Raises ValueError for text without a tokenizer.
        """
        several = _as_list(prompts)

        def make(prompt: Prompt, params: SamplingParams) -> tuple[RequestOutput, str]:
            if params.thinking_token_budget is not None:
                raise InvalidRequest("thinking_token_budget: only the answers of `chat` have reasoning")
            return self._output(prompt, params), ""

        return self._run("prompts", several, sampling_params, priority, make, errors)

    @release_on_error
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
        errors: Errors = "raise",
    ) -> list[RequestOutput]:
        """Answers a conversation, or several, rendered by the model's chat template; the rest is as for `generate`.

        A message is a mapping with "role" and "content". `tools` are shown to the model, as in OpenAI's requests; its
        calls are in the text, in the model's own format. If the model reasons, `structured_outputs` apply behind the
        reasoning, which has at most `thinking_token_budget` tokens. Raises TemplateError where the template refuses a
        message, ValueError where it does not support tools.
        """
        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        template, tokenizer = self._chat_template(), self._need_tokenizer()
        if tools and not self._shows_tools:
            raise ValueError("tools: this model's chat template does not show them to the model")
        prepare_messages = ToolMessages(template).prepare

        def make(conversation: Sequence[Message], params: SamplingParams) -> tuple[RequestOutput, str]:
            try:
                found = prepare_messages(conversation)
            except (KeyError, TypeError, AttributeError) as error:
                raise TemplateError(
                    f"not a conversation of messages with role and content ({type(error).__name__})"
                ) from None
            text = template.render(
                found, tools=tools, add_generation_prompt=add_generation_prompt, kwargs=chat_template_kwargs
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
            output = RequestOutput(text, ids, [Completion(i) for i in range(params.n)])
            return output, self._grammar(text, params)

        return self._run("messages", several, sampling_params, priority, make, errors)  # type: ignore[arg-type]

    def _grammar(self, prompt: str, params: SamplingParams) -> str:
        """Returns the grammar of a rendered conversation's answer; raises InvalidRequest."""
        if params.structured_outputs is None and params.thinking_token_budget is None:
            return ""
        tokenizer = self._need_tokenizer()
        parsers = Parsers(tokenizer, tokenizer.chat_template)
        try:
            wanted = AnswerConstraints(
                constraint=params.structured_outputs,
                reasoning=parsers.reasoning(prompt),
                thinking_token_budget=params.thinking_token_budget,
            )
            return answer_grammar(wanted, parsers.dialect, parsers.marker_ids.get)
        except ValueError as error:
            text = str(error)
            named = text.startswith("thinking_token_budget")
            raise InvalidRequest(text if named else f"structured_outputs: {text}") from None

    @release_on_error
    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Returns the log-probabilities of the tokens but the first of each sequence of T token ids, float32 `[T - 1]`.

        Each is given the tokens before it, under the model itself: without temperature, penalties and filters.
        Raises InvalidRequest as `generate` does; a sequence must leave room for one token more. Raises RuntimeError
        where a sequence ends before it is scored: the engine has failed, or another thread's operation has ended it.
        """
        if any(len(tokens) < 2 for tokens in sequences):
            raise InvalidRequest("score: a sequence has fewer than two tokens; the first one has no log-probability")
        outputs = self.generate(sequences, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        found = [[token.logprob for token in output.prompt_logprobs or () if token] for output in outputs]
        for i, (tokens, logprobs) in enumerate(zip(sequences, found, strict=True)):
            if len(logprobs) != len(tokens) - 1:
                why = outputs[i].outputs[0].error or outputs[i].outputs[0].finish_reason
                raise RuntimeError(f"score: sequence {i} ended before it was scored: {why}")
        return [np.asarray(logprobs, np.float32) for logprobs in found]

    @release_on_error
    def inspect(
        self,
        prompt: Prompt,
        *,
        layers: Sequence[int] | None = None,
        attention: bool = True,
        hook: Hook | None = None,
    ) -> Inspection:
        """Returns what each layer computes for each token of a prompt: hidden states, latents, attention, router.

        The engine, its cache and its counters do not change: this is a program of its own, from position 0. See
        `dsv3.model.inspection.inspect` for arguments and shapes. Raises InvalidRequest for a prompt that could not be
        served, ValueError where the experts are spread over devices, NotServing while the model sleeps or its weights
        are not complete, and as `inspect` does.
        """
        if why := self.engine.state.why_not_serving:
            raise NotServing(why)
        params = self.engine.executor.devices.params
        if not isinstance(params, Params):
            raise ValueError("inspect: the experts are spread over devices; make an LLM without enable_expert_parallel")
        ids = self._output(prompt, SamplingParams(max_tokens=1)).prompt_token_ids
        whole = EngineRequest(request_id=0, prompt_token_ids=ids, sampling=SamplingParams(max_tokens=1))
        prepare(whole, self.engine.rules)
        return inspect(params, self.engine.model_cfg, ids, layers=layers, attention=attention, hook=hook)

    def _output(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        completions = [Completion(i) for i in range(params.n)]
        if isinstance(prompt, str):
            return RequestOutput(prompt, self._need_tokenizer().encode(prompt), completions)
        return RequestOutput(None, list(prompt), completions)

    def _run[T](
        self,
        name: str,
        several: Sequence[T],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        make: Callable[[T, SamplingParams], tuple[RequestOutput, str]],
        errors: Errors,
    ) -> list[RequestOutput]:
        """Prepares all prompts, then generates their completions.

        `make` returns the output of a prompt, without completions, and its grammar.
        """
        given = self._defaults if sampling_params is None else sampling_params
        each = _one_each(given, SamplingParams, "sampling parameters", len(several))
        priorities = _one_each(priority, int, "priorities", len(several))
        outputs: list[RequestOutput] = []
        waiting: list[tuple[PreparedRequest, _RunningCompletion]] = []
        for i, params, first in zip(range(len(several)), each, priorities, strict=True):
            try:
                output, grammar = make(several[i], params)
                waiting += self._requests(output, params, first, grammar)
            except _INVALID as error:
                if errors == "raise":
                    error.args = (f"{name}[{i}]: {error}" if len(several) > 1 else str(error),)
                    raise
                output = _invalid_output(several[i], params, str(error))
            outputs.append(output)
        self._generate(deque(sorted(waiting, key=lambda each: each[0].priority)))
        return outputs

    def _requests(
        self, output: RequestOutput, params: SamplingParams, priority: int, grammar: str
    ) -> list[tuple[PreparedRequest, _RunningCompletion]]:
        """Returns the sequences of a prompt; raises InvalidRequest where it can never be served."""
        whole = EngineRequest(
            request_id=self._next_id,
            prompt_token_ids=output.prompt_token_ids,
            sampling=params,
            priority=priority,
            grammar=grammar,
        )
        prepared = prepare(whole, self.engine.rules)
        self.engine.check_grammar(prepared.grammar)
        requests = fan_out(prepared)
        self._next_id += len(requests)
        streams = (OutputProcessor(self.tokenizer, params) for _ in requests)
        completions = map(_RunningCompletion, itertools.repeat(output), output.outputs, streams)
        return list(zip(requests, completions, strict=True))

    def _generate(self, waiting: _Waiting) -> None:
        """Submits requests as the engine's queue allows, and runs the engine until all are complete."""
        live: dict[int, _RunningCompletion] = {}
        with self._stepping, self._bar(len(waiting)) as update:
            try:
                while waiting or live:
                    self._submit(waiting, live)
                    for result in self.engine.step():
                        self._process_output(result, live)
                    update(len(waiting) + len(live))
            finally:
                self._abort_all(live)

    def _submit(self, waiting: _Waiting, live: dict[int, _RunningCompletion]) -> None:
        while waiting:
            request, running = waiting[0]
            try:
                self.engine.submit(request)
            except QueueFull:
                return
            live[request.request_id] = running
            waiting.popleft()

    def _process_output(self, result: EngineOutput, live: dict[int, _RunningCompletion]) -> None:
        running = live.get(result.request_id)
        if running is None:
            return  # aborted after a stop string
        completion = running.completion
        if result.weight_version is not None:
            completion.weight_versions.append((len(completion.token_ids), result.weight_version))
            running.parent.weight_version = result.weight_version
        delta = running.stream.push(result.token_ids, result.finish_reason, result.stop_token_id)
        running.parent.num_cached_tokens = max(running.parent.num_cached_tokens, result.num_cached_tokens)
        if (logprobs := result.prompt_logprobs) is not None:
            known = running.parent.prompt_logprobs or [None]
            running.parent.prompt_logprobs = [*known, *logprobs.behind(len(known)).tokens()]
        completion.text += delta.text
        completion.token_ids += result.token_ids[: delta.num_tokens]
        if result.logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + result.logprobs[: delta.num_tokens]
        if result.routed_experts is not None:
            running.routed_experts.append(result.routed_experts)
        if delta.finish_reason is not None:
            computed = len(running.parent.prompt_token_ids) + len(completion.token_ids) - 1
            completion.routed_experts = join_routed_experts(running.routed_experts, computed)
            completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
            completion.error = result.error
            del live[result.request_id]
            if result.finish_reason is None:
                self.engine.abort(result.request_id)

    def _abort_all(self, live: dict[int, _RunningCompletion]) -> None:
        """Aborts what is left in the engine, also after an interrupt."""
        for request_id in live:
            self.engine.abort(request_id)
        while self.engine.has_work:
            self.engine.step()

    @contextlib.contextmanager
    def _bar(self, total: int) -> Iterator[Callable[[int], None]]:
        if not self._progress:
            yield lambda left: None
            return
        with progress_bar("generating") as update:
            yield lambda left: update(total - left, total, f"{left} left" if left else "done")

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            tokenizer = self._need_tokenizer()
            if tokenizer.chat_template is None:
                raise ValueError("this model has no chat template; use generate with a rendered prompt")
            dialect = Parsers(tokenizer, tokenizer.chat_template).dialect
            source = with_tool_preamble(tokenizer.chat_template, dialect)
            self._template, self._shows_tools = ChatTemplate(source, tokenizer.special_tokens), uses_tools(source)
        return self._template

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer.json, nor another tokenizer; pass prompts as token ids")
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


def _invalid_output(prompt: Any, params: SamplingParams, why: str) -> RequestOutput:
    completions = [Completion(i, finish_reason="error", error=why) for i in range(params.n)]
    return RequestOutput(prompt if isinstance(prompt, str) else None, [], completions)


def _one_each[T](given: T | Sequence[T], kind: type[T], name: str, count: int) -> list[T]:
    """Returns a value for each of `count` prompts, from one for all or one for each."""
    if isinstance(given, kind):
        return [given] * count
    several: list[T] = list(given)  # type: ignore[arg-type]
    if len(several) != count:
        raise ValueError(f"{len(several)} {name} for {count} prompts; pass one, or one for each prompt")
    return several
