"""Keys over a real connection: what each scope opens, and who a handler is told that calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from mlxd.v1 import inference_pb2, model_pb2, status_pb2
from mlxd_shared.domain.errors import MlxdError, NotAllowed
from mlxd_shared.security.callers import SCOPES, current_caller
from mlxd_shared.security.key_file import editing
from mlxd_shared.security.keys import Key, Scope, hash_of
from mlxd_shared.security.listeners import ListenerFiles
from mlxd_shared.security.net import parse_address
from mlxd_shared.security.secure_channel import ChannelSecurity, call_headers, channel
from mlxd_shared.serving.server import Health, add_service, listen, make_server
from mlxd_shared.wire.interceptors import Context
from mlxd_shared.wire.status import from_call
from tests.support.certificates import SECRET, token_file

SERVICES = [
    module.DESCRIPTOR.services_by_name[name]
    for module, name in (
        (inference_pb2, "InferenceService"),
        (model_pb2, "ModelService"),
        (status_pb2, "StatusService"),
    )
]
METHODS: list[MethodDescriptor] = [method for each in SERVICES for method in each.methods]
TIMEOUT_S = 30.0


def path_of(method: MethodDescriptor) -> str:
    """Return a method's name on the wire."""
    return f"/{method.containing_service.full_name}/{method.name}"


class Servicer:
    """Any service: keeps who called each method."""

    def __init__(self) -> None:
        self.callers: list[str | None] = []

    def __getattr__(self, name: str) -> Any:
        method = next(each for each in METHODS if each.name == name)

        def note() -> None:
            key = current_caller.get().key
            self.callers.append(None if key is None else key.name)

        async def answer(request: object, context: Context) -> bytes:
            note()
            return b""

        async def stream(request: object, context: Context) -> AsyncIterator[bytes]:
            note()
            yield b""

        return stream if method.server_streaming else answer


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[tuple[str, Servicer]]:
    """Serve with a token and a key for each scope, named after it."""
    keys_file = tmp_path / "keys.json"
    with editing(keys_file) as keys:
        for scope in Scope:
            keys.append(Key(scope.value, hash_of(scope.value), scopes=frozenset({scope})))
    security = ListenerFiles(token_file=token_file(tmp_path), keys_file=keys_file).load()
    server, servicer = make_server(Health(), SERVICES, security=security), Servicer()
    for service in SERVICES:
        add_service(server, service, servicer)
    address = listen(server, parse_address("localhost:0"), security=security)
    await server.start()
    try:
        yield address, servicer
    finally:
        await server.stop(None)


async def call(client: grpc.aio.Channel, path: str, secret: str) -> MlxdError | None:
    """Call a method as whoever has `secret`; return how it was refused, if it was."""
    marked = call_headers.set((("authorization", f"Bearer {secret}"),))
    try:
        ask: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = client.unary_stream(path)
        async for _ in ask(b"", timeout=TIMEOUT_S):
            pass
    except grpc.aio.AioRpcError as error:
        return from_call(error)
    finally:
        call_headers.reset(marked)
    return None


def outcomes() -> Iterator[tuple[str, Scope, bool]]:
    """Yield each method with each scope, and whether that opens it."""
    for path, scopes in SCOPES.items():
        for scope in Scope:
            yield path, scope, scope in scopes


def test_every_method_has_a_scope() -> None:
    """A method that is added is for managers until somebody says whom it is for."""
    assert set(SCOPES) == {path_of(method) for method in METHODS}


@pytest.mark.asyncio
async def test_a_key_opens_what_its_scopes_say(tmp_path: Path) -> None:
    """Refused by name of key and scope, before the handler; the operator's token opens all."""
    async with serving(tmp_path) as (address, servicer), channel(address) as client:
        for path, scope, opens in outcomes():
            servicer.callers.clear()
            error = await call(client, path, scope.value)
            if opens:
                assert (error, servicer.callers) == (None, [scope.value])
            else:
                assert isinstance(error, NotAllowed)
                assert error.key == scope.value
                assert "scope" in error.asked
                assert servicer.callers == []
        for path in SCOPES:
            servicer.callers.clear()
            assert await call(client, path, SECRET) is None
            assert servicer.callers == [None]


@pytest.mark.asyncio
async def test_strangers_learn_nothing(tmp_path: Path) -> None:
    """The same answer for no key, another key, a key's hash, and a method that there is not."""
    async with serving(tmp_path) as (address, servicer), channel(address) as client:
        secrets = ("", "other", hash_of("manage"), "Manage")
        paths = (*SCOPES, "/mlxd.v1.ModelService/Nothing")
        answers = {str(await call(client, path, secret)) for path in paths for secret in secrets}
        assert len(answers) == 1
        assert servicer.callers == []


@pytest.mark.asyncio
async def test_a_removed_key_is_refused(tmp_path: Path) -> None:
    """As soon as the server has looked at the file again, which it does once a second."""
    path = "/mlxd.v1.InferenceService/Tokenize"
    async with serving(tmp_path) as (address, _), channel(address) as client:
        assert await call(client, path, "infer") is None
        with editing(tmp_path / "keys.json") as keys:
            keys[:] = [key for key in keys if key.name != "infer"]
        refused = None
        for _ in range(10_000):
            refused = await call(client, path, "infer")
            if refused is not None:
                break
        assert "UNAUTHENTICATED" in str(refused)


@pytest.mark.asyncio
async def test_a_channel_with_a_token_sends_no_other(tmp_path: Path) -> None:
    """Two credentials in one call are none."""
    security = ChannelSecurity(token_file=token_file(tmp_path))
    async with serving(tmp_path) as (address, _), channel(address, security) as client:
        error = await call(client, "/mlxd.v1.InferenceService/Tokenize", "infer")
        assert "UNAUTHENTICATED" in str(error)
