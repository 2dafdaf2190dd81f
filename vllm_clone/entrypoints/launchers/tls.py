"""TLS: the files are tried before anything slow begins, and may be followed when they change."""

import asyncio
import contextlib
import os
import ssl
from collections.abc import Sequence
from typing import Any

from vllm_clone.config import FrontendConfig
from vllm_clone.errors import ConfigError
from vllm_clone.logger import init_logger

logger = init_logger(__name__)

REFRESH_SECONDS = 1.0
"""How often certificate files are looked at."""


def tls_options(frontend: FrontendConfig) -> dict[str, Any]:
    """uvicorn's TLS settings; {} without a certificate.

    Raises:
        ConfigError: the files cannot be used; before anything slow has begun.
    """
    if frontend.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers"):
            if getattr(frontend, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')}: TLS needs --ssl-certfile too.")
        if frontend.enable_ssl_refresh:
            raise ConfigError("--enable-ssl-refresh: there is nothing to refresh without --ssl-certfile.")
        return {}
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), frontend)
    if frontend.ssl_cert_reqs and frontend.ssl_ca_certs is None:
        raise ConfigError(
            f"--ssl-cert-reqs {frontend.ssl_cert_reqs}: client certificates are checked against --ssl-ca-certs; "
            "give that too."
        )
    return {
        "ssl_keyfile": frontend.ssl_keyfile,
        "ssl_certfile": frontend.ssl_certfile,
        "ssl_ca_certs": frontend.ssl_ca_certs,
        "ssl_cert_reqs": frontend.ssl_cert_reqs,
        "ssl_ciphers": frontend.ssl_ciphers,
    }


def _load(context: ssl.SSLContext, frontend: FrontendConfig) -> None:
    """Read key, certificate and CA files into a context."""
    assert frontend.ssl_certfile is not None
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(frontend, name)
        try:
            if path is not None:
                with open(path, "rb"):
                    pass
        except OSError as error:
            raise ConfigError(f"--{name.replace('_', '-')} {path}: {error.strerror}.") from error
    try:
        context.load_cert_chain(frontend.ssl_certfile, frontend.ssl_keyfile)
    except (ssl.SSLError, OSError) as error:
        names = f"--ssl-certfile {frontend.ssl_certfile} and --ssl-keyfile {frontend.ssl_keyfile}"
        raise ConfigError(f"{names} are no certificate and its key in PEM form ({error}).") from error
    try:
        if frontend.ssl_ca_certs is not None:
            context.load_verify_locations(frontend.ssl_ca_certs)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"--ssl-ca-certs {frontend.ssl_ca_certs}: no certificates in PEM form ({error}).") from error
    try:
        if frontend.ssl_ciphers is not None:
            context.set_ciphers(frontend.ssl_ciphers)
    except ssl.SSLError as error:
        raise ConfigError(f"--ssl-ciphers {frontend.ssl_ciphers}: no such cipher.") from error


async def follow_files(context: ssl.SSLContext, frontend: FrontendConfig) -> None:
    """Read the certificate files again whenever they change; new connections use what they hold then."""
    paths = [p for p in (frontend.ssl_certfile, frontend.ssl_keyfile, frontend.ssl_ca_certs) if p is not None]
    seen = _stamps(paths)
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        now = _stamps(paths)
        if now == seen:
            continue
        seen = now
        try:
            _load(context, frontend)
        except ConfigError as error:  # half written, perhaps; the next change tells
            logger.warning("The TLS files have changed but cannot be used, the old ones stay: %s", error)
        else:
            logger.info("The TLS files have changed and are in use.")


def _stamps(paths: Sequence[str]) -> list[tuple[int, int]]:
    stamps = []
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            stamps.append((status.st_mtime_ns, status.st_size))
    return stamps
