"""The toy model over real processes: the same tokens as in one, and every way that a process can end."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest

from dsv3.config.identity import fingerprint
from dsv3.kv_cache.page_keys import extend_keys, root_key
from dsv3.kv_cache.transfer.client import Peers
from dsv3.kv_cache.transfer.protocol import VERSION, PeerError, PeerHello
from tests.dsv3.engine import test_masks, toy
from tests.dsv3.engine.cluster import instances, local
from tests.dsv3.server.test_lifecycle import Requests

PROMPT = [3, 4, 5]
ENDLESS = {"prompt": PROMPT, "max_tokens": 2000, "temperature": 0, "ignore_eos": True}


def busy(instance):
    """Two requests in flight, one of them streamed."""
    requests = Requests(instance.server)
    requests.send(ENDLESS)
    requests.send(ENDLESS | {"stream": True})
    instance.server.wait_for(lambda: instance.server.metric("vllm:num_requests_running") == 2)
    instance.server.wait_for(lambda: instance.server.metric("vllm:generation_tokens_total") > 4)
    return requests


def failed(instance, requests, reason):
    """All have the reason, and both end with status 1."""
    server = instance.server
    for answer in requests.wait():
        assert "engine" in answer.text or reason in answer.text
        assert answer.status_code in (500, 503) or answer.text.rstrip().endswith("data: [DONE]")
    server.wait_for(lambda: server.http.get("/health").status_code == 503)
    assert reason in server.http.get("/health").json()["reason"]
    assert server.process.wait(60) == 1
    assert f"the instance ends: {reason}" in instance.log(0)
    assert instance.followers[1].wait(60) == 1


def prompts_for(instance):
    """Two for each rank, the longest of which fill a page or two."""
    return [[i + 1, *(5 + j % 60 for j in range(45 * i))] for i in range(2 * (1 + len(instance.followers)))]


def check_tokens(instance):
    """Pages, prompts in chunks, a cached prefix, drafts of which some are right."""
    prompts = prompts_for(instance)
    body = {"prompt": prompts, "max_tokens": 70, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    for _ in range(2):
        answer = instance.server.http.post("/v1/completions", json=body, timeout=120).json()
        tokens = [choice["token_ids"] for choice in answer["choices"]]
        assert tokens == [toy.expected_tokens(prompt, 70, ()) for prompt in prompts]
    assert instance.server.metric("vllm:prefix_cache_hits_total") > 0
    right, all_ = (f"vllm:spec_decode_num_{which}_tokens_total" for which in ("accepted", "draft"))
    instance.server.wait_for(lambda: 0 < instance.server.metric(right) < instance.server.metric(all_))


def drain(instance):
    """SIGTERM to the follower: constrained requests finish, on either rank; all end with status 0."""
    server, follower, requests = instance.server, instance.followers[1], Requests(instance.server)
    pattern = {"structured_outputs": {"regex": test_masks.CONSTRAINTS[1].regex}, "return_token_ids": True}
    for first in (2, 3):
        requests.send(ENDLESS | pattern | {"prompt": [first, 5], "max_tokens": 120})
    server.wait_for(lambda: server.metric("vllm:num_requests_running") == 2)
    follower.send_signal(signal.SIGTERM)
    told = {}
    for answer in requests.wait():
        assert answer.status_code == 200, answer.text + instance.log(0) + instance.log(1)
        [choice] = answer.json()["choices"]
        told[tuple(choice["token_ids"])] = choice["finish_reason"]
    expected = [test_masks.expected([first, 5], 120, 1, ignore_eos=True) for first in (2, 3)]
    assert told == {tuple(tokens): reason for tokens, reason in expected}
    statuses = server.process.wait(60), follower.wait(60)
    assert statuses == (0, 0), instance.log(0) + instance.log(1)
    assert "the leader has ended the instance in order" in instance.log(1)


def latents_of(prompt, peers, address):
    """The toy's latents of a prompt's whole pages, as another instance fetches them."""
    keys, came = [], []
    extend_keys(root_key(fingerprint("{}"), ""), keys, np.array(prompt, np.int32), 64)
    assert peers.fetch(address, keys, 5.0, lambda _, value: came.append(value.tobytes())) == len(keys)
    values = np.frombuffer(b"".join(came), np.float32).reshape(-1, 2, 64, 2)  # the model's layer, that of its drafts
    return values[:, 0].reshape(-1, 2).tolist()


def check_pages_found_again(instance, key):
    """Pages in the hosts' memories are found, and served to others by the process that has them.

    Returns the way there.
    """
    server, prompts = instance.server, [prompt for prompt in prompts_for(instance) if len(prompt) > 64]
    found = []
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": {"do_remote_decode": True}}
        answer = server.http.post("/v1/completions", json=body, timeout=120).json()
        found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found == [len(prompt) // 64 * 64 for prompt in prompts]
    addresses = answer["kv_transfer_params"]["remote_addresses"]
    assert len(set(addresses)) == 2 and addresses[0].endswith(f":{answer['kv_transfer_params']['remote_port']}")
    peers = Peers(key, PeerHello(VERSION, "{}", 1024))
    for prompt in prompts:
        latents = latents_of(prompt, peers, ",".join(addresses))
        assert latents == [[token, place] for place, token in enumerate(prompt[: len(prompt) // 64 * 64])]
    return peers, ",".join(addresses)


def test_a_restart_finds_programs_and_pages_of_the_last_start(tmp_path):
    """The tokens are those of one process without drafts, and digests agree on every draft, right or wrong.

    The second time both processes load stored executables, and the pages in each host's memory. A manipulated program
    is not used: that process compiles it alone, and waits for no other one's compilation. A follower with other results
    ends the instance, and the pages.
    """
    pages = {"kv_offloading_size": 1e-3, "transfer_key_file": local.write_key(tmp_path)}
    pages |= {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    with instances.running(tmp_path, 2, tmp_path, engine=pages, spells=True) as instance:
        num_programs = int(re.search(r"0 of (\d+) programs", instance.log(1))[1])
        check_tokens(instance)
        drain(instance)
    path = min((tmp_path / "1").glob("instance-*/process-1/decode-*"))
    content = bytearray(path.read_bytes())
    [executable] = (tmp_path / "1").glob(f"programs-*/{content[32:].decode()}")
    executable.unlink()
    content[-1] ^= 1
    path.write_bytes(content)
    with instances.running(tmp_path, 2, tmp_path, engine=pages, spells=True, diverge_at=200) as instance:
        assert f"{path.name} is not used: its MAC is wrong" in instance.log(1)
        assert "compiling a program" in instance.log(1) and executable.exists()
        assert f"{num_programs - 1} of {num_programs} programs loaded from the store" in instance.log(1)
        peers, addresses = check_pages_found_again(instance, Path(pages["transfer_key_file"]).read_bytes())
        failed(instance, busy(instance), "process 1 has other results than process 0 in step 200")
        with pytest.raises(PeerError):
            peers.fetch(addresses, [bytes(32)], 60.0, lambda *_: None)
        output = instance.server.process.stdout.read()
        assert f"{num_programs} of {num_programs} programs loaded from the store" in output


def test_a_first_launch_that_takes_long_ends_no_instance(tmp_path):
    """It is over before the leader allows less silence, and before the first request.

    Both processes have checked kernels before, of which another one fails in each, and have replaced both.
    """
    checks = {"check_kernels": True}
    with instances.running(tmp_path, 2, tmp_path, silence=5.0, first_launch_s=6.0, engine=checks) as instance:
        [model] = instance.server.http.get("/v1/models").json()["data"]
        assert model["kernel_fallbacks"] == {"mla_decode": "reference", "rms_norm": "reference"}
        assert instance.server.metric("dsv3:kernel_fallback") == 2
        for process_id in (0, 1):
            for i, name in enumerate(("rms_norm", "mla_decode")):
                assert f"THE KERNEL OF {name} FAILS ITS CHECK: process {i}: ragged: is off" in instance.log(process_id)
        assert "launched 3 programs 2 times" in instance.log(1)
        body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = instance.server.http.post("/v1/completions", json=body, timeout=120)
        assert answer.json()["choices"][0]["token_ids"] == toy.expected_tokens(PROMPT, 20, ())


def test_a_follower_whose_program_launches_collectives_in_another_order_ends_the_start(tmp_path):
    """Nothing is launched: both processes end with the program and its first collective that differs."""
    said = r"the instance ends: process 1 and process 0 launch the collectives of sample-\S+ in different orders, .* 1,"
    with pytest.raises(AssertionError, match=said), instances.running(tmp_path, 2, tmp_path, exchanged=True):
        pass
