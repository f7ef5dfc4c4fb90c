"""The spans of a request in an API server and its engine, with the names of OpenTelemetry's conventions for GenAI.

They contain no part of a prompt or an answer.
"""

from collections.abc import Iterator, Mapping
from time import monotonic, time

from dsv3.scheduler.timing import RequestTiming
from dsv3.server.otlp import Attributes, Span
from dsv3.server.protocol.openai import ChatRequest
from dsv3.server.serving.handler import RequestHandler
from dsv3.server.serving.service import Service
from dsv3.server.serving.timeline import RequestTimeline

MAX_TRACED_CHOICES = 8
"""Choices of a request whose phases are spans."""
_SENDING_S = 0.05  # to an engine that is ready, at most
_SAMPLING = ("temperature", "top_p", "max_tokens", "top_k", "seed", "frequency_penalty", "presence_penalty")
_COUNTS = ("preemptions", "retractions", "drafts_proposed", "drafts_accepted")


def request_span(handler: RequestHandler | None, timeline: RequestTimeline, status: int) -> Span:
    """Returns the span of a request whose exchange is over; `handler` is None where its request was refused."""
    end = monotonic()
    attributes: dict = {"http.response.status_code": status}
    if timeline.request_id:
        attributes["dsv3.request_id"] = timeline.request_id
    if handler is None:
        return Span("llm_request", timeline.began, end, attributes, children=tuple(timeline.phases))
    attributes |= _attributes(handler, timeline, end)
    phases = [span for choice in sorted(timeline.records)[:MAX_TRACED_CHOICES] for span in _of_choice(timeline, choice)]
    children = [*timeline.phases, *phases, *_response_spans(timeline, end)]
    return Span("llm_request", timeline.began, end, attributes, children=tuple(children))


def begin_timeline(
    service: Service, request_id: str = "", headers: Mapping[str, str] | None = None, *, is_shown: bool = False
) -> RequestTimeline:
    """Returns the record of a request that has just come, with a trace if that is sampled."""
    trace = None if service.tracer is None else service.tracer.start("llm_request", headers or {})
    is_sampled = trace is not None and trace.is_sampled
    return RequestTimeline(request_id, is_shown=is_shown, trace=trace if is_sampled else None)


def end_trace(service: Service, timeline: RequestTimeline, handler: RequestHandler | None, status: int) -> None:
    """Sends the trace of a request, if it has one; the dashboard shows it if it was slow and has an id."""
    if (trace := timeline.trace) is None:
        return
    whole = request_span(handler, timeline, status)
    trace.end(whole, f"status {status}" if status >= 500 else None)
    if handler is not None and timeline.request_id:
        seconds, first = whole.stop - whole.start, timeline.first_token_at
        waited = seconds if first is None else first - whole.start
        service.history.add_request(time(), timeline.request_id, trace.trace_id, waited, seconds)


def _attributes(handler: RequestHandler, timeline: RequestTimeline, end: float) -> Attributes:
    generation, usage, record = handler.generation, handler.generation.usage, timeline.longest
    found = {
        "gen_ai.operation.name": "chat" if isinstance(handler.request, ChatRequest) else "text_completion",
        "gen_ai.provider.name": "dsv3",
        "gen_ai.request.model": handler.model,
        "gen_ai.request.choice.count": generation.n,
        "gen_ai.response.id": handler.id,
        "gen_ai.response.model": handler.model,
        "gen_ai.response.finish_reasons": timeline.finish_reasons,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
        "gen_ai.latency.e2e": end - timeline.began,
    }
    for name in _SAMPLING:
        value = getattr(generation.sampling, name)
        if value is not None and (value or name == "temperature"):
            found[f"gen_ai.request.{name}"] = value
    if generation.tenant is not None:
        found["dsv3.tenant"] = generation.tenant.name
    if timeline.first_token_at is not None:
        found["gen_ai.latency.time_to_first_token"] = timeline.first_token_at - timeline.began
    if record is not None:
        seconds = timeline.seconds(record)
        found["gen_ai.latency.time_in_queue"] = record.queue_seconds or 0.0
        found["gen_ai.latency.time_in_model_prefill"] = seconds.get("prefill", 0.0)
        found["gen_ai.latency.time_in_model_decode"] = seconds.get("decode", 0.0)
        counts = [(f"dsv3.{name}", getattr(each, name)) for each in timeline.records.values() for name in _COUNTS]
        for name, count in counts:
            if count:
                found[name] = found.get(name, 0) + count
    return found


def _of_choice(timeline: RequestTimeline, choice: int) -> Iterator[Span]:
    """Yields the phases of a choice in its engines, and the time without one: it starts, restarts or has died."""
    without = timeline.phases[-1].stop if timeline.phases else timeline.began
    broken_off = [found for number, found in timeline.broken_off if number == choice]
    for i, record in enumerate([*broken_off, timeline.records[choice]]):
        if record.began - without > _SENDING_S:
            yield Span("engine_wait", without, record.began)
        spans = _engine_spans(timeline, choice, record)
        if i:
            spans = (span._replace(events=()) for span in spans)  # the first token came of an earlier engine
        yield from spans
        without = record.ended_at or record.began


def _engine_spans(timeline: RequestTimeline, choice: int, record: RequestTiming) -> Iterator[Span]:
    """Yields the phases of a choice in the engine: its chunks inside those of its prompt, tokens found by tier."""
    about = {"dsv3.choice": choice} if len(timeline.records) > 1 else {}
    first = record.first_token_at
    for span in timeline.engine_phases(record):
        if span.name == "load":
            tiers = {f"dsv3.cached_tokens.{tier}": n for tier, n in record.cached.items() if tier != "device"}
            yield span._replace(attributes=about | tiers)
        elif span.name == "prefill":
            _, begun, ended, *_ = span
            chunks = tuple(
                Span("chunk", start, stop, {"dsv3.tokens": tokens})
                for start, stop, tokens in record.chunks
                if begun <= start and stop <= ended
            )
            found = about | {"dsv3.cached_tokens.device": record.device} if record.device else about
            yield Span("prefill", begun, ended, found, children=chunks)
        elif span.name == "decode" and first is not None and span.start <= first <= span.stop:
            yield span._replace(attributes=about, events=(("first_token", first),))
        else:
            yield span._replace(attributes=about) if about else span


def _response_spans(timeline: RequestTimeline, end: float) -> Iterator[Span]:
    """Yields the processing of the tokens, beside the engine, and the rest of writing the response."""
    first, last = timeline.first_token_at, timeline.last_token_at
    if first is not None and last is not None:
        yield Span("detokenize", first, last, {"dsv3.processor_s": timeline.detokenize_s})
        yield Span("write", last, end)
