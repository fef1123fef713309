"""Reads the certificate with which the page speaks TLS: the user's own, or one that is made in the folder of keys."""

import os
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from serl_client.connection import is_local, tcp
from serl_client.errors import ConfigError
from serl_client.keys import private_text

MADE = "page.pem"  # in the folder of keys: a certificate and its private key
LIFE = timedelta(days=825)  # of one that we make: Apple's systems take none that lasts longer
CURE = "Make one PEM file of both: cat fullchain.pem privkey.pem > FILE; chmod 600 FILE"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A server's side of TLS. names: to which it answers. fingerprint: SHA-256, as browsers show it."""

    context: ssl.SSLContext
    names: tuple[str, ...]
    fingerprint: str
    is_over: bool

    @property
    def name(self) -> str:
        """Return the first name by which another machine may reach it; "": there is none."""
        return next((name for name in self.names if "*" not in name and not is_local(tcp(name, 0))), "")


def opened(host: str, keys: Path | None, certificate: Path | None) -> Certificate | None:
    """Return the certificate of a page that listens on this host; None: it is loopback's, and speaks HTTP.

    keys: the folder of tools/keys.py. certificate: the user's own; None: one of that folder, made if it is not there.
    Raises ConfigError, with what to do, for a host that needs keys, a certificate that is not good, a missing package.
    """
    is_here = is_local(tcp(host, 0))
    if keys is None and not is_here:
        raise ConfigError(
            f"page_host={host}: without keys the page is for this machine alone. Make one for each person with "
            "tools/keys.py page NAME --role operator, and say keys=keys; or leave page_host out, and go through SSH "
            "(docs/guides/page.md)"
        )
    try:
        if certificate is not None:
            return own(certificate)
        return None if keys is None or is_here else made(keys, host)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"TLS of the page needs {error.name}: run `. examples/install.sh --extra page` here"
        ) from None


def wanted(config: DictConfig) -> dict[str, Any]:
    """Return what `opened` takes, as the run's config says it."""
    files = {name: Path(config[word]) if config[word] else None
             for name, word in (("keys", "keys"), ("certificate", "page_certificate"))}  # fmt: skip
    return {"host": config.page_host, **files}


def own(file: Path) -> Certificate:
    """Return the user's certificate. Raises ConfigError if it is none, if it is over, or if others may read it."""
    if (found := _read(file)).is_over:
        raise ConfigError(f"page_certificate={file}: its time is over, or has not begun: renew it")
    return found


def made(keys: Path, host: str) -> Certificate:
    """Return the certificate of a folder of keys. It is made for this host if there is none, or if it is over."""
    file = keys / MADE
    try:
        if file.exists() and not (found := _read(file)).is_over:
            return found
        file.unlink(missing_ok=True)
        _make(file, host)
    except OSError as error:
        raise ConfigError(f"cannot make {file} ({error.strerror}): make room, or say page_certificate=FILE") from None
    return _read(file)


def _read(file: Path) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # it knows no renegotiation, by which a client costs CPU
    try:
        text = private_text(file, CURE)
        context.load_cert_chain(file, password="")  # nobody is asked for one
        found = x509.load_pem_x509_certificates(text.encode())[0]
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"{file} is no certificate with its private key, or has no names ({error}). {CURE}") from None
    told = tuple(str(each.value).lower() for each in names)
    is_over = not found.not_valid_before_utc <= datetime.now(UTC) < found.not_valid_after_utc
    fingerprint = found.fingerprint(SHA256()).hex(":").upper()
    return Certificate(context, told, fingerprint, is_over)


def _make(file: Path, host: str) -> None:
    """Write a new certificate that is signed by itself, with its key, readable by its user alone."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    here, addresses = socket.gethostname(), (reached_at(host), "127.0.0.1", "::1")
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Retake's page")])
    names = x509.SubjectAlternativeName([
        *(x509.IPAddress(ip_address(each)) for each in dict.fromkeys(addresses) if _is_address(each)),
        *(x509.DNSName(each) for each in (host, here, f"{here}.local", "localhost")
          if each.isascii() and not _is_address(each)),
    ])  # fmt: skip
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + LIFE - timedelta(days=1)).add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(certificate.public_bytes(pem) + key.private_bytes(pem, *plain))
    with suppress(FileExistsError):  # another learner with these keys has made it meanwhile: one is for both
        os.link(aside, file)
    aside.unlink()


def reached_at(host: str) -> str:
    """Return the address at which others reach a server that listens on `host`: of all of them, the default route's."""
    if not _is_address(host) or not ip_address(host).is_unspecified:
        return host
    family, elsewhere = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((elsewhere, 9))  # nothing is sent
        return str(probe.getsockname()[0])
    return socket.gethostname()


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(host))
    return False
