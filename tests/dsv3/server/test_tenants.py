"""Several API keys: authentication, isolation of cached prefixes, and metrics by tenant."""

import json
import os
import signal

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.config.server_options import ServerOptions
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineRequest, RequestRules, prepare
from dsv3.server.config import ServerConfig
from dsv3.server.http.exchange import REQUEST_ID, TENANT, request_label
from dsv3.server.serving.metrics import Metrics
from dsv3.server.tenants import MAX_TENANTS, Tenants, cache_salt, load_tenants, reload_tenants
from tests.dsv3.server import serving

COMPLETIONS = "/v1/completions"
ACME, ZETA, OPERATOR, BARE = (f"sk-{name}-0123456789abcdef" for name in ("acme", "zeta", "operator", "bare"))
NAMES = ("requests", "prompt_tokens", "generation_tokens")
BODY = {"prompt": [5] * 130, "max_tokens": 3}


def write(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return ServerOptions(api_key_file=str(path))


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def test_a_file_has_a_key_per_line(tmp_path):
    text = f"# tenants\n\nacme {ACME}\r\n\t{BARE}  \n  # {OPERATOR}\nzeta.2-x_Y\t{ZETA}"
    tenants = Tenants(load_tenants(write(tmp_path / "keys", text)))
    assert [tenant.name for tenant in tenants.all] == ["acme", "key4", "zeta.2-x_Y"]
    for key, name in ((ACME, "acme"), (BARE, "key4"), (ZETA, "zeta.2-x_Y")):
        assert tenants.find(key.encode()).name == name
    for wrong in (b"", b"acme", OPERATOR.encode(), ACME.encode()[:-1], ACME.encode() + b"x", b"acme " + ACME.encode()):
        assert tenants.find(wrong) is None
    assert not any(key in repr(tenants.all) for key in (ACME, BARE, ZETA))


def test_one_key_needs_no_file():
    [tenant] = load_tenants(ServerOptions(api_key="k"))
    assert (tenant.name, Tenants([tenant]).has_several) == ("key1", False)
    assert load_tenants(ServerOptions()) == ()
    with pytest.raises(ValueError, match="keys"):
        ServerConfig(model_dir=None, model_names=("m",), options=ServerOptions(api_key="k"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "0 keys"),
        ("# only this\n", "0 keys"),
        (f"acme {ACME}\n\nacme {ZETA}", "line 3 has the name of line 1"),
        (f"acme {ACME}\nzeta {ACME}", "line 2 has the key of line 1"),
        (f"key2 {ACME}\n{ZETA}", "line 2 has the name of line 1"),
        (f"acme {ACME} more", "line 1: expected KEY or NAME KEY"),
        (f"acme: {ACME}", "line 1: expected"),
        (f"{ZETA} acme", "line 1: expected a key of at least 16 characters"),
        (f"acmé {ACME}", "line 1: expected"),
        (f"{ACME}é", "line 1: expected"),
        ("\n".join(f"{ACME}{i}" for i in range(MAX_TENANTS + 1)), "1025 keys"),
    ],
)
def test_bad_key_files_are_rejected_by_line_without_a_key_in_the_error(tmp_path, text, problem):
    with pytest.raises(ValueError, match=problem) as raised:
        load_tenants(write(tmp_path / "keys", text))
    assert not any(key in str(raised.value) for key in (ACME, ZETA, "acm"))


def test_key_files_that_others_can_read_are_rejected(tmp_path):
    with pytest.raises(ValueError, match="chmod go-rwx"):
        load_tenants(write(tmp_path / "keys", ACME, 0o644))


def test_names_keep_their_indices_after_any_reload(tmp_path):
    path = tmp_path / "keys"
    old = load_tenants(write(path, f"acme {ACME}\nzeta {ZETA}"))
    options = write(path, f"new {BARE}\nzeta {OPERATOR}")
    tenants = Tenants(reload_tenants(options, old))
    assert [tenant.name for tenant in tenants.all] == ["acme", "zeta", "new"]
    assert tenants.find(ACME.encode()) is None and tenants.find(ZETA.encode()) is None and tenants.find(b"") is None
    assert tenants.find(OPERATOR.encode()).name == "zeta" and tenants.has_several
    assert tenants.all[1].salt != old[1].salt  # the cache is the key's, since names may move
    back = reload_tenants(write(path, f"acme {ACME}"), tenants.all)
    assert [bool(tenant.digest) for tenant in back] == [True, False, False]
    assert back[0] == old[0]
    full = reload_tenants(write(path, "\n".join(f"n{i} {ACME}{i}" for i in range(MAX_TENANTS - 3))), back)
    with pytest.raises(ValueError, match="1025 names"):
        reload_tenants(write(path, f"another {ACME}"), full)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="regular"):
        reload_tenants(options, old)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([None, ACME, ZETA]), st.none() | st.text("ab\x01é", min_size=1)), min_size=2))
