import json
from types import SimpleNamespace

import pytest

from dsv3.scheduler.request import RequestRules
from dsv3.server.engine.messages import EngineInfo
from dsv3.server.protocol.openai import CompletionRequest
from dsv3.server.serving.prompts import EncodedPrompt
from dsv3.server.serving.sampling import sampling_params
from dsv3.server.serving.service import sampling_defaults


def write(directory, text):
    (directory / "generation_config.json").write_text(text)
    return directory


def test_only_sampling_values_are_taken(tmp_path):
    assert sampling_defaults(tmp_path) == {}
    found = {"temperature": 0.6, "top_p": 0.95, "eos_token_id": 1, "do_sample": True, "top_k": None}
    assert sampling_defaults(write(tmp_path, json.dumps(found))) == {"temperature": 0.6, "top_p": 0.95}


def test_do_sample_false_is_greedy(tmp_path):
    found = {"temperature": 0.6, "do_sample": False}
    assert sampling_defaults(write(tmp_path, json.dumps(found))) == {"temperature": 0.0}


@pytest.mark.parametrize("text", ["[", "[]", '{"temperature": -1}', '{"top_p": "x"}'])
def test_useless_files_are_errors(tmp_path, text):
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        sampling_defaults(write(tmp_path, text))


def test_defaults_hold_where_a_request_is_silent():
    info = EngineInfo(RequestRules(vocab_size=100, max_model_len=64), max_num_seqs=1, num_pages=1)
    defaults = {"temperature": 0.6, "top_p": 0.95}
    service = SimpleNamespace(require_ready=lambda: info, sampling_defaults=defaults)
    request = CompletionRequest(prompt=[5], temperature=0.0)
    sampling = sampling_params(service, request, [EncodedPrompt([5])], max_tokens=None, logprobs=None)
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.0, 0.95, 16)
