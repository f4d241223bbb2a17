"""`mlxd embed` as a process against a scripted server."""

from __future__ import annotations

import pytest

from mlxd.v1 import inference_pb2 as pb
from mlxd_shared.config import EMBED_TEXTS_MAX
from tests.fakes.mlxd_server import Answers, serving
from tests.support.cli import mlxd


@pytest.mark.asyncio
async def test_each_text_is_a_line() -> None:
    """Numbers or JSON; every flag arrives in its field, and what is absent stays so."""
    async with serving(Answers()) as fake:
        ran = await mlxd("embed", "demo", "a", "b c", "--address", fake.address)
        programs = await mlxd(
            "embed", "demo", "--json", "--pooling", "mean", "--dimensions", "2", "--no-normalize",
            "--address", fake.address, piped="a line\nanother one\n",
        )  # fmt: skip
        plain, full = fake.requests

    assert (ran.code, ran.out) == (0, "1 0.125\n3 0.125\n")
    assert programs.objects == [[6, 0.125], [11, 0.125]]
    assert plain == pb.EmbedRequest(model="demo", texts=["a", "b c"])
    assert full == pb.EmbedRequest(
        model="demo", texts=["a line", "another one"], pooling=pb.POOLING_MEAN, dimensions=2,
        normalize=False,
    )  # fmt: skip


@pytest.mark.asyncio
async def test_more_texts_than_a_request_takes_are_asked_for_in_turn() -> None:
    """In their order, and none is left out."""
    texts = ["x" * (1 + index) for index in range(EMBED_TEXTS_MAX + 1)]
    async with serving(Answers()) as fake:
        ran = await mlxd("embed", "demo", "--address", fake.address, piped="\n".join(texts))
        sizes = [len(r.texts) for r in fake.requests if isinstance(r, pb.EmbedRequest)]

    assert ran.code == 0
    assert [line.split()[0] for line in ran.out.splitlines()] == [
        str(len(batch)) for batch in texts
    ]
    assert sizes == [EMBED_TEXTS_MAX, 1]


@pytest.mark.asyncio
async def test_without_a_text_it_says_how() -> None:
    """Nothing is asked of the server."""
    async with serving(Answers()) as fake:
        ran = await mlxd("embed", "demo", "--address", fake.address, piped="")

    assert (ran.code, ran.out, fake.requests) == (2, "", [])
    assert "no text" in ran.err
