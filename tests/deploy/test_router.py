"""The router's manifest starts what it says, in front of instances that there are."""

import pathlib
import re
import urllib.parse

import pytest
from absl import flags as absl_flags

from launch import cli, flags
from router import app
from router.options import RouterOptions
from tests.deploy.files import documents, manifests

ENDING_S = 20.0


@pytest.fixture(scope="module")
def deployment() -> dict:
    return documents("kubernetes/router/router.yaml")[0]["spec"]


@pytest.fixture(scope="module")
def container(deployment) -> dict:
    [found] = deployment["template"]["spec"]["containers"]
    return found


@pytest.fixture(scope="module")
def options(container) -> RouterOptions:
    values = absl_flags.FlagValues()
    cli.define(RouterOptions, values)
    flags.parse(["router", *container["args"]], "", values)
    return cli.read(RouterOptions, values)


def test_its_command_is_the_routers(container, options) -> None:
    assert container["command"] == ["python", "-m", "launch.router"]
    assert container["ports"] == [{"name": "http", "containerPort": options.port}]
    assert options.host == "0.0.0.0" and options.api_key_file and options.ssl_certfile


def test_its_instances_are_services_of_ours(options) -> None:
    services = {each["metadata"]["name"]: each["spec"] for _, each in manifests() if each["kind"] == "Service"}
    for url in options.prefill + options.decode:
        parts = urllib.parse.urlsplit(url)
        assert parts.port in [port["port"] for port in services[parts.hostname]["ports"]] and parts.scheme == "https"


def test_its_files_are_secrets_that_are_not_for_others(deployment, container, options) -> None:
    pod = deployment["template"]["spec"]
    volumes = {each["name"]: each["secret"] for each in pod["volumes"]}
    mounts = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
    files = [
        value for name, value in vars(options).items() if name.endswith(("_file", "certfile", "keyfile")) and value
    ]
    assert {str(pathlib.Path(file).parent) for file in files} == set(mounts) and len(files) == 5
    assert all(secret["defaultMode"] == 0o440 for secret in volumes.values())
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["fsGroup"]


def test_it_ends_within_its_time_and_is_not_killed_for_want_of_instances(deployment, container, options) -> None:
    [_, pause] = container["lifecycle"]["preStop"]["exec"]["command"]
    ready = container["readinessProbe"]
    assert int(pause) > ready["failureThreshold"] * (ready["periodSeconds"] + ready["timeoutSeconds"])
    within = deployment["template"]["spec"]["terminationGracePeriodSeconds"]
    assert int(pause) + options.shutdown_timeout + ENDING_S <= within
    assert "tcpSocket" in container["livenessProbe"] and "tcpSocket" in ready
    assert container["startupProbe"]["httpGet"] == {"path": "/health", "port": "http", "scheme": "HTTPS"}
    assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_prometheus_reads_it_and_clients_reach_it(deployment) -> None:
    labels = deployment["template"]["metadata"]["labels"]
    [monitor] = documents("kubernetes/router/monitoring.yaml")
    [_, service] = documents("kubernetes/router/router.yaml")
    assert deployment["selector"]["matchLabels"] == monitor["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    paths = re.findall(r'"(/[a-z]+)"', pathlib.Path(app.__file__).read_text())
    assert endpoint["path"] in paths and "/health" in paths and endpoint["port"] == "http"
