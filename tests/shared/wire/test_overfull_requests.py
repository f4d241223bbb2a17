"""Nothing that a request may hold is walked, parsed or copied before its bound has been looked at.

Every field of every request of every service is overfilled and goes the way of a real call: taken
in, parsed, checked, converted. What is done for it is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from mlxd.v1 import inference_pb2, model_pb2, score_pb2, worker_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, MlxdError
from mlxd_shared.wire.convert import generate_from_pb, load_from_pb
from mlxd_shared.wire.convert_bounds import text_of
from mlxd_shared.wire.convert_embed import embed_from_pb
from mlxd_shared.wire.convert_score import score_from_pb
from mlxd_shared.wire.intake import Intake, Reader, run_paced
from mlxd_shared.wire.wire_scan import FROM_CLIENTS, RELAYED, Limits, Size, plan_of
from mlxd_worker.servicers.control import job_from_pb
from tests.support.overfull import ATTACKS, Overfull, frame, number, overfull, request_types

CPU_MAX_S = 3.0
"""Generous: the largest walk takes some tenths; what was parsed first took 2 to 12 s."""
FEW = Limits(parts=4096)
"""So that hundreds of cases are tried soon; their bytes are as many as the transport lets through,
and the bound is passed a thousandfold."""
PROMPTS = {
    "text",
    "texts",
    "texts.text",
    "texts.continuations",
    "chat.messages.content",
    "chat.messages.reasoning",
}
"""May be as long as the request, but for their characters."""
UNBOUND = {"tokens.ids", "resume_token_ids", "sampling.logit_bias"}
"""Ids may be as many as that; of a map's entries without a key one is left."""

CHECKS: dict[type[Message], Callable[..., object]] = {
    inference_pb2.GenerateRequest: generate_from_pb,
    inference_pb2.EmbedRequest: embed_from_pb,
    score_pb2.ScoreRequest: score_from_pb,
    inference_pb2.TokenizeRequest: text_of,
    model_pb2.LoadModelRequest: lambda pb: load_from_pb(pb.options),
    worker_pb2.LoadRequest: job_from_pb,
}
"""What a servicer does first with a request."""


class Counted(Reader[Any]):
    """A reader that notes what it was asked to make, and of what size that was."""

    def __init__(self, kind: type[Message], limits: Limits) -> None:
        """Nothing was made yet."""
        super().__init__(kind, limits)
        self.sizes: list[Size] = []
        self.made: list[Message] = []

    def size(self, raw: bytes) -> Size:
        """Return and note what a request holds."""
        size = super().size(raw)
        self.sizes.append(size)
        return size

    def message(self, raw: bytes) -> Message:
        """Return and note the message; its size was looked at."""
        assert len(self.sizes) > len(self.made)
        self.made.append(super().message(raw))
        return self.made[-1]


async def take(kind: type[Message], raw: bytes, limits: Limits) -> tuple[Counted, MlxdError | None]:
    """Take a request in and check it as a servicer does; return what was made, what is wrong."""
    intake, reader = Intake(limits), Counted(kind, limits)
    begun_s = time.process_time()
    error: MlxdError | None = None
    try:
        async with intake.take(raw, reader) as request:
            check = CHECKS.get(kind)
            if check is not None:
                await run_paced(check, request)
    except MlxdError as caught:
        error = caught
    spent_s = time.process_time() - begun_s
    assert spent_s < CPU_MAX_S
    assert intake.held_nbytes == 0
    return reader, error


def most_of(descriptor: Descriptor, limits: Limits) -> int:
    """Return how many bytes a request of a type may have, less what stands around a field."""
    much = plan_of(descriptor).takes_much
    return (limits.nbytes if much else config.SMALL_REQUEST_BYTES_MAX) - 64


