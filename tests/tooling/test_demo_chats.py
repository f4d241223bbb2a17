"""The demo model's training chats: made of stories alone, and nobody held out is in them."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer

from demo_training.chats.answers import Answer, judge, sample
from demo_training.chats.conversations import ChatMaker, Source
from demo_training.chats.packing import chat_windows, render
from demo_training.chats.passages import passage_at, sentences, shorten
from demo_training.chats.people import CommonWords, Namer, names, people_of
from demo_training.chats.requests import Request, held_out_requests, training_chats
from demo_training.chats.wordings import ABOUT, ABOUT_SOMEBODY, JUDGED, REQUEST_WORDINGS
from demo_training.forward import initial_parameters
from demo_training.reference import Reference
from demo_training.shape import Shape
from demo_training.tokens import BOUNDARY, BOUNDARY_ID, TURN_END, TURN_END_ID, train_tokenizer

PARAGRAPHS = (
    (
        "Robin went down to the river before the sun was up, for he had heard the miller speak of "
        'a fox that sat there every night and counted the stars. "Who is there?" wordings Robin.'
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
    """The first sentence stays, with those that name what was wordings for."""
    short = shorten(STORY[: len("\n".join(PARAGRAPHS * 2))], "Robin")
    assert short is not None
    assert short.startswith(sentences(PARAGRAPHS[0])[0])
    assert len(short) <= len("\n".join(PARAGRAPHS * 2)) // 2
    assert names(short, "Robin")
    assert shorten("One. Two.", "One") is None


def test_nobody_held_out_is_in_a_chat() -> None:
    """Held-out names are replaced wherever they stand; a request's name stands in its answer."""
    namer = Namer.of(["Robin", "Marian", "Alda"], {"Robin"})
    maker = ChatMaker.of(namer)
    source = Source.of(STORY, ("Robin", "Marian"))
    chats = [
        turns for seed in range(60) for turns in maker.chats(source, np.random.default_rng(seed))
    ]
    wordings = [w.format(x="\0") for w in (*ABOUT, *ABOUT_SOMEBODY)]

    assert len(chats) > 40
    assert not any(names(content, "Robin") for turns in chats for _, content in turns)
    named = 0
    for turns in chats:
        request, answer = turns[-2][1], turns[-1][1]
        for wording in wordings:
            head, _, tail = wording.partition("\0")
            if head and request.startswith(head) and request.endswith(tail):
                name = request[len(head) : len(request) - len(tail)]
                if name.istitle() and name.isalpha():
                    assert names(answer, name), request
                    named += 1
    assert named > 10


def test_judged_wordings_are_held_out() -> None:
    """No wording that is judged is trained on."""
    assert not {text.lower() for text in JUDGED} & {text.lower() for text in REQUEST_WORDINGS}


def test_requests_and_chats_follow_from_the_texts() -> None:
    """Requests are 200, each with its name in it; chats come out the same again."""
    requests = held_out_requests([STORY.replace("Robin", "Tristan")])
    chats = [training_chats([STORY] * 3, [STORY.replace("Marian", "Isolde")], 5) for _ in range(2)]

    assert len(requests) == 200
    assert {request.name for request in requests} == {"Tristan", "Marian"}
    assert all(names(request.text, request.name) for request in requests)
    assert chats[0] == chats[1] != []
    assert not any(names(chat, "Robin") for chat in chats[0])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One trained on enough text to fill the vocabulary."""
    rng = np.random.default_rng(2)
    words = ["".join(rng.choice(list("abcdefghijklmnop"), 6)) for _ in range(4000)]
    return train_tokenizer([" ".join(words)])


def test_windows_begin_with_a_chat(tokenizer: Tokenizer) -> None:
    """Every window begins with a chat, and one that was cut begins the next, whole."""
    texts = [render((("user", f"abc {n}"), ("assistant", "def " * n))) for n in range(1, 40)]
    windows = chat_windows(tokenizer, texts, 128)

    assert windows.shape[1] == 129
    assert (windows[:, 0] == BOUNDARY_ID).all()
    assert (windows == TURN_END_ID).any(axis=1).all()
    starts = [tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in windows]
    assert all(any(start.startswith(text) for text in texts) for start in starts)
    assert texts[0].count(TURN_END) == 2
    assert texts[0].startswith(BOUNDARY)


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
