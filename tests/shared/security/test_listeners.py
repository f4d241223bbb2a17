"""Who may call: TLS, client certificates, the token and Unix sockets, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from structlog.testing import capture_logs

from mlxd import Client
from mlxd_shared import config
from mlxd_shared.domain.errors import BadCredentials, FieldViolation, InvalidRequest
from mlxd_shared.security import bearer
from mlxd_shared.security.listeners import ListenerFiles
from mlxd_shared.security.net import SERVER_OPTIONS, parse_address
from mlxd_shared.security.secure_channel import PLAIN, ChannelSecurity, channel
from mlxd_shared.serving.server import Health, listen, make_server
from mlxd_shared.wire.status import RemoteError
from tests.support.certificates import SECRET, Authority, token_file
from tests.support.echo import KINDS, TIMEOUT_S, Echo, Metadata, ask, outcome

UNAUTHENTICATED, UNAVAILABLE = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE


@dataclass(frozen=True, slots=True)
class Pki:
    """Two authorities that do not know each other, and files of each."""

    files: ListenerFiles
    right: ChannelSecurity
    stranger: ChannelSecurity
    folder: Path


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    """A server's files, and what a right and a strange client have."""
    (tmp_path / "other").mkdir()
    ours, theirs = Authority(tmp_path), Authority(tmp_path / "other")
    server, client, strange = ours.issue(), ours.issue("client"), theirs.issue("client")
    token = token_file(tmp_path)
    return Pki(
        ListenerFiles(server.cert, server.key, ours.path, token),
        ChannelSecurity(ours.path, client.cert, client.key, token),
        ChannelSecurity(theirs.path, strange.cert, strange.key, token_file(
            tmp_path / "other", SECRET + "x")),
        tmp_path,
    )  # fmt: skip


@asynccontextmanager
async def serving(files: ListenerFiles) -> AsyncIterator[tuple[str, Echo]]:
    """A server on a TCP port; yields its address and what it serves."""
    security = files.load()
    health = Health()
    server = make_server(health, (), security=security)
    echo = Echo()
    server.add_generic_rpc_handlers((echo,))
    address = listen(server, parse_address("localhost:0"), security=security)
    await server.start()
    await health.set("", serving=True)
    try:
        yield address, echo
    finally:
        await server.stop(None)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_right_everything_is_served(pki: Pki, kind: str) -> None:
    """TLS, a client's certificate and the token together let every kind of method through."""
    async with serving(pki.files) as (address, _), channel(address, pki.right) as client:
        assert await ask(client, kind) == b"answer"
        assert await ask(client, kind, metadata=(("x-more", "1"),)) == b"answer"


CLIENTS: dict[str, tuple[grpc.StatusCode, Callable[[Pki], ChannelSecurity]]] = {
    "wrong token": (UNAUTHENTICATED, lambda p: replace(p.right, token_file=p.stranger.token_file)),
    "no token": (UNAUTHENTICATED, lambda p: replace(p.right, token_file=None)),
    "no client certificate": (
        UNAVAILABLE, lambda p: replace(p.right, tls_cert=None, tls_key=None)),
    "another's client certificate": (
        UNAVAILABLE, lambda p: replace(p.stranger, tls_ca=p.right.tls_ca)),
    "wrong CA": (UNAVAILABLE, lambda p: replace(p.right, tls_ca=p.stranger.tls_ca)),
    "plain text": (UNAVAILABLE, lambda p: replace(PLAIN, token_file=p.right.token_file)),
}  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("client_name", CLIENTS)
async def test_every_other_client_is_refused(pki: Pki, client_name: str) -> None:
    """It reaches no method, and the next right client is served as before."""
    code, security = CLIENTS[client_name]
    async with serving(pki.files) as (address, echo):
        assert await outcome(address, security(pki)) is code
        assert echo.reached == 0
        assert await outcome(address, pki.right) == b"answer"


@pytest.mark.asyncio
async def test_tls_to_a_plain_port_is_refused(pki: Pki) -> None:
    """A client that wants TLS gets no answer from a server without, never one in plain text."""
    async with serving(replace(ListenerFiles(), token_file=pki.files.token_file)) as (
        address,
        echo,
    ):
        assert await outcome(address, pki.right) is UNAVAILABLE
        assert echo.reached == 0
        assert await outcome(address, replace(PLAIN, token_file=pki.right.token_file)) == b"answer"


@pytest.mark.asyncio
async def test_a_server_of_another_name_is_refused(pki: Pki) -> None:
    """A certificate is good for the names in it alone."""
    pair = Authority(pki.folder).issue("elsewhere", host="elsewhere.example")
    security = ChannelSecurity(pki.folder / "ca.pem")
    async with serving(ListenerFiles(pair.cert, pair.key)) as (address, _):
        by_ip = f"127.0.0.1:{address.rpartition(':')[2]}"

        assert await outcome(by_ip, security) == b"answer"  # the name that tests always put in
        assert await outcome(address, security) is UNAVAILABLE


