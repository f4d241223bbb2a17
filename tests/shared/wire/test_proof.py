"""The word of a controller for a request: whose it is, what it says, and what it spares."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from mlxd.v1 import inference_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.security.net import parse_address
from mlxd_shared.serving.server import Health, listen, make_server
from mlxd_shared.wire.convert import generate_from_pb
from mlxd_shared.wire.convert_embed import embed_from_pb
from mlxd_shared.wire.intake import Intake, Reader, as_checked, is_checked
from mlxd_shared.wire.interceptors import Context
from mlxd_shared.wire.proof import KEY, Checked, Proof, with_relay_room
from mlxd_shared.wire.wire_scan import FROM_CLIENTS, Size

PROOF = Proof.make()
SIZE = Size(0, 7, 3)
KEY_TEXT, WORD = PROOF.word(SIZE)
SECRET = PROOF.secret
METHOD = "/mlxd.v1.InferenceService/Generate"


def test_a_word_says_what_was_counted() -> None:
    """Whoever has the secret is believed; no two workers make the same."""
    assert PROOF.size_of([("other", "x"), (KEY_TEXT, WORD)]) == SIZE
    assert Proof(SECRET) == PROOF != Proof.make()


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        (),
        (("authorization", WORD),),
        ((KEY, ""),),
        ((KEY, SECRET),),
        ((KEY, f"{SECRET} 7"),),
        ((KEY, f"{SECRET} -7 3"),),
        ((KEY, f"{SECRET} 7 3 "),),
        ((KEY, f"{SECRET} {10**9} 3"),),
        ((KEY, f"{SECRET.upper()}0 7 3"),),
        ((KEY, Proof.make().word(SIZE)[1]),),
        ((KEY, WORD), (KEY, WORD)),
        ((KEY, WORD.encode()),),
        ((KEY, "é" * 64 + " 7 3"),),
    ],
)
def test_any_other_word_is_nobody_s(metadata: tuple[tuple[str, str | bytes], ...] | None) -> None:
    """None, another's, half of one, two of them: the request is checked as anybody's."""
    assert PROOF.size_of(metadata) is None


@pytest.mark.parametrize("text", ["", "a" * 63, "a" * 65, "A" * 64, "g" * 64, "a" * 64 + "\n"])
def test_what_no_worker_makes_is_no_proof(text: str) -> None:
    """So nothing else ever goes into metadata."""
    with pytest.raises(ValueError, match="secret"):
        Proof(text)


def test_a_proof_prints_as_nothing() -> None:
    """Neither alone nor in what holds it, and it comes back from where it is kept."""
    assert SECRET not in f"{PROOF} {PROOF!r} {Checked(b'', size=SIZE)!r}"
    assert pickle.loads(pickle.dumps(PROOF)) == PROOF


def test_only_what_was_counted_is_vouched_for() -> None:
    """A worker of another version or of others has given no proof; it checks for itself."""
    assert Checked(b"", size=SIZE).vouched_by(PROOF) == (PROOF.word(SIZE),)
    assert Checked(b"", size=SIZE).vouched_by(None) == ()
    assert Checked(b"").vouched_by(PROOF) == ()
    assert with_relay_room(None) is None
    assert with_relay_room(SIZE, ids=5) == Size(0, 7 + config.RELAYED_PARTS_MAX, 8)


@pytest.mark.asyncio
async def test_a_vouched_request_holds_the_room_that_was_counted() -> None:
    """It is not counted again: its size is what the controller says, and its own bytes."""
    intake = Intake()
    reader = Reader(inference_pb2.GenerateRequest, FROM_CLIENTS)
    raw = inference_pb2.GenerateRequest(model="m" * 20_000, text="x").SerializeToString()
    with pytest.raises(InvalidRequest):
        async with intake.take(raw, reader):
            pass
    async with intake.take(raw, reader, counted=SIZE) as request:
        assert request.text == "x"
        assert is_checked()
        assert intake.held_nbytes == Size(len(raw), SIZE.parts, SIZE.numbers).held_nbytes
        assert as_checked(request).size == with_relay_room(Size(len(raw), SIZE.parts, SIZE.numbers))
    assert intake.held_nbytes == 0
    async with intake.take(b"", reader):
        assert not is_checked()


def test_of_a_checked_request_only_its_past_is_looked_at() -> None:
    """A controller writes anew where a stream stands; all else has passed these very checks."""
    spec = generate_from_pb(inference_pb2.GenerateRequest(request_id="r" * 200), is_checked=True)
    assert (spec.prompt, spec.request_id) == ((), "r" * 200)
    with pytest.raises(InvalidRequest) as caught:
        generate_from_pb(inference_pb2.GenerateRequest(resume_from=1), is_checked=True)
    assert [each.field for each in caught.value.violations] == ["resume_from"]
    assert embed_from_pb(inference_pb2.EmbedRequest(dimensions=0), is_checked=True).texts == ()


class Spy:
    """Says of a request only whether it was taken as checked."""

    async def answer(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Answer."""
        yield b"checked" if is_checked() else b"not"

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return Generate."""
        method: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
            self.answer, inference_pb2.GenerateRequest.FromString, None
        )
        return grpc.method_handlers_generic_handler(
            "mlxd.v1.InferenceService", {"Generate": method}
        )


@asynccontextmanager
async def spying(proof: Proof | None) -> AsyncIterator[grpc.aio.Channel]:
    """Serve the spy around the body."""
    server = make_server(Health(), (), proof=proof)
    server.add_generic_rpc_handlers((Spy().handlers(),))
    address = listen(server, parse_address("127.0.0.1:0"))
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield channel
    finally:
        await server.stop(0)


@pytest.mark.asyncio
async def test_a_server_takes_the_word_of_its_own_proof_alone() -> None:
    """One without a proof, as the controller is, takes nobody's."""
    words = ((), (("mlxd-proof", WORD),), (Proof.make().word(SIZE),))
    said: list[object] = []
    for proof in (PROOF, None):
        async with spying(proof) as channel:
            ask: grpc.aio.UnaryStreamMultiCallable[Any, Any] = channel.unary_stream(METHOD)
            said += [[each async for each in ask(b"", metadata=word)] for word in words]
    assert said == [[b"not"], [b"checked"], [b"not"], [b"not"], [b"not"], [b"not"]]
