"""The certificate and the key of a server that speaks HTTPS."""

from __future__ import annotations

import ssl
from pathlib import Path


def tls_context(certfile: Path, keyfile: Path | None) -> ssl.SSLContext:
    """From PEM files; without `keyfile`, `certfile` has the key too. Raises ValueError that names the file at fault."""
    _check(certfile, "ssl_certfile", b"CERTIFICATE-----", "no certificate in PEM format")
    if keyfile is None:
        _check(
            certfile, "ssl_certfile", b"PRIVATE KEY-----", "no private key; name it as ssl_keyfile"
        )
    else:
        _check(keyfile, "ssl_keyfile", b"PRIVATE KEY-----", "no private key in PEM format")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certfile, keyfile)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or error
        raise ValueError(
            f"ssl_certfile={str(certfile)!r} cannot be used with the key in {str(keyfile or certfile)!r}: {reason}"
        ) from None
    return context


def _check(file: Path, option: str, marker: bytes, lacks: str) -> None:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{option}={str(file)!r} cannot be read: {error.strerror}") from None
    if marker not in data:
        raise ValueError(f"{option}={str(file)!r} has {lacks}")
