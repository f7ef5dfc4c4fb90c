"""Why pages do not travel by `jax.experimental.transfer` (docs/disaggregation.md): who asks is not known to it."""

import re

import jax.experimental.transfer as transfer


def test_jax_neither_authenticates_nor_encrypts_what_it_transfers():
    """Where this fails, jax has learned it: measure it beside the sockets and NIXL (`benchmarks.nixl_transfer`)."""
    told = transfer.start_transfer_server.__doc__ or ""
    assert "transport_addresses" in told
    assert not re.search(r"key|cert|ssl|tls|secret|credential|auth|token", told, re.IGNORECASE)