@pytest.mark.asyncio
async def test_a_token_is_enough_on_loopback(pki: Pki) -> None:
    """TLS without client certificates, and plain text on loopback, take the token alone."""
    for files, security in (
        (replace(pki.files, tls_client_ca=None), replace(pki.right, tls_cert=None, tls_key=None)),
        (ListenerFiles(token_file=pki.files.token_file), ChannelSecurity(
            token_file=pki.right.token_file)),
    ):  # fmt: skip
        async with serving(files) as (address, _):
            assert await outcome(address, security) == b"answer"
            assert await outcome(address, replace(security, token_file=None)) is UNAUTHENTICATED


WRONG: dict[str, Metadata] = {
    "none": (),
    "other": (("authorization", "Bearer " + "x" * len(SECRET)),),
    "empty": (("authorization", ""),),
    "short": (("authorization", "Bearer x"),),
    "long": (("authorization", "Bearer " + "x" * 4000),),
    "a prefix": (("authorization", f"Bearer {SECRET[:-1]}"),),
    "other scheme": (("authorization", f"Basic {SECRET}"),),
    "twice": (("authorization", f"Bearer {SECRET}"), ("authorization", f"Bearer {SECRET}")),
    "other header": (("x-token", f"Bearer {SECRET}"),),
}


@pytest.mark.asyncio
async def test_a_refused_client_learns_nothing(pki: Pki) -> None:
    """One and the same answer, without details, for every token, kind, service and method."""
    answers = set()
    async with serving(ListenerFiles(token_file=pki.files.token_file)) as (address, echo):
        async with channel(address) as client:
            for metadata in WRONG.values():
                for kind in KINDS:
                    for service in ("probe.Echo", "no.Such", "grpc.health.v1.Health",
                                    "grpc.reflection.v1alpha.ServerReflection"):  # fmt: skip
                        with pytest.raises(grpc.aio.AioRpcError) as caught:
                            await ask(client, kind, method=f"/{service}/{kind}", metadata=metadata)
                        answers.add((caught.value.code(), caught.value.details(),
                                     tuple(caught.value.initial_metadata() or ()),
                                     tuple(caught.value.trailing_metadata() or ())))  # fmt: skip
        assert echo.reached == 0

    assert answers == {(UNAUTHENTICATED, bearer.REFUSAL, (), ())}


@pytest.mark.asyncio
async def test_reflection_needs_the_token(pki: Pki) -> None:
    """What there is to call is told to callers only."""
    request = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    allowed = ChannelSecurity(token_file=pki.right.token_file)
    async with serving(ListenerFiles(token_file=pki.files.token_file)) as (address, _):
        async with channel(address, allowed) as client:
            reply = await ask(client, "stream_stream", method=method, body=request)
            answer = reflection_pb2.ServerReflectionResponse.FromString(reply)
            assert answer.list_services_response.service
        async with channel(address) as client:
            with pytest.raises(grpc.aio.AioRpcError, match=bearer.REFUSAL):
                await ask(client, "stream_stream", method=method, body=request)


@pytest.mark.asyncio
@pytest.mark.parametrize("open_health", [True, False])
async def test_health_is_open_only_where_asked(pki: Pki, *, open_health: bool) -> None:
    """A probe without a token works by an explicit option; everything else stays shut."""
    files = ListenerFiles(token_file=pki.files.token_file, open_health=open_health)
    async with serving(files) as (address, echo), channel(address) as client:
        check = ask(client, method="/grpc.health.v1.Health/Check", body=b"")
        if open_health:
            answer = health_pb2.HealthCheckResponse.FromString(await check)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        else:
            with pytest.raises(grpc.aio.AioRpcError, match=bearer.REFUSAL):
                await check
        for method in ("/probe.Echo/unary_unary", "/grpc.health.v1.HealthX/Check"):
            with pytest.raises(grpc.aio.AioRpcError, match=bearer.REFUSAL):
                await ask(client, method=method)
        assert echo.reached == 0


@pytest.mark.asyncio
async def test_refusals_are_logged_together(pki: Pki) -> None:
    """A storm of strangers makes one line with no secret in it."""
    with capture_logs() as lines:
        async with serving(ListenerFiles(token_file=pki.files.token_file)) as (address, _):
            stranger = ChannelSecurity(token_file=pki.stranger.token_file)
            async with channel(address, stranger) as client:
                for _ in range(5):
                    with pytest.raises(grpc.aio.AioRpcError):
                        await ask(client)

    (line,) = lines
    assert line["event"] == "calls without valid credentials"
    assert SECRET not in str(line)


@pytest.mark.asyncio
async def test_a_probe_without_credentials_is_nothing_to_warn_of(pki: Pki) -> None:
    """It is refused like all; with credentials that nobody knows it is told of."""
    files = ListenerFiles(token_file=pki.files.token_file)
    stranger = ChannelSecurity(token_file=pki.stranger.token_file)
    lines_by_caller = []
    for security in (PLAIN, stranger):
        with capture_logs() as lines:
            async with serving(files) as (address, _), channel(address, security) as client:
                with pytest.raises(grpc.aio.AioRpcError, match=bearer.REFUSAL):
                    await ask(client, method="/grpc.health.v1.Health/Check", body=b"")
        lines_by_caller.append([line["event"] for line in lines])
    assert lines_by_caller == [[], ["calls without valid credentials"]]


