"""`kv_transfer_params` as routers copy them from the answer of one instance to the request of another."""

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REQUEST = {"prompt": "def add(a, b):", "max_tokens": 1}
FIRST = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_answer_says_where_its_pages_are(server, path):
    request = REQUEST if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    answer = server.http.post(path, json=request | {"kv_transfer_params": FIRST}).json()
    told = answer["kv_transfer_params"]
    assert told == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "print",
        "remote_host": "fd00::1",
        "remote_port": 7000,
        "remote_num_tokens": answer["usage"]["prompt_tokens"],
        "tp_size": 1,
        "remote_addresses": ["[fd00::1]:7000", "host1:7001"],
    }
    second = server.http.post(path, json=request | {"kv_transfer_params": told | {"of_a_newer_router": 1}})
    assert second.status_code == 200 and "kv_transfer_params" not in second.json()
    assert "kv_transfer_params" not in server.http.post(path, json=request).json()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"do_remote_prefill": True}, "needs remote_host and remote_port"),
        ({"do_remote_prefill": True, "remote_host": "a b", "remote_port": 7}, "needs remote_host and remote_port"),
        ({"do_remote_prefill": True, "remote_host": "h/../x", "remote_port": 7}, "needs remote_host"),
        ({"do_remote_prefill": True, "remote_host": "a..b", "remote_port": 7}, "needs remote_host"),
        ({"do_remote_prefill": True, "remote_host": "h", "remote_port": 70000}, "remote_port"),
        ({"do_remote_prefill": True, "remote_addresses": ["h:7", "a b:7"]}, "remote_addresses: 'a b:7' has no host"),
        ({"do_remote_prefill": True, "remote_addresses": ["h"]}, "remote_addresses: 'h' is not HOST:PORT"),
        ({"do_remote_prefill": True, "remote_addresses": ["h:7,h:8"]}, "remote_addresses: 'h:7,h:8' has no host"),
        ({"do_remote_prefill": True, "remote_addresses": ["h:7"] * 65}, "remote_addresses"),
        ({"do_remote_decode": 7}, "do_remote_decode"),
        ("x", "kv_transfer_params"),
    ],
)
def test_bad_parameters_are_refused_by_name(server, params, words):
    answer = server.http.post(COMPLETIONS, json=REQUEST | {"kv_transfer_params": params})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_a_stream_has_no_place_for_them(server):
    answer = server.http.post(COMPLETIONS, json=REQUEST | {"stream": True, "kv_transfer_params": FIRST})
    assert answer.status_code == 400 and "without stream" in answer.json()["error"]["message"]


@pytest.mark.parametrize("params", [FIRST, {"do_remote_prefill": True, "remote_host": "h", "remote_port": 7}])
def test_a_server_that_exchanges_no_pages_says_so(slow_server, params):
    answer = slow_server.http.post(COMPLETIONS, json=REQUEST | {"kv_transfer_params": params})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "kv_transfer_params" and "start it with" in answer.text
