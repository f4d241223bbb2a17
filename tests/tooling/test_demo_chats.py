"""The demo model's training chats: made of stories alone, and nobody held out is in them."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer

from demo_training.chats.answers import Answer, judge, sample
from demo_training.chats.conversations import NAMED_CHARS, Chat, ChatMaker, Source
from demo_training.chats.packing import Rendered, chat_windows, render, render_marked
from demo_training.chats.passages import passage_at, sentences, shorten
from demo_training.chats.people import CommonWords, Namer, crossed_name, names, people_of
from demo_training.chats.requests import (
    Request,
    held_out_names,
    judged_requests,
    sample_of_requests,
    training_chats,
)
from demo_training.chats.wordings import (
    ABOUT,
    ABOUT_SOMEBODY,
    CLOSERS,
    JUDGED,
    OPENERS,
    REQUEST_WORDINGS,
)
from demo_training.forward import initial_parameters
from demo_training.reference import Reference
from demo_training.shape import Shape
from demo_training.tokens import BOUNDARY, BOUNDARY_ID, TURN_END, TURN_END_ID, train_tokenizer

PARAGRAPHS = (
    (
        "Robin went down to the river before the sun was up, for he had heard the miller speak of "
        'a fox that sat there every night and counted the stars. "Who is there?" asked Robin.'
    ),
    (
        '"Nobody," said the fox, and went on counting. Robin sat down beside him on a stone, and '
        "the two of them looked up until the last of the stars had gone from the sky."
    ),
    (
        "When the bell rang in the village Marian came with bread. She said nothing at all. Marian "
        "laughed when she saw the fox, and Robin laughed too, and they ate what there was."
    ),
)
STORY = "\n".join(PARAGRAPHS * 4)
COMMON = CommonWords(frozenset({"nobody", "who", "when", "she"}))


def test_people_are_those_who_speak_and_move() -> None:
    """Who does things is somebody; a word at a sentence's head is not, nor one named once."""
    assert people_of(STORY, COMMON) == ("Robin", "Marian")
    assert people_of(PARAGRAPHS[0], COMMON) == ()
    common = CommonWords.of(["The man saw a will. Will said no. A will is a will.", "Robin ran."])
    assert "will" in common.words
    assert "robin" not in common.words


def test_a_passage_begins_and_ends_naturally() -> None:
    """It is whole paragraphs, or ends behind a sentence with no quotation open."""
    passage = passage_at(STORY, 0, 200)
    assert passage is not None
    assert passage.text == "\n".join(PARAGRAPHS[:2])
    long = " ".join(PARAGRAPHS * 3)
    cut = passage_at(long, 0, 180)
    assert cut is not None
    assert cut.text.endswith('"Nobody," said the fox, and went on counting.')
    assert passage_at("CHAPTER I. " + STORY, 0, 200) is None
    assert passage_at(STORY[:100], 0, 200) is None


def test_a_shorter_telling_is_at_most_half() -> None:
    """The first sentence stays, with those that name what was asked for."""
    short = shorten(STORY[: len("\n".join(PARAGRAPHS * 2))], "Robin")
    assert short is not None
    assert short.startswith(sentences(PARAGRAPHS[0])[0])
    assert len(short) <= len("\n".join(PARAGRAPHS * 2)) // 2
    assert names(short, "Robin")
    assert shorten("One. Two.", "One") is None


def test_a_passage_is_not_cut_far_from_what_was_asked() -> None:
    """A paragraph that goes on to over twice the length asked for is cut behind a sentence."""
    sentence = "Robin went down to the river and sat there until the evening had come. "
    passage = passage_at((sentence * 12).strip(), 0, 170)

    assert passage is not None
    assert passage.text == (sentence * 3).strip()


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    """Sixty draws of a story's chats; Robin is held out."""
    maker = ChatMaker.of(Namer.of(["Robin", "Marian", "Alda"], {"Robin"}))
    source = Source.of(STORY, ("Robin", "Marian"))
    return [chat for seed in range(60) for chat in maker.chats(source, np.random.default_rng(seed))]


def test_nobody_held_out_is_in_a_chat(chats: list[Chat]) -> None:
    """Held-out names are replaced wherever they stand, and nobody is given one."""
    assert len(chats) > 40
    assert not any(names(content, "Robin") for chat in chats for _, content in chat.turns)


def test_an_answer_names_soon_whom_its_request_names(chats: list[Chat]) -> None:
    """Whoever is asked for by name is named before the answer's fortieth character."""
    named = 0
    for chat in chats:
        for place, (role, content) in enumerate(chat.turns):
            wanted = [who for who in chat.subjects if names(chat.turns[place - 1][1], who)]
            if role == "assistant" and wanted:
                said = re.search("|".join(wanted), content)
                assert said is not None, chat.turns
                assert said.start() < NAMED_CHARS, chat.turns
                named += 1
    assert named > 40


def test_a_passage_is_about_whom_it_names_first() -> None:
    """A paragraph counts for the first person in it alone, and not where he comes late."""
    lines = (
        "Marian ran to Robin, who was at the river before the sun was up.",
        "Then Robin said that it was late; and he looked at Marian again.",
        "Down at the river, before the sun was up, and no bird sang, was Robin.",
    )
    starts = [0, len(lines[0]) + 1]
    source = Source.of("\n".join(lines), ("Robin", "Marian"))

    assert source.starts_by_name == {"Marian": (starts[0],)}
    late = Source.of("\n".join(lines).replace("Then Robin", "Now Robin"), ("Robin", "Marian"))
    assert late.starts_by_name == {"Robin": (starts[1],), "Marian": (starts[0],)}


