"""An engine without a model for the engine process: counts up from the last token of its prompt."""

from dsv3.api.frames import EngineInfo
from dsv3.engine.request import EngineOutput

POISON, DEADLY = 66, 99


def start(model_dir, options, progress):
    """A prompt that ends in POISON fails alone; DEADLY fails the engine, as an exception in a step does."""
    if options.get("broken"):
        raise ValueError("the weights are missing")
    engine = FakeEngine()
    return engine, EngineInfo(vocab_size=100, max_model_len=64, max_num_seqs=2, num_pages=8)


class FakeEngine:
    def __init__(self):
        self._requests = {}
        self.failure = None

    @property
    def has_work(self):
        return bool(self._requests)

    def add(self, request):
        self._requests[request.request_id] = [request, 0]

    def abort(self, request_id):
        self._requests.pop(request_id, None)

    def step(self):
        if any(request.prompt_token_ids[-1] == DEADLY for request, _ in self._requests.values()):
            self.failure = RuntimeError("out of memory")
            return [self._end(name, "error", "the engine has failed") for name in list(self._requests)]
        return [self._advance(name) for name in list(self._requests)]

    def _advance(self, name):
        request, done = self._requests[name]
        last = request.prompt_token_ids[-1]
        if last == POISON:
            return self._end(name, "error", "not finite")
        self._requests[name][1] = done + 1
        token = (last + done + 1) % 60
        if done + 1 == request.sampling.max_tokens:
            return self._end(name, "length", None, [token])
        return EngineOutput(request_id=name, token_ids=[token])

    def _end(self, name, reason, error=None, tokens=()):
        del self._requests[name]
        return EngineOutput(request_id=name, token_ids=list(tokens), finish_reason=reason, error=error)

    def stats(self):
        return {"running": len(self._requests)}
