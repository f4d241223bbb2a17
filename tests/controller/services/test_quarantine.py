"""Prompts that workers died of: who is suspected, for how long, and how many at most."""

from __future__ import annotations

import asyncio

import pytest

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_controller.services.quarantine import (
    FORGET_S,
    PROMPTS_MAX,
    TRIAL_WAIT_MAX_S,
    PromptKey,
    Quarantine,
    key_of,
)
from mlxd_shared.domain.errors import PoisonPrompt
from tests.fakes.world import FakeClock

KEY = b"prompt"


def test_two_workers_in_a_row_are_enough() -> None:
    """One death may be chance; the same one told twice is one; progress in between clears."""
    quarantine = Quarantine(FakeClock())
    quarantine.note_death(KEY, "i-1")
    quarantine.note_death(KEY, "i-1")
    quarantine.check(KEY, "m")
    quarantine.clear(KEY)
    quarantine.note_death(KEY, "i-2")
    quarantine.check(KEY, "m")
    quarantine.note_death(KEY, "i-3")
    with pytest.raises(PoisonPrompt) as caught:
        quarantine.check(KEY, "m")
    assert (caught.value.model, caught.value.deaths) == ("m", 2)
    quarantine.check(b"another", "m")


@pytest.mark.asyncio
async def test_suspects_go_one_at_a_time() -> None:
    """Of one model, and until each gets on; others need no place, and a verdict reaches waiters."""
    quarantine = Quarantine(FakeClock())
    quarantine.note_death(KEY, "i-1")
    quarantine.note_death(b"other", "i-1")
    order: list[str] = []

    async def try_prompt(key: bytes, name: str, digest: str = "d") -> None:
        async with quarantine.trial(key, digest=digest, model="m"):
            order.append(name)

    async with quarantine.trial(KEY, digest="d", model="m"):
        waiting = [
            asyncio.create_task(try_prompt(b"other", "other")),
            asyncio.create_task(try_prompt(KEY, "same")),
        ]
        await try_prompt(b"innocent", "innocent")
        await try_prompt(b"other", "another model", digest="e")
        await asyncio.wait(waiting, timeout=0)
        assert order == ["innocent", "another model"]
        quarantine.note_death(KEY, "i-2")
    await waiting[0]
    with pytest.raises(PoisonPrompt):
        await waiting[1]
    assert order == ["innocent", "another model", "other"]


@pytest.mark.asyncio
async def test_who_waits_with_a_prompt_that_gets_on_is_let_go() -> None:
    """All at once, while another suspect still has the place; one that leaves gives up no place."""
    quarantine = Quarantine(FakeClock())
    quarantine.note_death(KEY, "i-1")
    quarantine.note_death(b"other", "i-1")
    begun: list[int] = []

    async def try_prompt(number: int) -> None:
        async with quarantine.trial(KEY, digest="d", model="m"):
            begun.append(number)

    async with quarantine.trial(b"other", digest="d", model="m"):
        waiting = [asyncio.create_task(try_prompt(number)) for number in range(3)]
        await asyncio.wait(waiting, timeout=0)
        assert begun == []
        waiting.pop().cancel()
        quarantine.clear(KEY)
        async with asyncio.timeout(TRIAL_WAIT_MAX_S / 2):
            await asyncio.gather(*waiting)
        assert sorted(begun) == [0, 1]
    quarantine.note_death(KEY, "i-2")
    await try_prompt(9)
    assert begun[-1] == 9


def test_it_is_forgotten_in_time() -> None:
    """FORGET_S after the last death; the refusal says how long that is."""
    clock = FakeClock()
    quarantine = Quarantine(clock)
    quarantine.note_death(KEY, "i-1")
    clock.now += 10
    quarantine.note_death(KEY, "i-2")
    clock.now += FORGET_S - 1
    with pytest.raises(PoisonPrompt) as caught:
        quarantine.check(KEY, "m")
    assert caught.value.retry_after_s == pytest.approx(1.0)
    clock.now += 1
    quarantine.check(KEY, "m")
    assert len(quarantine._deaths) == 0


def test_it_is_bounded() -> None:
    """The prompts of longest ago are forgotten first."""
    quarantine = Quarantine(FakeClock())
    for index in range(PROMPTS_MAX + 1):
        for incarnation in ("i-1", "i-2"):
            quarantine.note_death(str(index).encode(), incarnation)
    assert len(quarantine._deaths) == PROMPTS_MAX
    quarantine.check(b"0", "m")
    with pytest.raises(PoisonPrompt):
        quarantine.check(b"1", "m")


def test_what_a_prompt_is_known_by() -> None:
    """What a worker works on: the model, the prompt and the format; nothing of one request."""
    pb = inference_pb2
    plain = pb.GenerateRequest(text="a")
    same = pb.GenerateRequest(
        text="a",
        request_id="r",
        max_tokens=9,
        sampling=types_pb2.SamplingOptions(seed=1),
        resume_from=1,
        resume_token_ids=[1],
    )
    others = [
        pb.GenerateRequest(text="b"),
        pb.GenerateRequest(tokens=pb.TokenIds(ids=[1])),
        pb.GenerateRequest(tokens=pb.TokenIds(ids=[2])),
        pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(content="a")])),
        pb.GenerateRequest(text="a", response_format=pb.ResponseFormat(json_object=True)),
    ]

    assert key_of(plain, "d") == key_of(same, "d")
    said = pb.ChatPrompt(messages=[pb.ChatMessage(content="a")])
    chats = [pb.GenerateRequest(chat=said), pb.GenerateRequest(chat=said)]
    chats[1].chat.now.seconds = 5
    assert key_of(chats[0], "d") == key_of(chats[1], "d")
    keys = {key_of(plain, "d"), key_of(plain, "e"), *(key_of(other, "d") for other in others)}
    assert len(keys) == 2 + len(others)


@pytest.mark.asyncio
async def test_a_key_is_made_when_it_is_asked_for_and_once() -> None:
    """A prompt that nobody suspects is not copied; what is asked twice is the same."""
    request = inference_pb2.GenerateRequest(text="once")
    key = PromptKey(request, "d")
    request.text = "upon"
    first, *others = await asyncio.gather(*(key.get() for _ in range(4)))
    request.text = "a time"
    assert set(others) == {first}

    assert first == key_of(inference_pb2.GenerateRequest(text="upon"), "d")
    assert await key.get() == first


def test_suspects_are_there_until_cleared_or_forgotten() -> None:
    """Without any, nobody asks for keys."""
    clock = FakeClock()
    quarantine = Quarantine(clock)
    assert not quarantine.has_suspects
    quarantine.note_death(KEY, "i-1")
    assert quarantine.has_suspects
    quarantine.clear(KEY)
    assert not quarantine.has_suspects
    quarantine.note_death(KEY, "i-2")
    clock.now += FORGET_S
    assert not quarantine.has_suspects
