"""Origins of web pages, and which of them may send requests to a server on this machine.

A browser sends what any page asks it to, to addresses of this machine too: a form or a `fetch`
without a preflight needs nobody's leave, and a name that a page's owner resolves to 127.0.0.1 makes
the page and the server one origin (DNS rebinding). Of both the request itself tells: by `Origin`
and `Host`, which no page can choose.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.security.net import PORT_MAX

ANY = "*"
_WEB = ("http", "https")
_ORIGIN = re.compile(
    r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?", re.ASCII
)


def check_origins(origins: Collection[str]) -> None:
    """Refuse what no browser would send as an origin: it would never be met.

    Raises:
        InvalidRequest: an origin is neither `*` nor SCHEME://HOST[:PORT].
    """
    for origin in origins:
        if origin != ANY and not _is_origin(origin):
            problem = f"{origin!r:.200} is not SCHEME://HOST[:PORT] in lower case, and not {ANY}"
            raise InvalidRequest.of("http_origin", problem)


def _is_origin(text: str) -> bool:
    match = _ORIGIN.fullmatch(text)
    return match is not None and int(match["port"] or 0) <= PORT_MAX


def is_foreign(origin: str | None, host: str, origins: Collection[str]) -> bool:
    """Tell whether a request comes from a page that nobody has named.

    origin: its header `Origin`; None: it has none. host: its header `Host`. origins: those that
    were named. A page that the server itself has sent is not foreign, and what is no web page (an
    editor's panel, an application) has a scheme of its own.
    """
    if origin is None or ANY in origins or origin in origins:
        return False
    scheme, separator, place = origin.partition("://")
    return not separator or (scheme in _WEB and place != host)


def is_local_name(host: str, origins: Collection[str]) -> bool:
    """Tell whether a request's `Host` is one under which only this machine's users reach a server.

    That is an address, `localhost`, a name below it, or the name of an origin that was named; all
    others may be names that a stranger resolves to this machine.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    if any(urlsplit(origin).hostname == name for origin in origins if origin != ANY):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
