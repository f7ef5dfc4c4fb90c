"""TLS on the listener: certificate and key, read anew when somebody says so."""

import logging
import ssl

from dsv3.config.server_options import ServerOptions

_log = logging.getLogger("dsv3.server")


class Certificate:
    """What new connections prove who we are with; ValueError for files that cannot be used."""

    def __init__(self, options: ServerOptions):
        self._options = options
        try:
            self.context = _context(options)
        except OSError as error:
            raise ValueError(f"ssl_certfile: {_problem(options, error)}") from None

    def reload(self) -> None:
        """Reads the files anew; the connections that there are keep what they have, and all do if the files are bad."""
        try:
            self.context = _context(self._options)
        except OSError as error:
            _log.error("the old certificate stays: %s", _problem(self._options, error))
        else:
            _log.info("the certificate has been read anew")


def certificate_of(options: ServerOptions) -> Certificate | None:
    """Returns the certificate that the options name, None where they ask for no TLS."""
    return None if options.ssl_certfile is None else Certificate(options)


def _context(options: ServerOptions) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    assert options.ssl_certfile is not None
    context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password="")  # nobody is there to be asked
    if options.ssl_ca_certs is not None:
        context.load_verify_locations(options.ssl_ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _problem(options: ServerOptions, error: OSError) -> str:
    named = [options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs]
    return f"{' and '.join(name for name in named if name)} cannot be used ({error.strerror or error})"
