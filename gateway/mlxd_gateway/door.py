"""Who may come in: judged by a request's path and head alone, before anything else looks at it.

- With a token or with keys a request carries one, as `Authorization: Bearer` or as `x-api-key`.
  The token is compared here; keys are the controller's to know, so they go on with each call.
- Without either no request is let in that a page of a stranger had a browser send
  (`mlxd_shared.security.origins`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

from mlxd_gateway.common.failures import Failure, FailureKind
from mlxd_gateway.page.files import FILES, ROOT
from mlxd_shared import config
from mlxd_shared.security.bearer import REFUSAL
from mlxd_shared.security.keys import hash_of
from mlxd_shared.security.origins import is_foreign, is_local_name
from mlxd_shared.security.tokens import HEADER, Token, secret_in

OPEN_PATHS = frozenset({"/", "/health", *FILES})
"""What needs no credentials: whether it serves, and the page, which asks its reader for a key."""
_PAGE_API = f"{ROOT}api/"
_OTHER_SITES = ("cross-site", "same-site")
"""What browsers say (Fetch Metadata) of a request that a page of another origin has caused."""
_BEARER = re.compile(rf"Bearer [!-~]{{1,{config.TOKEN_CHARS_MAX}}}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Door:
    """What a gateway asks of whoever comes."""

    token: Token | None = None
    """What requests must carry; None: nothing, or a key."""
    passes_keys: bool = False
    """Whether requests carry keys, which the controller judges; then there is no token here."""
    origins: tuple[str, ...] = ()
    """Of pages that may use it from a browser."""
    local: bool = False
    """Whether it listens for this machine alone, which no name but a local one then reaches."""

    def refuse(self, scope: Scope, headers: Headers) -> Failure | None:
        """Return why a request is not let in; None: it is."""
        if self.token is None and not self.passes_keys:
            return self._refuse_page(scope, headers)
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        header = credentials_in(headers)
        if _BEARER.fullmatch(header) and (self.token is None or self.token.accepts(header)):
            return None
        return Failure(FailureKind.UNAUTHENTICATED, REFUSAL)

    def pass_on(self, headers: Headers) -> tuple[tuple[str, str], ...]:
        """Return the headers of the calls to the controller that a request leads to."""
        header = credentials_in(headers)
        return ((HEADER, header),) if self.passes_keys and _BEARER.fullmatch(header) else ()

    def owner_of(self, headers: Headers) -> str:
        """Return what tells a key's requests from another's; empty where requests carry none."""
        return "".join(hash_of(secret_in(header)) for _, header in self.pass_on(headers))

    def _refuse_page(self, scope: Scope, headers: Headers) -> Failure | None:
        """Refuse what a page of a stranger has sent."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.local and not is_local_name(host, self.origins):
            message = f"Host: {host!r:.200} is no name of this machine alone; see --http-origin"
            return Failure(FailureKind.FORBIDDEN, message)
        if is_foreign(origin, host, self.origins):
            message = f"Origin: {origin!r:.200} is no page that was named by --http-origin"
            return Failure(FailureKind.FORBIDDEN, message)
        # An image's or a script's request has no Origin, and a watch would take up a place.
        site = headers.get("sec-fetch-site", "")
        if origin is None and site in _OTHER_SITES and scope["path"].startswith(_PAGE_API):
            message = f"Sec-Fetch-Site: {site} is no request of the page's own"
            return Failure(FailureKind.FORBIDDEN, message)
        return None


def credentials_in(headers: Headers) -> str:
    """Return a request's credentials as the value of an authorization header; empty: none."""
    key = headers.get("x-api-key")
    return headers.get(HEADER, "") if key is None else f"Bearer {key}"