def test_salts_are_equal_only_for_one_key_and_one_salt(pairs):
    """So `cached_tokens` does not reveal the prompts of other tenants."""
    tenants = {key: None if key is None else load_tenants(ServerOptions(api_key=key))[0] for key, _ in pairs}
    rules = RequestRules(vocab_size=10, max_model_len=200)
    keys = {}
    for key, given_salt in pairs:
        salt = cache_salt("tenant", tenants[key], given_salt)
        assert salt == cache_salt("salt", tenants[key], given_salt)
        assert cache_salt("none", tenants[key], given_salt) == (given_salt or "")
        request = EngineRequest(request_id=1, prompt_token_ids=[1] * 64, sampling=SamplingParams(), cache_salt=salt)
        keys.setdefault((key, given_salt), set()).add(prepare(request, rules).keys)
    assert all(len(found) == 1 for found in keys.values())
    assert len(set.union(*keys.values())) == len(keys)


def test_tenant_metrics_are_labelled_only_with_names_of_the_file(tmp_path):
    tenants = Tenants(load_tenants(write(tmp_path / "keys", f"acme {ACME}\nzeta {ZETA}")))
    metrics, open_to_all = Metrics("m", tenants=tenants), Metrics("m")
    metrics.charge(tenants.all[1], 10, 3)
    metrics.charge(tenants.all[1], 10, 4)
    sample = metrics.registry.get_sample_value
    counted = [sample(f"dsv3:tenant_{name}_total", labels(tenant)) for name in NAMES for tenant in ("acme", "zeta")]
    assert counted == [0, 2, 0, 20, 0, 7]
    assert metrics.text().count(b"\ndsv3:tenant_") == 6 and b"dsv3:tenant_" not in open_to_all.text()
    assert np.count_nonzero(metrics._numbers.mine) == 3


def test_the_log_names_the_tenant_of_a_failed_request():
    [tenant] = load_tenants(ServerOptions(api_key=ACME))
    assert request_label({"extensions": {REQUEST_ID: "r", TENANT: tenant}}) == "r of key1"
    assert request_label({"extensions": {REQUEST_ID: "r"}}) == "r"


def labels(tenant):
    return {"model_name": "m", "tenant": tenant}