def test_new_names_are_of_three_kinds() -> None:
    """Names of stories, crossings of two of them, and names made up: none foretells itself."""
    pool = ["Marian", "Hodge", "Alda"]
    rng = np.random.default_rng(3)
    crossings = {a[: (len(a) + 1) // 2] + b[(len(b) + 1) // 2 :] for a in pool for b in pool}
    drawn = [Namer.of(pool, {"Robin"}).draw(rng, "Alda ran.") for _ in range(300)]
    known = sum(name in pool for name in drawn)
    crossed = sum(name in crossings - set(pool) for name in drawn)

    assert {crossed_name(rng, pool) for _ in range(200)} == crossings
    assert not {"Alda", "Robin"} & set(drawn)
    assert min(known, crossed, len(drawn) - known - crossed) > 40


def test_judged_wordings_are_held_out() -> None:
    """No wording that is judged is trained on, whatever stands before or behind it."""
    judged = {text.lower() for text in JUDGED}
    trained = [*REQUEST_WORDINGS]
    trained += [
        opener + wording + closer
        for wording in (*ABOUT, *ABOUT_SOMEBODY)
        for opener in ("", *OPENERS)
        for closer in ("", *CLOSERS)
    ]

    assert not judged & {text.lower() for text in trained}


def test_the_sample_has_every_wording() -> None:
    """The quick sample of requests has each wording as often as another, give or take one."""
    sampled = Counter(request.text for request in sample_of_requests(judged_requests(["Tom"])))

    assert len(sampled) == len(JUDGED)
    assert max(sampled.values()) - min(sampled.values()) <= 1


def test_requests_and_chats_follow_from_the_texts() -> None:
    """Requests are 200, each with its name in it; chats come out the same again."""
    people = held_out_names([STORY.replace("Robin", "Tristan"), STORY])
    requests = judged_requests(people)
    chats = [training_chats([STORY] * 3, [STORY.replace("Marian", "Isolde")], 5) for _ in range(2)]

    assert len(requests) == 200
    assert people == ("Tristan", "Robin", "Marian")
    assert {request.name for request in requests} == set(people)
    assert all(names(request.text, request.name) for request in requests)
    assert chats[0] == chats[1] != []
    assert not any(names(chat.text, "Robin") for chat in chats[0])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One trained on enough text to fill the vocabulary."""
    rng = np.random.default_rng(2)
    words = ["".join(rng.choice(list("abcdefghijklmnop"), 6)) for _ in range(4000)]
    return train_tokenizer([" ".join(words)])


def test_windows_begin_with_a_chat(tokenizer: Tokenizer) -> None:
    """Every window begins with a chat, and one that was cut begins the next, whole."""
    texts = [render((("user", f"abc {n}"), ("assistant", "def " * n))) for n in range(1, 40)]
    windows, marks = chat_windows(tokenizer, [Rendered(text) for text in texts], 128)

    assert windows.shape[1] == 129
    assert marks.shape == windows.shape
    assert not marks.any()
    assert (windows[:, 0] == BOUNDARY_ID).all()
    assert (windows == TURN_END_ID).any(axis=1).all()
    starts = [tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in windows]
    assert all(any(start.startswith(text) for text in texts) for start in starts)
    assert texts[0].count(TURN_END) == 2
    assert texts[0].startswith(BOUNDARY)


def test_the_name_asked_for_is_marked_with_what_ends_it(tokenizer: Tokenizer) -> None:
    """Marked: where an answer first says whom its own request names, and the next token."""
    talk = ("Who is Bo?", "So Bo ran. Bo!", "Go on.", "Bo sat.", "And Al?", "Al, and Bo.")
    turns = tuple((("user", "assistant")[n % 2], text) for n, text in enumerate(talk))
    chat = render_marked(Chat(turns, ("Bo", "Al", "Bo")))
    windows, marks = chat_windows(tokenizer, [chat, chat], len(tokenizer.encode(chat.text)) - 1)

    assert [chat.text[start:end] for start, end in chat.spans] == ["Bo", "Al"]
    assert chat.text[: chat.spans[0][0]].endswith("assistant\nSo ")
    assert tokenizer.decode(windows[0][marks[0]].tolist()) == "Bo Al,"


def test_rows_are_sampled_apart() -> None:
    """A row's tokens do not depend on its neighbours, and stop at the limit."""
    shape = Shape(4096, 32, 2, 4, 2, 48, 64)
    weights = {k: np.array(v) for k, v in initial_parameters(shape, seed=1).items()}
    model = Reference(shape.config(BOUNDARY_ID), weights)
    prompts = [[0, 5, 6], [0, 7], [0, 8, 9, 10]]

    def write(rows: list[int]) -> list[list[int]]:
        draws = [np.random.default_rng([4, row]) for row in rows]
        return sample(model, [prompts[row] for row in rows], draws, tokens_max=12)

    together = write([0, 1, 2])
    assert [write([row])[0] for row in range(3)] == together
    assert {len(ids) for ids in together} <= set(range(13))


def test_an_answer_counts_by_its_name_and_its_end() -> None:
    """A name must stand as a whole word."""
    requests = [Request(n, "Tom?", "Tom") for n in range(3)]
    answers = [Answer("Tommy ran.", 4, has_ended=True), Answer("Tom.", 2, has_ended=False)]
    judged = judge(requests, [*answers, Answer("Is Tom in?", 3, has_ended=True)])

    assert (judged.requests, judged.named, judged.ended, judged.tokens_mean) == (3, 2, 2, 3.0)
