"""Addresses of images that a gateway may fetch: what its operator allows, and what nobody may.

Whoever sends a request chooses what this machine dials, and may mean what only this machine reaches
(server-side request forgery). So hosts are named by the operator, ports are those of the schemes,
and an address that is not public is never dialled, whatever name it has. Pure.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest

PUBLIC: Final = "public"
"""Names all hosts; those at addresses that are not public stay out."""
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)
_BELOW = "*."
_VISIBLE = re.compile(r"[!-~]+", re.ASCII)
_PORTS = MappingProxyType({"http": 80, "https": 443})


class BadUrl(Exception):
    """Why an address is not fetched, in words for whoever sent it."""


@dataclass(frozen=True, slots=True)
class ImageUrl:
    """An address as it is dialled and asked."""

    scheme: str
    host: str
    """In lower case; an address of IPv6 without its brackets."""
    target: str
    """Path and query."""

    @property
    def is_secure(self) -> bool:
        """Whether it is asked over TLS."""
        return self.scheme == "https"

    @property
    def port(self) -> int:
        """The scheme's."""
        return _PORTS[self.scheme]

    @property
    def authority(self) -> str:
        """The host as a request names it."""
        return f"[{self.host}]" if ":" in self.host else self.host

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def check_image_urls(named: Collection[str]) -> None:
    """Refuse what names no host: it would never be met.

    Raises:
        InvalidRequest: an entry is neither `public` nor HOST nor `*.HOST`.
    """
    for entry in named:
        if _HOST.fullmatch(entry.removeprefix(_BELOW)) is None:
            problem = f"{entry!r:.200} is not HOST or {_BELOW}HOST in lower case, and not {PUBLIC}"
            raise InvalidRequest.of("image_urls", problem)


def is_named(host: str, named: Collection[str]) -> bool:
    """Tell whether the operator allows a host: it is named, it is below one, or all are."""
    if PUBLIC in named or host in named:
        return True
    return any(entry.startswith(_BELOW) and host.endswith(entry[1:]) for entry in named)


def is_link(text: str) -> bool:
    """Tell whether a text is meant as an address that is fetched."""
    return text[:8].lower().startswith(("http://", "https://"))


def read_url(text: str) -> ImageUrl:
    """Return the address that a text spells.

    Raises:
        BadUrl: it spells none that is ever fetched.
    """
    if len(text) > config.IMAGE_URL_CHARS_MAX:
        raise BadUrl(f"an address has at most {config.IMAGE_URL_CHARS_MAX} characters")
    if _VISIBLE.fullmatch(text) is None or "\\" in text:
        raise BadUrl("an address is written in visible ASCII, without a backslash")
    try:
        split = urlsplit(text)
        host, port = split.hostname or "", split.port
    except ValueError as error:
        raise BadUrl(f"is no address: {error}") from None
    if split.scheme not in _PORTS:
        raise BadUrl("no address but of http and https is fetched")
    if "@" in split.netloc:
        raise BadUrl("no address with a user or a password is fetched")
    if not _is_host(host):
        raise BadUrl("has no host")
    if port not in (None, _PORTS[split.scheme]):
        raise BadUrl(f"no port but {_PORTS[split.scheme]} is dialled for {split.scheme}")
    query = f"?{split.query}" if split.query else ""
    return ImageUrl(split.scheme, host, (split.path or "/") + query)


def _is_host(text: str) -> bool:
    if ":" not in text:
        return _HOST.fullmatch(text) is not None
    try:
        return ipaddress.IPv6Address(text).scope_id is None
    except ValueError:
        return False


def is_public(address: str) -> bool:
    """Tell whether everybody reaches the host at an address, and it is one host.

    Addresses of IPv6 that hold one of IPv4 (mapped, translated, 6to4, Teredo) are not public here:
    what they lead to is another address than the one that was judged.
    """
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(known, ipaddress.IPv6Address) and (
        known.is_site_local or known.sixtofour is not None or known.teredo is not None
    ):
        return False
    return known.is_global and not (known.is_multicast or known.is_reserved)
