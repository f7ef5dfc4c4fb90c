"""Mutual TLS between the processes of an instance, from a shared secret.

Each process derives the same certificate authority from the secret and signs a key pair of its own with it. A peer
with a certificate of this authority, and its private key, therefore knows the secret. Nothing is stored.
"""

import atexit
import dataclasses
import datetime
import functools
import hashlib
import hmac
import os
import shutil
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

IDENTITY = "dsv3://instance/"
"""Prefix of a process's URI in its certificate."""

# NIST P-256: BoringSSL, which carries jax's coordinator, does not take Ed25519 by default.
_CURVE = ec.SECP256R1()
_CURVE_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
# A certificate lives as long as its process. The wide range keeps hosts with wrong clocks connected.
_VALID = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)


@dataclasses.dataclass(frozen=True)
class Credentials:
    """Paths of PEM files: a process's certificate, its private key, and its authority's certificate.

    The files exist as long as the process, since jax's coordinator reads them repeatedly. On Linux they are in memory.
    """

    certificate: str
    private_key: str
    authority: str


@functools.cache
def credentials_of(secret: bytes) -> Credentials:
    """Returns this process's credentials in the instance that shares `secret`."""
    authority_key = _authority_key(secret)
    own_key = ec.generate_private_key(_CURVE)
    return Credentials(
        certificate=_in_memory(_certificate("process", own_key.public_key(), authority_key)),
        private_key=_in_memory(own_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())),
        authority=_in_memory(_certificate("authority", authority_key.public_key(), authority_key)),
    )


@functools.cache
def tls_context(credentials: Credentials, is_server: bool) -> ssl.SSLContext:
    """Returns a context for TLS 1.3 that requires a certificate of the secret's authority from the peer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the authority identifies the instance
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cafile=credentials.authority)
    context.load_cert_chain(credentials.certificate, credentials.private_key)
    if is_server:
        context.num_tickets = 0  # no session resumption
    return context


def _authority_key(secret: bytes) -> ec.EllipticCurvePrivateKey:
    number = int.from_bytes(hmac.digest(secret, b"certificate authority", hashlib.sha512), "big")
    return ec.derive_private_key(number % (_CURVE_ORDER - 1) + 1, _CURVE)


def _certificate(name: str, key: ec.EllipticCurvePublicKey, authority_key: ec.EllipticCurvePrivateKey) -> bytes:
    is_authority = name == "authority"
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name("authority"))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_VALID[0])
        .not_valid_after(_VALID[1])
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    if not is_authority:
        identity = x509.UniformResourceIdentifier(IDENTITY + name)
        builder = builder.add_extension(x509.SubjectAlternativeName([identity]), critical=False)
    return builder.sign(authority_key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"dsv3 {text}")])


def _in_memory(content: bytes) -> str:
    """Returns the path of a file that only this process's user can open, and that ends with the process.

    Outside of Linux it is in a temporary directory, where a killed process leaves it.
    """
    if not hasattr(os, "memfd_create"):
        directory = tempfile.mkdtemp(prefix="dsv3-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        path = Path(directory) / "credential.pem"
        path.write_bytes(content)
        return str(path)
    descriptor = os.memfd_create("dsv3")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return f"/proc/self/fd/{descriptor}"
