"""How the demo model is made: nothing held out leaks, every byte is scored once, losses fall."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from demo_training.corpus import is_held_out, split_corpus
from demo_training.evaluate import windows
from demo_training.forward import initial_parameters, logits, mean_loss
from demo_training.overlap import SPAN_CHARS, HeldOutSpans, run_hashes
from demo_training.reference import Cache, Reference
from demo_training.shape import Shape
from demo_training.tokens import BOUNDARY_ID
from demo_training.train import Chats, Recipe, epoch_starts, learning_rate, train, train_chats

TINY = Shape(
    vocab_size=32,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=16,
)
HELD_OUT_TITLE = "the fir tree"
OTHER_TITLE = "the oak"

Prose = Callable[[int], str]


@pytest.fixture
def prose() -> Prose:
    """Writes text of so many letters that repeats nothing."""
    rng = np.random.default_rng(7)

    def write(count: int) -> str:
        return "".join(rng.choice(list("abcdefghijklmnop qrstuvwxyz"), count))

    return write


def write_corpus(folder: Path, stories: dict[str, str]) -> None:
    """Write a corpus of these titles and texts."""
    rows = [
        {"collection": "own", "title": k, "author": None, "text": v} for k, v in stories.items()
    ]
    (folder / "corpus").mkdir()
    with lzma.open(folder / "corpus" / "stories.jsonl.xz", "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def test_equal_runs_hash_alike_wherever_they_stand(prose: Prose) -> None:
    """A run's hash depends on its characters alone, not on its place."""
    run = prose(50)
    texts = [prose(before) + run + prose(9) for before in (0, 1, 77)]
    codes = [np.frombuffer(text.encode("utf-32-le"), np.uint32) for text in texts]
    hashes = [run_hashes(c, 50)[before] for c, before in zip(codes, (0, 1, 77), strict=True)]

    assert len(set(hashes)) == 1
    assert len(set(run_hashes(codes[2], 50))) == len(texts[2]) - 49


def test_a_shared_span_is_found_whole(prose: Prose) -> None:
    """Two hundred shared characters are found; one fewer are not, while spaces break words."""
    held = prose(1000)
    spans = HeldOutSpans.of([held])
    long, short = held[300 : 300 + SPAN_CHARS], held[300 : 300 + SPAN_CHARS - 1]
    spaced = " ".join(short[:120])

    assert spans.shared_chars("#" * 10 + long + "#") == [(10, 10 + SPAN_CHARS)]
    assert spans.shared_chars("#" + spaced) == []


def test_another_edition_hides_nothing(prose: Prose) -> None:
    """Capitals, line breaks and quotes do not hide a shared passage."""
    held = prose(1000)
    edition = "\n'".join(held[start : start + 40].upper() for start in range(200, 600, 40))

    assert HeldOutSpans.of([held]).shared_chars(edition) != []


def test_paragraphs_that_repeat_held_out_text_go(tmp_path: Path, prose: Prose) -> None:
    """What overlaps a held-out story is out of training, and the rest of the story stays."""
    assert is_held_out(HELD_OUT_TITLE)
    assert not is_held_out(OTHER_TITLE)
    held, kept = prose(900), [prose(700), prose(700)]
    story = "\n".join([kept[0], prose(20) + held[100:400], kept[1]])
    write_corpus(tmp_path, {HELD_OUT_TITLE: held, OTHER_TITLE: story, "a copy": held})

    split = split_corpus(tmp_path)

    assert split.training == ("\n".join(kept),)
    assert [story.text for story in split.held_out] == [held]
    assert (split.removal.stories, split.removal.paragraphs) == (1, 2)


@pytest.mark.parametrize("targets", [1, 15, 16, 17, 24, 25, 1000])
def test_every_target_is_scored_once(targets: int) -> None:
    """Scored ranges tile all targets; each has half the context behind it, or all there is."""
    context = 16
    scored: list[int] = []
    for start, end, first in windows(targets, context):
        assert start <= first < end <= start + context
        assert first == 0 or first - start >= context // 2
        scored += range(first, end)

    assert scored == list(range(targets))


