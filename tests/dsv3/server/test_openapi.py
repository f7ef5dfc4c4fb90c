"""The OpenAPI description lists all routes, and their responses match it."""

import json
from types import SimpleNamespace

import pytest

from dsv3.sampling_params import SamplingParams
from dsv3.server.http.app import make_router
from dsv3.server.http.openapi import OPERATIONS, openapi, openapi_path

DESCRIBED = json.loads(openapi(tuple(OPERATIONS)))
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY")
MESSAGES = [{"role": "user", "content": "x"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/completions": {"prompt": "x", "max_tokens": 3},
    "/v1/responses": {"input": "x", "max_output_tokens": 3},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
    "/v1/batches": {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"},
}
JSON = "application/json"


def place(path):
    """A path of the description with values for its parameters."""
    return path.replace("{model}", "of/nobody").replace("{id}", "none")


def body_of(path):
    """The resolved schema of a route's JSON body."""
    schema = DESCRIBED["paths"][path]["post"]["requestBody"]["content"][JSON]["schema"]
    return DESCRIBED["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


def test_every_route_is_described(server):
    answer = server.http.get("/openapi.json")
    assert answer.status_code == 200 and answer.json() == DESCRIBED
    routes = make_router(SimpleNamespace()).routes
    served = {(method, openapi_path(route.path)) for route in routes for method in route.methods - {"HEAD"}}
    assert set(OPERATIONS) == served
    assert DESCRIBED["openapi"].startswith("3.1")


def test_every_reference_resolves():
    text = json.dumps(DESCRIBED)
    found = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert found and found <= set(DESCRIBED["components"]["schemas"])


def test_operation_ids_are_unique():
    operations = [each for item in DESCRIBED["paths"].values() for each in item.values()]
    for name in ("operationId", "summary"):
        assert len({each[name] for each in operations}) == len(operations)
    assert {tag for each in operations for tag in each["tags"]} == {each["name"] for each in DESCRIBED["tags"]}
    missing = {path: item["get"]["responses"].get("404") for path, item in DESCRIBED["paths"].items() if "get" in item}
    assert missing["/health"] is None and missing["/metrics"] is None
    assert "file" in missing["/v1/files/{id}"]["description"] and "batch" in missing["/v1/batches/{id}"]["description"]


def test_the_description_needs_the_key(locked_server):
    assert locked_server.http.get("/openapi.json").status_code == 401


@pytest.mark.parametrize("path", DESCRIBED["paths"])
def test_other_methods_get_405_with_allow(server, path):
    """RFC 9110, 15.5.6: a 405 lists the supported methods, and so does the description."""
    item = DESCRIBED["paths"][path]
    for method in METHODS:
        if method.lower() not in item:
            answer = server.http.request(method, place(path))
            allowed = {each for each in answer.headers.get("allow", "").split(", ") if each != "HEAD"}
            assert (answer.status_code, allowed) == (405, {each.upper() for each in item})
    for operation in item.values():
        assert operation["responses"]["405"]["headers"]["Allow"]["required"]


@pytest.mark.parametrize("path", BODIES)
def test_required_fields_are_described_as_required(server, path):
    required = set(body_of(path).get("required", ()))
    refused = set()
    for name in BODIES[path]:
        body = {key: value for key, value in BODIES[path].items() if key != name}
        answer, null = (server.http.post(path, json=given) for given in (body, body | {name: None}))
        if answer.status_code == 400:
            assert null.status_code == 400 and name in answer.text
            refused.add(name)
    if path == "/tokenize":
        assert refused == {"prompt"} and {"required": ["prompt"]} in body_of(path)["oneOf"]
    elif path == "/v1/batches":  # without --batch_dir nothing is read
        assert required == set(BODIES[path])
    else:
        assert refused == required


@pytest.mark.parametrize("name", [name for name in SamplingParams.__struct_fields__ if name not in ("n", "logprobs")])
def test_described_bounds_of_sampling_are_enforced(name):
    """Both ends of a described range are accepted, and values beyond are rejected."""
    schema = DESCRIBED["components"]["schemas"]["CompletionRequest"]["properties"].get(name, {})
    bounds = schema.get("anyOf", [{}])[0]
    if name in ("temperature", "top_p", "top_k", "min_p", "min_tokens", "max_tokens") or name.endswith("_penalty"):
        assert "maximum" in bounds
    for end, sign in (("minimum", -1), ("maximum", 1)):
        if end in bounds and name != "seed":
            if (name, end) != ("max_tokens", "minimum"):  # 0 with echo alone
                SamplingParams(**{name: bounds[end]})
            with pytest.raises(ValueError, match=name):
                SamplingParams(**{name: bounds[end] + sign})
    if "exclusiveMinimum" in bounds:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: bounds["exclusiveMinimum"]})


def test_every_body_is_described():
    posts = {path for path, item in DESCRIBED["paths"].items() if "requestBody" in item.get("post", {})}
    operated = {"/update_weights_from_disk", "/pause_generation", "/continue_generation"}
    assert posts == {*BODIES, "/v1/files", *operated}
    form = DESCRIBED["paths"]["/v1/files"]["post"]["requestBody"]["content"]
    assert set(form) == {"multipart/form-data"}


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_statuses_and_types_are_described(server, locked_server, method, path):
    """Sends valid and empty requests, other content types, without a key, and across origins."""
    described = DESCRIBED["paths"][path][method.lower()]["responses"]
    tries = [{}, {"json": BODIES.get(path, {})}, {"json": []}, {"content": b"x", "headers": {"content-type": "x/y"}}]
    tries += [{"headers": {"host": "evil.example"}}, {"headers": {"origin": "http://evil.example"}}]
    tries += [{"json": {"model": "of nobody"} | BODIES.get(path, {})}, {"params": {"limit": "x", "after": "x"}}]
    answers = [server.http.request(method, place(path), **each) for each in tries]
    answers.append(locked_server.http.request(method, place(path)))
    for answer in answers:
        assert str(answer.status_code) in described, (answer.status_code, answer.text)
        kind = answer.headers["content-type"].partition(";")[0]
        assert kind in described[str(answer.status_code)]["content"]