@pytest.mark.asyncio
@pytest.mark.parametrize("name", sorted(request_types()))
async def test_no_field_can_be_overfilled(name: str) -> None:
    """Each is refused with one field and one limit before it is parsed, or makes next to nothing.

    As large as a request of the method may be: entries of two bytes, one text, numbers one by one.
    """
    descriptor = request_types()[name]
    kind: type[Message] = GetMessageClass(descriptor)
    cases = [*overfull(descriptor, most_of(descriptor, FEW))]
    for case in cases:
        reader, error = await take(kind, case.raw, FEW)
        context = (case.path, case.how, error)
        assert all(size.parts <= FEW.parts for size in reader.sizes), context
        assert all(size.numbers <= FEW.numbers for size in reader.sizes), context
        if case.path in PROMPTS and case.how == "one":
            continue
        assert isinstance(error, InvalidRequest), context
        assert not reader.made or case.how in {"one", "no text"}, context
        assert len(error.violations) == 1, context
    assert {case.how for case in cases} >= {"unknown", "unknown text"}


@pytest.mark.asyncio
async def test_a_list_that_may_be_parsed_is_counted_before_it_is_walked() -> None:
    """As many entries as pass for parts: the list is named with its limit, once, not each entry."""
    descriptor = inference_pb2.GenerateRequest.DESCRIPTOR
    lists = [
        case
        for case in overfull(descriptor, 2 * (config.REQUEST_PARTS_MAX - 64))
        if case.how == "many" and case.is_list and case.path not in UNBOUND
    ]
    keys = b"".join(frame(12, b"\x08" + number(key)) for key in range(50_000))
    lists.append(Overfull("sampling.logit_bias", "keys", frame(5, keys)))
    assert len(lists) >= 7
    for case in lists:
        prompt = b"" if case.path.startswith(("chat", "tokens")) else frame(2, b"x")
        reader, error = await take(inference_pb2.GenerateRequest, case.raw + prompt, FROM_CLIENTS)
        context = (case.path, error)
        assert isinstance(error, InvalidRequest), context
        assert len(error.violations) == 1, context
        assert error.violations[0].field in {case.path, case.path.rpartition(".")[0]}, context
        assert len(reader.made) == 1, context


@pytest.mark.asyncio
@pytest.mark.parametrize("limits", [FROM_CLIENTS, RELAYED], ids=["controller", "worker"])
@pytest.mark.parametrize("attack", ATTACKS)
async def test_millions_of_parts_are_never_parsed(attack: str, limits: Limits) -> None:
    """With the limits in force: refused from the bytes alone, by a controller and a worker."""
    raw = ATTACKS[attack][: limits.nbytes]
    reader, error = await take(inference_pb2.GenerateRequest, raw, limits)
    assert isinstance(error, InvalidRequest)
    assert len(error.violations) == 1
    assert not reader.made


def test_every_request_but_those_with_prompts_is_small() -> None:
    """What neither holds a prompt nor ids has a bound of its own, far below a prompt's."""
    large = {name for name, kind in request_types().items() if plan_of(kind).takes_much}
    kinds = ("Generate", "Tokenize", "Detokenize", "Embed", "Score")
    assert large == {f"mlxd.v1.{kind}Request" for kind in kinds}


def case_named(cases: list[Overfull], path: str, how: str) -> Overfull:
    """Return the case that overfills one field in one way."""
    return next(case for case in cases if (case.path, case.how) == (path, how))


def test_the_cases_reach_every_list_text_and_message() -> None:
    """The walk by descriptors is what it says: fields in messages in lists, in every way."""
    cases = [*overfull(inference_pb2.GenerateRequest.DESCRIPTOR, 64)]
    assert case_named(cases, "stop", "many").raw == b"\x42\x00" * 32
    assert case_named(cases, "chat.messages.role", "in many").raw[:2] == b"\x22\x40"
    assert case_named(cases, "tokens.ids", "packed").raw.endswith(b"\x01" * 64)
    assert case_named(cases, "sampling.logit_bias", "many").is_list
    assert case_named(cases, "chat.messages.tool_calls.arguments_json", "one").raw.endswith(
        b"x" * 64
    )
