"""What the shipped file answers: sampled by plain numpy, every row at once, each by its own seed.

All rows stand at the same position: a row whose prompt is longer than another's reads on while
the other already writes. A row's draws depend on the seed and its request's number alone; sums
may round differently from one machine to another, so that a draw can fall otherwise there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from demo_training.chats.packing import judged_ids
from demo_training.chats.people import names
from demo_training.chats.requests import Request
from demo_training.reference import Cache, Reference, Rows
from demo_training.tokens import BOUNDARY_ID, TURN_END_ID

TOKENS_MAX = 400
"""An answer that has not ended after so many tokens is cut, and counted as not ended."""
TEMPERATURE = 0.8
TOP_P = 0.95
SEED = 20260103
NEAR = 2e-6
"""Odds, of the likeliest token's, below which a token is not looked at."""

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, and whether the model ended it."""

    text: str
    tokens: int
    has_ended: bool


@dataclass(frozen=True, slots=True)
class Judgement:
    """How many of the requests were answered as they should be."""

    requests: int
    named: int
    ended: int
    tokens_max: int
    tokens_mean: float


def judge(requests: Sequence[Request], answers: Sequence[Answer]) -> Judgement:
    """Count the answers that name whom their request names, and those that ended."""
    pairs = zip(requests, answers, strict=True)
    return Judgement(
        requests=len(requests),
        named=sum(names(answer.text, request.name) for request, answer in pairs),
        ended=sum(answer.has_ended for answer in answers),
        tokens_max=TOKENS_MAX,
        tokens_mean=round(sum(answer.tokens for answer in answers) / len(answers), 1),
    )


def answers(folder: Path, requests: Sequence[Request]) -> list[Answer]:
    """Return the answers of the model in `folder`, sampled as generation_config.json says."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [judged_ids(tokenizer, request.text) for request in requests]
    draws = [np.random.default_rng([SEED, request.number]) for request in requests]
    written = sample(Reference.load(folder), prompts, draws, tokens_max=TOKENS_MAX)
    return [
        Answer(tokenizer.decode(ids), len(ids), has_ended=len(ids) < TOKENS_MAX) for ids in written
    ]


def sample(
    model: Reference,
    prompts: Sequence[Sequence[int]],
    draws: Sequence[np.random.Generator],
    *,
    tokens_max: int,
) -> list[list[int]]:
    """Return what follows each prompt, without the token that ended it: at most `tokens_max`."""
    written: list[list[int]] = [[] for _ in prompts]
    active = np.arange(len(prompts))
    cache = Cache.empty(model.config, len(prompts), max(map(len, prompts)) + tokens_max)
    position = 0
    while len(active) > 0:
        rows = [int(row) for row in active]
        fed = [(*prompts[row], *written[row])[position] for row in rows]
        scores = model.next_logits(np.array(fed, np.int64), cache, position)
        position += 1
        stays = np.ones(len(active), np.bool_)
        for place, row in enumerate(rows):
            if position < len(prompts[row]):
                continue
            token = _draw(scores[place], draws[row])
            if token in (BOUNDARY_ID, TURN_END_ID):
                stays[place] = False
                continue
            written[row].append(token)
            stays[place] = len(written[row]) < tokens_max
        if not stays.all():
            active = active[stays]
            cache = cache.of_rows(stays)
    return written


def _draw(scores: Rows, rng: np.random.Generator) -> int:
    """Draw a token at the temperature from the most likely ones that make up the share.

    Only tokens near enough to the likeliest are put in order: the others' odds, of 4,096 tokens
    together, are under a hundredth, so the share is made up before they would be reached.
    """
    scaled: Doubles = scores.astype(np.float64) / TEMPERATURE
    odds = np.exp(scaled - scaled.max())
    near = np.flatnonzero(odds > NEAR)
    order = near[np.argsort(-odds[near], kind="stable")]
    sums = np.cumsum(odds[order]) / odds.sum()
    kept = int(np.searchsorted(sums, TOP_P))
    place = int(np.searchsorted(sums[: kept + 1], rng.random() * sums[kept]))
    return int(order[place])
