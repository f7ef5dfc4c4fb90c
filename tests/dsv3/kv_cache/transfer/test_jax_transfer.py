"""Why pages do not travel by `jax.experimental.transfer` (docs/disaggregation.md): it does not authenticate."""

import re

import jax.experimental.transfer as transfer


def test_jax_neither_authenticates_nor_encrypts_what_it_transfers():
    """If this fails, jax may authenticate now: compare it with sockets and NIXL then."""
    doc = transfer.start_transfer_server.__doc__ or ""
    assert "transport_addresses" in doc
    assert not re.search(r"key|cert|ssl|tls|secret|credential|auth|token", doc, re.IGNORECASE)