@pytest.mark.asyncio
async def test_the_typed_client_carries_the_security(pki: Pki) -> None:
    """The public client takes the same files, and its refusal is an error that says so."""
    async with serving(pki.files) as (address, _):
        async with Client(address, security=pki.right, timeout_s=TIMEOUT_S) as client:
            with pytest.raises(RemoteError) as caught:
                await client.status()
            assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED  # past the guard
        wrong = replace(pki.right, token_file=pki.stranger.token_file)
        async with Client(address, security=wrong, timeout_s=TIMEOUT_S) as client:
            with pytest.raises(RemoteError, match=bearer.REFUSAL):
                await client.status()


HALVES = [
    ("tls_key", {"tls_key": None}, "is needed with tls_cert"),
    ("tls_cert", {"tls_cert": None}, "is needed with tls_key"),
    ("tls_client_ca", {"tls_cert": None, "tls_key": None}, "needs tls_cert and tls_key"),
    (
        "open_health", {"token_file": None, "open_health": True},
        "means nothing without token_file or keys_file",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("field", "change", "problem"), HALVES, ids=[half[0] for half in HALVES])
def test_half_a_protection_is_none(
    pki: Pki, field: str, change: dict[str, Any], problem: str
) -> None:
    """A server's options that need each other are refused apart, and both are named."""
    with pytest.raises(InvalidRequest) as caught:
        replace(pki.files, **change).load()

    assert caught.value.violations == (FieldViolation(field, problem),)


@pytest.mark.parametrize(
    "change", [{"tls_key": None}, {"tls_cert": None}, {"tls_ca": None}], ids=lambda v: next(iter(v))
)
@pytest.mark.asyncio
async def test_half_a_clients_protection_is_none(pki: Pki, change: dict[str, Any]) -> None:
    """A client's options that need each other are refused apart."""
    with pytest.raises(InvalidRequest, match="need"):
        channel("localhost:1", replace(pki.right, **change))


@pytest.mark.parametrize("field", ["tls_cert", "tls_key", "tls_client_ca", "token_file"])
def test_a_missing_file_stops_the_start(pki: Pki, field: str) -> None:
    """The error names the file, and there is no server."""
    gone = pki.folder / "gone"
    change: dict[str, Any] = {field: gone}
    with pytest.raises(BadCredentials, match="there is no such file") as caught:
        replace(pki.files, **change).load()

    assert caught.value.file == str(gone)


def test_an_expired_certificate_stops_the_start(pki: Pki) -> None:
    """A server does not begin to serve what no client would take."""
    old = Authority(pki.folder).issue("old", days=-1)
    with pytest.raises(BadCredentials, match=r"old\.pem: the certificate has expired on 2"):
        replace(pki.files, tls_cert=old.cert, tls_key=old.key).load()


def test_others_are_served_only_behind_tls_and_a_name(pki: Pki) -> None:
    """An address that is not loopback needs TLS with a token or client CA, or an explicit yes."""
    enough = [
        pki.files,
        replace(pki.files, tls_client_ca=None),
        replace(pki.files, token_file=None),
    ]
    lacking = [
        ListenerFiles(),
        replace(pki.files, tls_cert=None, tls_key=None, tls_client_ca=None),
        replace(pki.files, token_file=None, tls_client_ca=None),
    ]
    everywhere = parse_address("0.0.0.0:0")
    for files in enough:
        files.load().check(everywhere, anywhere=False)
    for files in lacking:
        with pytest.raises(InvalidRequest, match="--allow-remote"):
            files.load().check(everywhere, anywhere=False)
        files.load().check(everywhere, anywhere=True)


@pytest.mark.asyncio
async def test_a_token_never_leaves_the_machine_in_plain_text(pki: Pki) -> None:
    """A client with a token dials others over TLS, or not at all."""
    token = ChannelSecurity(token_file=pki.right.token_file)
    with pytest.raises(InvalidRequest, match="needs tls_ca"):
        channel("10.1.2.3:1", token)

    await channel("10.1.2.3:1", replace(token, tls_ca=pki.right.tls_ca)).close()


@pytest.mark.asyncio
async def test_tls_on_a_unix_socket_is_refused(pki: Pki) -> None:
    """What has no meaning is refused on both sides, not ignored."""
    with pytest.raises(InvalidRequest, match="Unix socket"):
        pki.files.load().check(parse_address("unix:/run/x"), anywhere=True)
    with pytest.raises(InvalidRequest, match="Unix socket"):
        channel("unix:/run/x", pki.right)


@pytest.mark.asyncio
async def test_a_silent_connection_is_dropped(pki: Pki) -> None:
    """Whoever connects and says nothing is shown the door: the handshake has a bound."""
    name = "grpc.server_handshake_timeout_ms"
    credentials = replace(pki.files, tls_client_ca=None).load().server_credentials()
    assert credentials is not None
    server = grpc.aio.server(options=[(name, 100)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
    assert dict(SERVER_OPTIONS)[name] == config.HANDSHAKE_TIMEOUT_MS
    writer.close()
    await server.stop(None)
