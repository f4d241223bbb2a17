"""PEM files that a listener or a client is given: read once, proved usable, their dates known.

Invariants:
- OpenSSL decides what a certificate and a key are and whether they belong together. What is read
  here are the two dates of a certificate that OpenSSL has accepted: no public function of the
  standard library tells them (docs/decisions/0006-certificate-dates.md).
- Every problem is a BadCredentials that names the file. No content of a key is ever in a message.
"""

from __future__ import annotations

import re
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from mlxd_shared import config
from mlxd_shared.domain.errors import BadCredentials
from mlxd_shared.ops.logs import get_logger

EXPIRY_WARNING = timedelta(days=14)
"""A certificate that ends sooner than this is named in the log at start."""

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_TIME_FORMATS = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}
_log = get_logger("security")


@dataclass(frozen=True, slots=True)
class Validity:
    """When a certificate is good, both ends included."""

    not_before: datetime
    not_after: datetime


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate chain, leaf first, and its private key; both as PEM."""

    certificates: bytes
    key: bytes
    not_after: datetime
    """When the leaf expires."""

    def __repr__(self) -> str:
        """Leave the key out."""
        return f"Identity(not_after={self.not_after.isoformat()})"


def load_identity(certificate: Path, key: Path) -> Identity:
    """Return what a server or client shows of itself.

    Raises:
        BadCredentials: a file is missing, too large or not PEM, the key is encrypted or belongs to
            another certificate, or the certificate has expired or is not valid yet.
    """
    chain = read_credential(certificate)
    leaf, *others = _certificates(certificate, chain)
    secret = read_secret(key)
    _check_pair(certificate, key)
    now = datetime.now(UTC)
    _check_dates(certificate, leaf, now)
    for other in others:
        # A peer may know a better path to its root: an old certificate here need not be fatal.
        if other.not_after < now:
            _log.warning("an intermediate certificate has expired", file=str(certificate),
                         expired=_day(other.not_after))  # fmt: skip
    return Identity(chain, secret, leaf.not_after)


def load_authorities(path: Path) -> bytes:
    """Return the PEM of the certificate authorities in `path`, at least one of them valid now.

    Raises:
        BadCredentials: the file is missing, too large or not PEM, or all in it have expired.
    """
    content = read_credential(path)
    authorities = _certificates(path, content)
    latest = max(authority.not_after for authority in authorities)
    if latest < datetime.now(UTC):
        raise BadCredentials(str(path), f"every authority in it has expired, on {_day(latest)}")
    return content


def read_secret(path: Path) -> bytes:
    """Return a file as `read_credential` does; one that all users may read is named in the log."""
    content = read_credential(path)
    if path.stat().st_mode & stat.S_IROTH:
        _log.warning("a secret that every user can read", file=str(path), advice="chmod 600")
    return content


def read_credential(path: Path) -> bytes:
    """Return a file's content: 1 to CREDENTIAL_FILE_BYTES_MAX bytes of a regular file.

    Raises:
        BadCredentials: it is none, or cannot be read.
    """
    try:
        if not path.is_file():
            raise BadCredentials(str(path), "there is no such file")
        with path.open("rb") as file:
            content = file.read(config.CREDENTIAL_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadCredentials(str(path), f"cannot be read: {error.strerror}") from error
    if not 1 <= len(content) <= config.CREDENTIAL_FILE_BYTES_MAX:
        limit = f"1 to {config.CREDENTIAL_FILE_BYTES_MAX} bytes are read"
        raise BadCredentials(str(path), f"is empty or too large; {limit}")
    return content


def validity(der: bytes) -> Validity:
    """Return the dates of a certificate that OpenSSL has accepted.

    Raises:
        ValueError: it is not the DER of a certificate.
    """
    outer = _first(der, 0, len(der))
    to_be_signed = _first(der, outer.start, outer.end)
    fields = [item for item in _items(der, to_be_signed.start, to_be_signed.end)
              if item.tag != _VERSION]  # fmt: skip
    # serial number, signature algorithm, issuer, validity, ...
    if len(fields) < 4 or fields[3].tag != _SEQUENCE:
        raise ValueError("no validity where a certificate has it")
    not_before, not_after = (
        _time(der, item) for item in _items(der, fields[3].start, fields[3].end)
    )
    return Validity(not_before, not_after)


@dataclass(frozen=True, slots=True)
class _Item:
    """One DER value: its tag, and where its content is."""

    tag: int
    start: int
    end: int


def _items(der: bytes, at: int, end: int) -> Iterator[_Item]:
    """Yield the values that lie one after the other in [at, end)."""
    while at < end:
        if at + 2 > end:
            raise ValueError("a value is cut off")
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            size = length & 0x7F
            length, at = int.from_bytes(der[at : at + size], "big"), at + size
        if at + length > end:
            raise ValueError("a value is longer than what holds it")
        yield _Item(tag, at, at + length)
        at += length


def _first(der: bytes, at: int, end: int) -> _Item:
    for item in _items(der, at, end):
        return item
    raise ValueError("a value holds nothing")


def _time(der: bytes, item: _Item) -> datetime:
    if item.tag not in _TIME_FORMATS:
        raise ValueError("an invalid date")
    text = der[item.start : item.end].decode("ascii")
    moment = datetime.strptime(text, _TIME_FORMATS[item.tag]).replace(tzinfo=UTC)
    if item.tag == _UTC_TIME and moment.year >= 2050:  # two digits of a year mean 1950 to 2049
        moment = moment.replace(year=moment.year - 100)
    return moment


def _certificates(path: Path, content: bytes) -> list[Validity]:
    """Return the dates of every certificate in the PEM, in its order; at least one."""
    blocks = _BLOCK.findall(content)
    if not blocks:
        raise BadCredentials(str(path), "holds no PEM certificate")
    periods = []
    for number, block in enumerate(blocks, start=1):
        try:
            der = ssl.PEM_cert_to_DER_cert(block.decode("ascii"))
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=der)
            periods.append(validity(der))
        except (ssl.SSLError, ValueError) as error:
            raise BadCredentials(str(path), f"certificate {number} is damaged") from error
    return periods


def _check_pair(certificate: Path, key: Path) -> None:
    def ask() -> str:
        raise BadCredentials(str(key), "is encrypted; give a key without a passphrase")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=ask)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise BadCredentials(str(key), f"belongs to another certificate than {certificate}"
                                 ) from error  # fmt: skip
        raise BadCredentials(str(key), "is not a private key in PEM, or a weak one") from error


def _check_dates(path: Path, leaf: Validity, now: datetime) -> None:
    if leaf.not_after < now:
        raise BadCredentials(str(path), f"the certificate has expired on {_day(leaf.not_after)}")
    if now < leaf.not_before:
        raise BadCredentials(str(path), f"the certificate is valid from {_day(leaf.not_before)}")
    if leaf.not_after - now < EXPIRY_WARNING:
        _log.warning("the certificate expires soon", file=str(path), expires=_day(leaf.not_after))


def _day(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
