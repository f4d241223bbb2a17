"""Whether a controller knows who sends a request, before the request's body is read.

Invariants:
- Only keys that a controller has just known are let by without a question, and for KEY_KNOWN_S: a
  key that was removed meanwhile is refused by the call that the request leads to.
- No key is kept: hashes are.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from mlxd import Client, MlxdError, RemoteError, call_headers
from mlxd_gateway.common.failures import Refused, failure_of
from mlxd_shared import config
from mlxd_shared.security.tokens import HEADER


class Callers:
    """The keys that a controller has known of late."""

    def __init__(
        self,
        client: Client,
        *,
        now_s: Callable[[], float] = time.monotonic,
        keys_max: int = config.KEYS_KNOWN_MAX,
    ) -> None:
        """Ask `client`, with the headers of the current task."""
        self._client = client
        self._now_s = now_s
        self._keys_max = keys_max
        self._known_s: dict[bytes, float] = {}
        """When each was known, by its hash; the latest last."""

    async def check(self) -> None:
        """Refuse the current task's request if it carries a key that the controller does not know.

        Raises:
            Refused: it does.
        """
        header = dict(call_headers.get()).get(HEADER)
        if header is None:
            return  # no key, or the gateway's own token, which the door has judged
        key = hashlib.sha256(header.encode()).digest()
        known_s = self._known_s.get(key)
        if known_s is not None and self._now_s() - known_s < config.KEY_KNOWN_S:
            return
        try:
            await self._client.healthy()  # what a controller refuses unread, and answers at once
        except RemoteError as error:
            if error.code.name != "UNAUTHENTICATED":
                return
            self._known_s.pop(key, None)
            raise Refused(failure_of(error)) from error
        except MlxdError:
            return  # told by the call that follows
        self._known_s.pop(key, None)
        self._known_s[key] = self._now_s()
        while len(self._known_s) > self._keys_max:
            del self._known_s[next(iter(self._known_s))]