@pytest.fixture(scope="module")
def shared(model_dir, tmp_path_factory):
    """Three tenants, two API servers, an access log; an engine whose `cached_tokens` depend on the prefix keys."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    write(path, f"acme {ACME}\nzeta {ZETA}\noperator {OPERATOR}\n")
    options = {"api_key_file": str(path), "api_server_count": 2, "access_log": True}
    with serving.running(model_dir, options=options, factory_options={"caches": True}) as server:
        server.keys = path
        yield server


def cached(server, key, **fields):
    answer = httpx.post(server.url + COMPLETIONS, json=BODY | fields, headers=bearer(key), timeout=30)
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_tenant_sees_only_its_own_cached_prefixes(shared):
    assert cached(shared, ACME) == 0
    assert cached(shared, ACME) == 128
    assert cached(shared, ZETA) == 0
    assert cached(shared, ZETA, cache_salt="x") == 0
    assert cached(shared, ACME, cache_salt="x") == 0
    assert cached(shared, ZETA, cache_salt="x") == 128
    salt = load_tenants(ServerOptions(api_key=ACME))[0].salt
    assert cached(shared, ZETA, cache_salt=salt) == 0


@pytest.mark.parametrize("isolation", ["none", "salt"])
def test_prefix_cache_isolation_modes(model_dir, tmp_path, isolation):
    write(tmp_path / "keys", f"{ACME}\n{ZETA}")
    options = {"api_key_file": str(tmp_path / "keys"), "prefix_cache_isolation": isolation}
    with serving.running(model_dir, options=options, factory_options={"caches": True}) as server:
        assert cached(server, ACME, cache_salt="x") == 0
        assert cached(server, ZETA, cache_salt="x") == (128 if isolation == "none" else 0)
        answer = server.http.post(COMPLETIONS, json=BODY, headers=bearer(ACME))
        if isolation == "salt":
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "cache_salt_required")
        else:
            assert answer.status_code == 200


def test_metrics_and_flush_cache_need_the_operator(shared):
    for key in (ACME, ZETA):
        for method, path in (("GET", "/metrics"), ("GET", "/debug/requests"), ("POST", "/flush_cache")):
            refused = httpx.request(method, shared.url + path, headers=bearer(key))
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_the_operator")
        assert httpx.get(shared.url + "/v1/models", headers=bearer(key)).status_code == 200
    assert httpx.post(shared.url + "/flush_cache", headers=bearer(OPERATOR)).status_code == 200
    before = counts(shared)
    body = BODY | {"stream": True, "n": 2, "max_tokens": 5}
    assert httpx.post(shared.url + COMPLETIONS, json=body, headers=bearer(ACME)).text.endswith("data: [DONE]\n\n")
    assert httpx.post(shared.url + COMPLETIONS, json=BODY | {"n": 9999}, headers=bearer(ACME)).status_code == 400
    grown = {key: value - before[key] for key, value in counts(shared).items()}
    assert grown == {
        **{("requests", "acme"): 1, ("prompt_tokens", "acme"): 130, ("generation_tokens", "acme"): 10},
        **{(name, other): 0 for name in NAMES for other in ("zeta", "operator")},
    }


def counts(server):
    """The metrics of every tenant, as the operator sees them."""
    text = httpx.get(server.url + "/metrics", headers=bearer(OPERATOR)).text
    found = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("dsv3:tenant_"):
            tenant = name.partition('tenant="')[2].partition('"')[0]
            found[name.removeprefix("dsv3:tenant_").partition("_total")[0], tenant] = float(value)
    return found


def test_the_access_log_has_the_tenant_but_no_key(shared):
    path = "/v1/models"
    for key in (ACME, "sk-unknown"):
        httpx.get(shared.url + path, headers=bearer(key) | {"x-request-id": f"of-{key[:7]}"})
    shared.wait_for(lambda: shared.log.read_text().count('"of-') == 2)
    lines = [json.loads(line) for line in shared.log.read_text().splitlines() if '"of-' in line]
    assert [(line["status"], line["tenant"]) for line in lines] == [(200, "acme"), (401, None)]
    assert not any(key in shared.log.read_text() for key in (ACME, ZETA, OPERATOR))


def test_keys_are_reloaded_in_every_api_server_during_streams(shared):
    """The last test of this server, whose keys it replaces."""

    def statuses(key):
        """The statuses of many requests on new connections, which reach both API servers."""
        with httpx.Client(base_url=shared.url, headers=bearer(key) | {"connection": "close"}, timeout=30) as client:
            return {client.get("/v1/models").status_code for _ in range(12)}

    body = {"prompt": [5, 6, 7], "max_tokens": 1500, "stream": True}
    with httpx.stream("POST", shared.url + COMPLETIONS, json=body, headers=bearer(ACME), timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        write(shared.keys, f"new {BARE}\noperator {OPERATOR}\nzeta {ZETA}\n")
        os.kill(shared.process.pid, signal.SIGHUP)
        shared.wait_for(lambda: statuses(BARE) == {200} and statuses(ACME) == {401})
        assert statuses(ZETA) == {200}
        assert [line for line in lines if line][-1] == "data: [DONE]"
    before = counts(shared)
    assert before["generation_tokens", "acme"] >= 1500
    shared.keys.write_text("two keys\nin a bad file\n")
    os.kill(shared.process.pid, signal.SIGHUP)
    shared.wait_for(lambda: "the old API keys stay in use: api_key_file" in shared.log.read_text())
    assert statuses(BARE) == {200}
    httpx.post(shared.url + COMPLETIONS, json=BODY, headers=bearer(BARE))
    assert {key for key, value in counts(shared).items() if value != before[key]} == {(name, "new") for name in NAMES}
