"""Log-probabilities of prompts over HTTP, and the generate route; the fake engine invents the numbers."""

import pytest

from tests.dsv3.server.events import events_of

PATH, GENERATE = "/v1/completions", "/inference/v1/generate"
BODY = {"prompt": [5, 6, 7], "max_tokens": 2, "echo": True}


def ask(server, **body):
    return server.http.post(PATH, json=BODY | body)


def test_echoed_log_probabilities(server):
    """Prompt and answer share a list, with null for the first token, as evaluation harnesses expect."""
    choice = ask(server, logprobs=2).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] and len(logprobs["tokens"]) == 5
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    best = server.http.post("/detokenize", json={"tokens": [4]}).json()["prompt"]
    assert logprobs["top_logprobs"][1] == {best: -0.125, logprobs["tokens"][1]: -0.25}
    assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:i])) for i in range(5)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_with_max_tokens_0(server, stream):
    """The response is vLLM's, but the token that the engine samples is not counted."""
    options = {"include_usage": True} if stream else None
    answer = ask(server, prompt=[5, 6, 7], max_tokens=0, logprobs=2, stream=stream, stream_options=options)
    events = [event for _, event in events_of(answer)] if stream else [answer.json()]
    choices = [choice for event in events for choice in event["choices"]]
    prompt = server.http.post("/detokenize", json={"tokens": [5, 6, 7]}).json()["prompt"]
    assert "".join(choice["text"] for choice in choices) == prompt
    assert [v for c in choices if c["logprobs"] for v in c["logprobs"]["token_logprobs"]] == [None, -0.25, -0.25]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("length", None)
    assert (events[-1]["usage"]["prompt_tokens"], events[-1]["usage"]["completion_tokens"]) == (3, 0)


def test_prompts_are_echoed_without_answers(server):
    """Several prompts, one of which the model would end at once."""
    body = {"prompt": [[0], [5, 6]], "max_tokens": 0, "n": 2, "return_token_ids": True}
    choices = ask(server, **body).json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [[]] * 4
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 4
    assert choices[2]["text"] == server.http.post("/detokenize", json={"tokens": [5, 6]}).json()["prompt"]
    assert ask(server, max_tokens=0, echo=False).status_code == 400


def test_in_a_stream_the_prompts_log_probabilities_come_first(server):
    body = {"prompt": [5, 6, 7, 8, 9] * 3, "logprobs": 1}
    whole = ask(server, **body).json()["choices"][0]
    assert whole["logprobs"]["token_logprobs"] == [None, *[-0.25] * 14, -0.5, -0.5]
    choices = [event["choices"][0] for _, event in events_of(ask(server, **body, stream=True))]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [v for c in choices if c["logprobs"] for v in c["logprobs"][name]] == values


def test_records_of_the_prompt(server):
    answer = ask(server, echo=False, prompt_logprobs=1, prompt=["ab", "cd"]).json()
    for choice in answer["choices"]:
        first, *records = choice["prompt_logprobs"]
        assert first is None and choice["logprobs"] is None
        for record in records:
            assert record["4"]["rank"] == 1 and record["4"]["logprob"] == -0.125
            [own] = [value for key, value in record.items() if key != "4"]
            assert (own["logprob"], own["rank"]) == (-0.25, 2) and own["decoded_token"]
    both = ask(server, prompt_logprobs=0, logprobs=3).json()["choices"][0]
    assert len(both["logprobs"]["tokens"]) == 5
    assert [list(record) for record in both["prompt_logprobs"][1:]] == [["6"], ["7"]]


def test_a_prompt_of_one_token(server):
    choice = ask(server, prompt=[5], logprobs=0, prompt_logprobs=0).json()["choices"][0]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]


@pytest.mark.parametrize(
    "change, param",
    [
        ({"logprobs": 1, "n": 2}, "n"),
        ({"prompt_logprobs": 1, "n": 2, "echo": False}, "n"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logprobs": 20, "prompt": [[5] * 2000] * 120}, "logprobs"),
    ],
    ids=str,
)
def test_invalid_combinations_are_refused(server, change, param):
    answer = ask(server, **change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_chats_refuse_prompt_logprobs(server):
    body = {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 1}
    assert server.http.post("/v1/chat/completions", json=body).json()["error"]["param"] == "prompt_logprobs"


def test_token_ids_in_and_out(server):
    sampling = {"max_tokens": 3, "logprobs": 1, "temperature": 0.0, "detokenize": False}
    body = {"request_id": "r", "token_ids": [5, 6, 7, 8], "sampling_params": sampling, "model": "tiny"}
    answer = server.http.post(GENERATE, json=body).json()
    [choice] = answer["choices"]
    assert (answer["request_id"], choice["token_ids"], choice["finish_reason"]) == ("r", [5, 6, 7], "length")
    assert [record["token"] for record in choice["logprobs"]["content"]] == ["token_id:5", "token_id:6", "token_id:7"]
    streamed = server.http.post(GENERATE, json=body | {"stream": True}).text.split("\n\n")[:-2]
    assert len(streamed) >= 1 and all(line.startswith('data: {"request_id":"r"') for line in streamed)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_token_ids_are_scored(server, logprobs):
    """The response has vLLM's records of the prompt, with tokens by their ids."""
    sampling = {"max_tokens": 1, "prompt_logprobs": 1, "logprobs": logprobs}
    answer = server.http.post(GENERATE, json={"token_ids": [5, 6, 7], "sampling_params": sampling}).json()
    first, *records = answer["prompt_logprobs"]
    assert first is None and [list(record) for record in records] == [["4", "6"], ["4", "7"]]
    assert records[0]["6"] == {"logprob": -0.25, "rank": 2, "decoded_token": "token_id:6"}
    [choice] = answer["choices"]
    assert choice["token_ids"] == [5] and (choice["logprobs"] is None) == (logprobs is None)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**6]}, "prompt"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"max_tokens": "x"}}, "sampling_params"),
        ({"sampling_params": {"prompt_logprobs": 1, "n": 2}}, "n"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
        ({"sampling_params": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
        ({"priority": 1}, "priority"),
        ({"features": {}}, "features"),
    ],
    ids=str,
)
def test_invalid_generate_requests(server, change, named):
    answer = server.http.post(GENERATE, json={"token_ids": [5]} | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named), answer.text
