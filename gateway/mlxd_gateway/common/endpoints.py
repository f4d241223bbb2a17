"""What a handler has beside its request: the client, and the id that the edge has given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar
from uuid import uuid4

from starlette.requests import Request

from mlxd import Client, Embeddings, MlxdError
from mlxd_gateway.common.asks import Ask
from mlxd_gateway.common.batches import Batch
from mlxd_gateway.common.clients import Clients
from mlxd_gateway.common.failures import Refused, failure_of
from mlxd_gateway.common.generation import Generation, Source, under_any_name
from mlxd_gateway.common.responses import while_there
from mlxd_shared import config

REQUEST_ID = "mlxd.request_id"
"""The key of the request's id in its ASGI scope."""
OWNER = "mlxd.owner"
"""The key of what tells one key's requests from another's there."""
_UNIQUE_CHARS = 8
_T = TypeVar("_T")


def owner_of(request: Request) -> str:
    """Return whose request it is: a hash of its key; empty where requests carry none."""
    return str(request.scope.get(OWNER, ""))


def clients_of(request: Request) -> Clients:
    """Return the connections to the controller."""
    clients: Clients = request.app.state.clients
    return clients


def client_of(request: Request) -> Client:
    """Return the client for what is answered at once."""
    return clients_of(request).shared


def generation_of(request: Request, ask: Ask) -> Generation:
    """Return a generation that is not begun, of what is asked by the rules in force.

    Its id on mlxd's wire begins with the request's and is another each time: clients and proxies
    send one id again, and two streams of one id are refused. It has room for those of its choices.
    """
    unique = uuid4().hex[:_UNIQUE_CHARS]
    most = config.REQUEST_ID_CHARS_MAX - config.CHOICE_ID_CHARS - len(unique) - 1
    sent_id = str(request.scope.get(REQUEST_ID, ""))[:most]
    settled = ask.settle() if request.app.state.agent_rules else ask
    return Generation(clients_of(request), settled, request_id=f"{sent_id}-{unique}")


def source_of(request: Request, asks: Sequence[Ask]) -> Source:
    """Return what answers a request of one prompt or several; it is not begun."""
    generations = [generation_of(request, ask) for ask in asks]
    return generations[0] if len(generations) == 1 else Batch(generations)


async def translate(
    request: Request, ask: Callable[[_T], Ask], body: _T, *, kept_nbytes: int = 0
) -> Ask:
    """Return what a body asks, by `ask`: on a thread where it is long, as images in base64 are.

    kept_nbytes: of what it goes on from, which is translated with it.

    Raises:
        BadField: a field is not what it should be.
    """
    if request.state.body_nbytes + kept_nbytes <= config.HTTP_BODY_HERE_BYTES_MAX:
        return ask(body)
    return await asyncio.to_thread(ask, body)


async def embed_texts(
    request: Request,
    model: str,
    sent: str | Sequence[str],
    *,
    field: str = "input",
    dimensions: int | None = None,
) -> Embeddings:
    """Return the vectors of one text or several, which the request has in `field`.

    Raises:
        Refused: the request failed.
        ClientDisconnect: the client has gone.
    """
    texts = [sent] if isinstance(sent, str) else sent

    async def embed() -> Embeddings:
        async with clients_of(request).lend() as client:
            return await under_any_name(
                model, lambda name: client.embeddings(texts, model=name, dimensions=dimensions)
            )

    def rename(wire: str) -> str:
        name = wire.replace("texts", field, 1)
        return name.removesuffix("[0]") if isinstance(sent, str) else name

    try:
        return await while_there(request, embed())
    except MlxdError as error:
        raise Refused(failure_of(error, rename)) from error
