"""What a caller may do, so that the page offers nothing else.

No call tells a key's scopes. So each scope is asked about by a call that it is needed for: of
status, and else of one that names nothing and is refused for that, with the scope or without. None
reaches a model, and none is counted to a key's limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import msgspec

from mlxd import Client, InvalidRequest, NotAllowed


class Rights(msgspec.Struct, frozen=True):
    """The scopes of a caller."""

    infer: bool
    observe: bool
    manage: bool


async def find_rights(client: Client) -> Rights:
    """Return what the current task's caller may do.

    Raises:
        MlxdError: the controller does not know the caller, or does not answer.
    """
    infer, observe, manage = await asyncio.gather(
        _is_allowed(client.embeddings(())),
        _is_allowed(client.status()),
        _is_allowed(client.unload("")),
    )
    return Rights(infer, observe, manage)


async def _is_allowed(call: Awaitable[object]) -> bool:
    try:
        await call
    except NotAllowed:
        return False
    except InvalidRequest:
        return True
    return True
