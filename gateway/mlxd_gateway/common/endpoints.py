"""What a handler has beside its request: the client, and the id that the edge has given."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import uuid4

from starlette.requests import Request

from mlxd import Client, Embeddings, MlxdError
from mlxd_gateway.common.asks import Ask
from mlxd_gateway.common.clients import Clients
from mlxd_gateway.common.failures import Refused, failure_of
from mlxd_gateway.common.generation import Generation, under_any_name
from mlxd_gateway.common.responses import while_there
from mlxd_shared import config

REQUEST_ID = "mlxd.request_id"
"""The key of the request's id in its ASGI scope."""
_UNIQUE_CHARS = 8


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
    send one id again, and two streams of one id are refused.
    """
    unique = uuid4().hex[:_UNIQUE_CHARS]
    sent_id = str(request.scope.get(REQUEST_ID, ""))[
        : config.REQUEST_ID_CHARS_MAX - len(unique) - 1
    ]
    settled = ask.settle() if request.app.state.agent_rules else ask
    return Generation(clients_of(request), settled, request_id=f"{sent_id}-{unique}")


async def embed_texts(
    request: Request, model: str, texts: Sequence[str], *, dimensions: int | None = None
) -> Embeddings:
    """Return the vectors of the field `input`'s texts.

    Raises:
        Refused: the request failed.
        ClientDisconnect: the client has gone.
    """

    async def embed() -> Embeddings:
        async with clients_of(request).lend() as client:
            return await under_any_name(
                model, lambda name: client.embeddings(texts, model=name, dimensions=dimensions)
            )

    try:
        return await while_there(request, embed())
    except MlxdError as error:
        failure = failure_of(error, lambda field: field.replace("texts", "input", 1))
        raise Refused(failure) from error