def test_training_and_scoring_agree_on_the_model() -> None:
    """The MLX forward pass and the plain numpy one give the same logits."""
    parameters = initial_parameters(TINY, seed=3)
    loud = {name: value * (1 if value.ndim == 1 else 8) for name, value in parameters.items()}
    config = TINY.config(BOUNDARY_ID)
    reference = Reference(config, {name: np.array(value) for name, value in loud.items()})
    ids = np.arange(16, dtype=np.int64) * 5 % TINY.vocab_size

    ours = np.array(logits(loud, mx.array(ids.astype(np.int32))[None], TINY))

    assert np.abs(ours).max() > 1
    np.testing.assert_allclose(reference.logits(ids), ours, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(reference.logits(ids, rows_from=12), reference.logits(ids)[12:])


def test_a_token_at_a_time_gives_the_same_logits() -> None:
    """The cache changes nothing: each row's logits are those of its whole sequence."""
    parameters = initial_parameters(TINY, seed=3)
    config = TINY.config(BOUNDARY_ID)
    loud = {name: np.array(v * (1 if v.ndim == 1 else 8)) for name, v in parameters.items()}
    reference = Reference(config, loud)
    rows = np.arange(30, dtype=np.int64).reshape(3, 10) * 7 % TINY.vocab_size
    cache = Cache.empty(config, 3, 10)
    stepped = [reference.next_logits(rows[:, place], cache, place) for place in range(10)]

    for row in range(3):
        whole = reference.logits(rows[row])
        np.testing.assert_allclose([at[row] for at in stepped], whole, rtol=1e-4, atol=1e-4)


def test_the_second_stage_learns_chats_too() -> None:
    """From the first stage's weights, what only the chats repeat is foretold as well."""
    stream = np.tile(np.array([BOUNDARY_ID, *range(1, 12)], np.uint16), 40)
    windows = np.tile(np.arange(20, 31, dtype=np.uint16), (8, 2))[:, :17]
    chats = Chats(windows, windows == 25)
    recipe = Recipe(rate_peak=1e-2, warmup_steps=5, batch_windows=4, epochs=8.0)
    second = replace(recipe, chat_steps=60, chat_rate_peak=1e-2, chat_warmup_steps=5)
    first = train(stream, stream[:100], TINY, recipe, steps_max=40)

    outcome = train_chats(first.parameters, stream, chats, stream[:100], TINY, second)

    assert outcome.steps == 60
    before, after = (
        float(np.array(mean_loss(parameters, mx.array(windows.astype(np.int32)), TINY)))
        for parameters in (first.parameters, outcome.parameters)
    )
    assert after < 1 < before


def test_names_count_for_more_in_chats() -> None:
    """A marked token's loss counts as often as the recipe says; others count once."""
    windows = np.arange(34, dtype=np.uint16).reshape(2, 17) % TINY.vocab_size
    marks = np.zeros(windows.shape, np.bool_)
    marks[1, 5] = True
    weights = Chats(windows, marks).weights(np.array([1, 0]), 5.0)
    parameters, ids = initial_parameters(TINY, seed=3), mx.array(windows.astype(np.int32))

    assert weights[0].tolist() == [1.0] * 5 + [5.0] + [1.0] * 11
    assert weights[1].tolist() == [1.0] * 17
    unweighted, alike, alone = (
        float(np.array(mean_loss(parameters, ids, TINY, weights=each)))
        for each in (None, mx.ones(windows.shape), mx.array(marks.astype(np.float32)))
    )
    scores = logits(parameters, ids[1:, :-1], TINY)[4]
    of_marked = float(np.array(mx.logsumexp(scores) - scores[int(windows[1, 5])]))
    assert alike == pytest.approx(unweighted)
    assert alone == pytest.approx(of_marked, rel=2e-2)
    assert abs(alone - unweighted) > 0.05


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_training_learns(optimiser: str) -> None:
    """A text that repeats itself is soon foretold, by either rule, dropout and all."""
    cycle = np.array([BOUNDARY_ID, *range(1, 20)], np.uint16)
    stream = np.tile(cycle, 40)
    recipe = Recipe(optimiser, rate_peak=1e-2, warmup_steps=5, batch_windows=4, dropout=0.05)

    outcome = train(stream, stream[:100], TINY, replace(recipe, epochs=8.0), steps_max=100)

    assert outcome.steps == 100
    assert outcome.curve[-1].held_out_loss is not None
    assert outcome.curve[-1].held_out_loss < 0.7 < outcome.curve[0].training_loss


def test_an_epoch_covers_the_stream_and_every_opening() -> None:
    """Windows fit the stream, lie on one grid, and each story's opening starts one."""
    stream = np.ones(1000, np.uint16)
    openings = [0, 123, 400, 999]
    stream[openings] = BOUNDARY_ID
    starts = epoch_starts(stream, 64, np.random.default_rng(1))
    grid = sorted(set(starts.tolist()) - set(openings))

    assert {0, 123, 400} <= set(starts.tolist())
    assert max(starts) + 65 <= len(stream)
    assert len(starts) >= 1000 // 64 - 1
    assert set(np.diff(grid)) <= {64, 128}


def test_the_rate_rises_and_falls() -> None:
    """The rate climbs to its peak over the warm-up and ends at the floor."""
    recipe = Recipe(rate_peak=1.0, rate_floor_share=0.1, warmup_steps=10)
    rates = [learning_rate(step, 100, recipe) for step in range(1, 101)]

    assert rates[:10] == sorted(rates[:10])
    assert max(rates) == rates[9] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
