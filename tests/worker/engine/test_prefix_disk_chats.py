"""Memory that is short, and chats that are longer than any model stays: what the disk adds."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests.support.engines import TinyEngine, tiny_engine
from tests.support.kept_on_disk import BLOCK_TOKENS, SettledTier, disk_of, engine_with_disk
from tests.support.remembering import MEMORIES, answer_of, tokens_of

PROMPT = tokens_of(1, 100)
WHOLE = 99 // BLOCK_TOKENS * BLOCK_TOKENS
OTHERS = [tokens_of(seed, 100) for seed in range(11, 15)]
TURNS = 30
UNLOADS = (8, 16, 24)
"""Before these turns the model goes and comes back."""
SAID = 6
ADDED = 5
"""Tokens that a turn's answer and its question have."""
KEEPS_EACH = {"standard", "latent"}
"""Kinds of memory that keep every position, so that what was said is there too."""


@pytest.fixture(scope="module", params=MEMORIES)
def memory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A tiny model of each kind of memory, with its name."""
    return request.param, MEMORIES[request.param](tmp_path_factory.mktemp(request.param))


@cache
def cold_ids(model: Path, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """Return what an engine without any memory answers."""
    return tiny_engine(model, keeps_spares=False).alone(prompt, max_tokens=max_tokens).ids


def ask(tiny: TinyEngine, prompt: tuple[int, ...], max_tokens: int = 8) -> tuple[list[int], int]:
    """Return an answer, and how many of the prompt's tokens were not evaluated."""
    sink = tiny.alone(prompt, max_tokens=max_tokens)
    return sink.ids, answer_of(sink).cached


def test_what_memory_has_no_room_for_is_read(memory: tuple[str, Path], tmp_path: Path) -> None:
    """A prompt that was used once and had to make room for others comes back from disk, with the
    same tokens: where memory is short it is written after its first use.
    """
    _, model = memory
    with engine_with_disk(model, tmp_path / "ample") as ample:
        ask(ample, PROMPT)
        nbytes = ample.prefix.nbytes
        assert disk_of(ample).tier.store.counts.written == 0, "there is room"

    # What goes from memory depends on what is on disk and on how fast the disk is measured to be.
    settled = {"make_tier": SettledTier, "clock": lambda: 0.0}
    short_nbytes = nbytes * 3 // 2
    with engine_with_disk(
        model, tmp_path / "short", prefix_nbytes=short_nbytes, disk_options=settled
    ) as short:
        for prompt in (PROMPT, *OTHERS):
            ask(short, prompt)
            short.run()  # until nothing waits for its turn
        ids, cached = ask(short, PROMPT)
        assert cached == WHOLE
        assert ids == cold_ids(model, PROMPT, 8)
        assert disk_of(short).figures(hit_tokens=0).read > 0


def test_a_chat_through_three_unloads(memory: tuple[str, Path], tmp_path: Path) -> None:
    """Thirty turns, and the model goes three times: no turn evaluates more than its new tokens and
    one block, and each says what a cold engine says.
    """
    name, model = memory
    talk = (*tokens_of(20, 40),)
    new = len(talk)
    with ExitStack() as loaded:
        tiny = loaded.enter_context(engine_with_disk(model, tmp_path / "blocks", save=True))
        for turn in range(TURNS):
            if turn in UNLOADS:
                loaded.close()
                tiny = loaded.enter_context(engine_with_disk(model, tmp_path / "blocks", save=True))
            said, cached = ask(tiny, talk, SAID)
            assert len(talk) - cached <= new + BLOCK_TOKENS, f"turn {turn}"
            if turn % 7 == 0:
                assert said == cold_ids(model, talk, SAID)
            talk = (*talk, *said, *tokens_of(100 + turn, ADDED))
            new = ADDED + (0 if name in KEEPS_EACH else SAID)
