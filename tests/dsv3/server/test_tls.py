"""TLS: certificates, those that change while the server runs, and clients that never finish."""

import contextlib
import dataclasses
import datetime
import ipaddress
import json
import os
import signal
import socket
import ssl

import httpx
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from dsv3.config.server_options import ServerOptions
from dsv3.server.http.http_server import Certificate
from tests.dsv3.server import serving

COMPLETIONS = "/v1/completions"


def make_certificate(directory, name):
    """A self-signed certificate for localhost, and its key beside it."""
    path, key, now = (
        directory / f"{name}.pem",
        ec.generate_private_key(ec.SECP256R1()),
        datetime.datetime.now(datetime.UTC),
    )
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    builder = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=9))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    )
    path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    path.with_name(f"{path.name}.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    directory = tmp_path_factory.mktemp("certificates")
    return make_certificate(directory, "first"), make_certificate(directory, "second")


def install(directory, certificate):
    """Puts a certificate and its key where a server looks for them."""
    for suffix in ("", ".key"):
        (directory / f"server.pem{suffix}").write_bytes(certificate.with_name(certificate.name + suffix).read_bytes())
    return {"ssl_certfile": str(directory / "server.pem"), "ssl_keyfile": str(directory / "server.pem.key")}


@contextlib.contextmanager
def running(model_dir, options, **settings):
    with serving.running(model_dir, ready=False, options=options, **settings) as server:
        server.url = server.url.replace("http:", "https:")
        server.http = httpx.Client(base_url=server.url, verify=False, timeout=30)
        server.wait_ready()
        yield server


def shown(server):
    """The certificate that a new connection is shown."""
    return ssl.get_server_certificate(("127.0.0.1", server.port), timeout=30).split()


def test_certificates_change_in_every_front_while_streams_go_on(model_dir, tmp_path, certificates):
    first, second = certificates
    options = install(tmp_path, first) | {"api_server_count": 2}
    with running(model_dir, options, factory_options={"step_s": 0.005}) as server:
        assert "ready\n" in iter(server.process.stdout.readline, ""), "both fronts have read the first certificate"
        trust = ssl.create_default_context(cafile=first)
        assert httpx.get(server.url + "/health", verify=trust).status_code == 200
        body = {"prompt": [5, 6, 7], "max_tokens": 300, "stream": True}
        with server.http.stream("POST", COMPLETIONS, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            install(tmp_path, second)
            os.kill(server.process.pid, signal.SIGHUP)
            server.wait_for(lambda: all(shown(server) == second.read_text().split() for _ in range(20)))
            assert [line for line in lines if line][-1] == "data: [DONE]"
        (tmp_path / "server.pem").write_text("damaged")
        os.kill(server.process.pid, signal.SIGHUP)
        server.wait_for(lambda: server.log.read_text().count("the old certificate stays") == 2)
        assert shown(server) == second.read_text().split()


def test_large_bodies_and_answers_cross_tls(model_dir, tmp_path, certificates):
    with running(model_dir, install(tmp_path, certificates[0])) as server:
        body = {"prompt": [5, 6], "max_tokens": 2000, "n": 16, "return_token_ids": True, "user": "u" * 1_000_000}
        answer = server.http.post(COMPLETIONS, json=body).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == [[5, 6] * 1000] * 16
        refused = server.http.post(COMPLETIONS, content=b"x" * 2_000_000, headers={"content-type": "text/plain"})
        assert refused.status_code == 415


def test_a_client_that_does_not_shake_hands_is_cut_off(model_dir, tmp_path, certificates):
    options = install(tmp_path, certificates[0])
    deadlines = {"head_s": 0.5, "keep_alive_s": 60, "write_s": 60, "linger_s": 0.1}
    with running(model_dir, options, deadlines=deadlines) as server:
        with socket.create_connection(("127.0.0.1", server.port), 30) as silent:
            assert silent.recv(100) == b""
        with socket.create_connection(("127.0.0.1", server.port), 30) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"HTTP" not in plain.recv(100)
        context = ssl.create_default_context(cafile=certificates[0])
        with context.wrap_socket(
            socket.create_connection(("127.0.0.1", server.port), 30), server_hostname="localhost"
        ) as s:
            assert s.recv(100) == b""
        assert server.http.get("/health").status_code == 200
        assert "Traceback" not in server.log.read_text()


def connect(server, certificate):
    context = ssl.create_default_context(cafile=certificate)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", server.port))
    return context.wrap_socket(connection, server_hostname="localhost")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_cut_off(model_dir, tmp_path, certificates, stream):
    deadlines = {"head_s": 60, "keep_alive_s": 60, "write_s": 0.5, "linger_s": 0.1}
    with running(model_dir, install(tmp_path, certificates[0]), deadlines=deadlines) as server:
        body = {"prompt": [5, 6], "max_tokens": 2000, "n": 32, "logprobs": 5, "stream": stream}
        data = json.dumps(body).encode()
        with connect(server, certificates[0]) as client:
            port = client.getsockname()[1]
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            client.sendall(head + b"content-length: %d\r\n\r\n%b" % (len(data), data))
            server.wait_for(lambda: server.metric("vllm:num_requests_running") > 0)
            process = psutil.Process(server.process.pid)
            server.wait_for(lambda: all(c.raddr.port != port for c in process.net_connections() if c.raddr))
        server.wait_for(server.is_idle)


def test_clients_need_a_certificate_where_authorities_are_named(model_dir, tmp_path, certificates):
    first, second = certificates
    options = install(tmp_path, first) | {"ssl_ca_certs": str(second)}
    with serving.running(model_dir, ready=False, options=options) as server:
        trust = ssl.create_default_context(cafile=first)
        trust.load_cert_chain(second, f"{second}.key")
        url = server.url.replace("http:", "https:") + "/health"
        server.wait_for(lambda: httpx.get(url, verify=trust).status_code == 200)
        with pytest.raises(httpx.HTTPError):
            httpx.get(url, verify=ssl.create_default_context(cafile=first))


def test_files_that_cannot_be_used_are_named(tmp_path, certificates):
    options = ServerOptions(**install(tmp_path, certificates[0]))
    Certificate(options)
    other = install(tmp_path, certificates[1])["ssl_keyfile"]
    for wrong in ({"ssl_certfile": str(tmp_path / "none")}, {"ssl_certfile": other}, {"ssl_ca_certs": other}):
        with pytest.raises(ValueError, match=next(iter(wrong.values()))):
            Certificate(dataclasses.replace(options, **wrong))
    with pytest.raises(ValueError, match="ssl_keyfile: 'x' needs ssl_certfile"):
        ServerOptions(ssl_keyfile="x")
