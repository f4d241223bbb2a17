"""The chats for training, and the requests that name people of held-out stories."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from demo_training.chats.conversations import ChatMaker, Source
from demo_training.chats.packing import Rendered, render_marked
from demo_training.chats.people import Namer, everybody
from demo_training.chats.wordings import JUDGED
from demo_training.parallel import share_out

REQUESTS = 200
SAMPLE_EVERY = 3
"""Shares no factor with the number of wordings, so that the sample has them all alike."""
SHUFFLE_STREAM = 1


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the judging, whom it names, and its number, which seeds its answer."""

    number: int
    text: str
    name: str


def held_out_names(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the people of the held-out `texts`, nobody twice.

    Every story's first person comes first, then every story's second, and so on.
    """
    people = everybody(texts)
    deepest = max(map(len, people))
    in_turn = [story[rank] for rank in range(deepest) for story in people if rank < len(story)]
    return tuple(dict.fromkeys(in_turn))


def judged_requests(names: Sequence[str]) -> tuple[Request, ...]:
    """Return 200 requests in held-out words; names and wordings take turns."""
    return tuple(
        Request(index, JUDGED[index % len(JUDGED)].format(x=name), name)
        for index, name in enumerate(names[n % len(names)] for n in range(REQUESTS))
    )


def sample_of_requests(requests: Sequence[Request]) -> tuple[Request, ...]:
    """Return the quick sample: every third."""
    return tuple(requests[::SAMPLE_EVERY])


def training_chats(training: Sequence[str], held_out: Sequence[str], seed: int) -> list[Rendered]:
    """Return rendered chats made of the training texts, in a random order.

    Nobody of the held-out texts is in them.
    """
    strangers = {name for people in everybody(held_out) for name in people}
    people = everybody(training)
    namer = Namer.of((name for names in people for name in names), strangers)
    items = [(index, text, people[index]) for index, text in enumerate(training)]
    by_story = share_out(partial(_chats_of, ChatMaker.of(namer), seed), items)
    chats = [chat for chats in by_story for chat in chats]
    order = np.random.default_rng([seed, len(training), SHUFFLE_STREAM]).permutation(len(chats))
    return [chats[place] for place in order]


def _chats_of(
    maker: ChatMaker, seed: int, items: Sequence[tuple[int, str, tuple[str, ...]]]
) -> list[list[Rendered]]:
    made: list[list[Rendered]] = []
    for index, text, people in items:
        rng = np.random.default_rng([seed, index])
        chats = maker.chats(Source.of(text, people), rng)
        made.append([render_marked(chat) for chat in chats])
    return made
