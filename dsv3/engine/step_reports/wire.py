"""Step metrics on the wire: MessagePack maps with the names and meanings of Dynamo's `ForwardPassMetrics`, version 1.

Source: `dynamo/common/forward_pass_metrics.py` of ai-dynamo 1.6.1. Variances are those of the whole population.
"""

import msgspec


class Scheduled(msgspec.Struct, frozen=True, gc=False):
    """What a step computed on a rank.

    Prompts: requests with a chunk, their tokens computed now, the variance of their whole lengths, and tokens before
    the chunks, cached or computed earlier. Decode: requests, and the tokens that they have had, with their variance.
    """

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class Queued(msgspec.Struct, frozen=True, gc=False):
    """What waited meanwhile: prompts with their tokens, and answers that were pre-empted with all their tokens."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class StepMetrics(msgspec.Struct, frozen=True, gc=False):
    """One step of one rank; `wall_time` in seconds. One without requests and time says that the instance is idle."""

    version: int = 1
    worker_id: str = ""
    dp_rank: int = 0
    counter_id: int = 0
    wall_time: float = 0.0
    scheduled_requests: Scheduled = Scheduled()
    queued_requests: Queued = Queued()


encode = msgspec.msgpack.Encoder().encode
