"""The distribution of what guessing gives, against the exact one; a wrong rule is found out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import pytest

from mlxd_shared.domain.requests import Sampling
from mlxd_worker.cache.base import RowId
from mlxd_worker.models.base import Model
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.support.effort import IN_SOAK
from tests.support.reference_sampler import final_distribution
from tests.support.tiny_model import write_tiny_model
from tests.worker.distributions import fit_probability
from tests.worker.engine.speculation.guessing import Oracle, guessing_engine
from tests.worker.tiny import caches_of, floats, forced_logits, load

PROMPT = (17,)
NEW_TOKENS = 3
STREAMS = 6_700
"""Of three tokens each: 20,100 draws."""
GUESSED = STREAMS if IN_SOAK else STREAMS // 4
"""How many of them the engine draws."""
ROWS_MAX = 11
ACCEPTED = 1e-4
"""The probability of a worse fit, above which a sample is taken to fit."""
SAMPLING = Sampling(
    temperature=1.3, top_k=4, top_p=0.95, min_p=0.02, seed=0, presence_penalty=0.7, repeat_last_n=2,
    xtc_probability=0.2, xtc_threshold=0.15,
)  # fmt: skip

Texts = Mapping[tuple[int, ...], float]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    """That model."""
    return load(folder)


@pytest.fixture(scope="module")
def exact(model: Model) -> Texts:
    """The exact probability of every output of three tokens."""
    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NEW_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in probabilities.items():
            for token, chance in enumerate(next_distribution(model, text)):
                if chance:
                    longer[(*text, token)] = probability * chance
        probabilities = longer
    assert len(probabilities) <= SAMPLING.top_k**NEW_TOKENS
    return probabilities


def next_distribution(model: Model, text: Sequence[int]) -> list[float]:
    """Return the exact distribution behind the prompt and `text`."""
    tokens = (*PROMPT, *text)
    logits = floats(forced_logits(model, caches_of(model), RowId(0), tokens, ())[-1])
    recent = Counter(tokens[-SAMPLING.repeat_last_n :])
    distribution: list[float] = final_distribution(logits, SAMPLING, recent=recent).tolist()
    return distribution


def fit(texts: Sequence[tuple[int, ...]], exact: Texts) -> float:
    """Return how well texts fit their exact distribution."""
    counts = Counter(texts)
    assert counts.keys() <= exact.keys(), "something was drawn that cannot be"
    return fit_probability([counts[text] for text in exact], list(exact.values()))


def test_outputs_are_distributed_as_without_guessing(
    folder: Path, model: Model, exact: Texts
) -> None:
    """Under all options at once, guessing the likeliest text and, by turns, the least likely."""
    ranked = sorted(exact, key=lambda text: exact[text])
    proposed = cycle([ranked[-1], ranked[0]])
    tiny = guessing_engine(
        model,
        load_tokenizer(folder),
        make_drafter=lambda prompt: Oracle(prompt, next(proposed)),
        rows_max=ROWS_MAX,
        context_length=256,
    )
    sinks = [
        tiny.submit(PROMPT, max_tokens=NEW_TOKENS, sampling=replace(SAMPLING, seed=seed))[1]
        for seed in range(GUESSED)
    ]
    while tiny.engine.busy:
        tiny.engine.step()

    assert fit([tuple(sink.ids) for sink in sinks], exact) > ACCEPTED
    usages = [sink.finished.usage for sink in sinks]
    drafted = sum(usage.drafted_tokens for usage in usages)
    accepted = sum(usage.accepted_draft_tokens for usage in usages)
    assert drafted >= len(sinks)
    assert 0 < accepted < drafted


Rule = Callable[[Sequence[float], int, random.Random], int]


def right(chances: Sequence[float], guess: int, draws: random.Random) -> int:
    """Accept with the guess's probability, else draw from what is left without it."""
    if draws.random() < chances[guess]:
        return guess
    left = [0.0 if token == guess else chance for token, chance in enumerate(chances)]
    return draws.choices(range(len(left)), left)[0]


def drawn_with_the_guess(chances: Sequence[float], guess: int, draws: random.Random) -> int:
    """Accept as is right, but leave the guess in when it was refused."""
    if draws.random() < chances[guess]:
        return guess
    return draws.choices(range(len(chances)), chances)[0]


def accepted_where_likely(chances: Sequence[float], guess: int, draws: random.Random) -> int:
    """Accept whatever is no less likely than a third of the best."""
    if chances[guess] >= max(chances) / 3:
        return guess
    return draws.choices(range(len(chances)), chances)[0]


def accepted_too_readily(chances: Sequence[float], guess: int, draws: random.Random) -> int:
    """Accept with a quarter more than the guess's probability."""
    if draws.random() < 1.25 * chances[guess]:
        return guess
    left = [0.0 if token == guess else chance for token, chance in enumerate(chances)]
    return draws.choices(range(len(left)), left)[0]


@pytest.mark.parametrize(
    ("rule", "fits"),
    [
        (right, True),
        (drawn_with_the_guess, False),
        (accepted_where_likely, False),
        (accepted_too_readily, False),
    ],
)
def test_a_wrong_rule_is_found_out(model: Model, exact: Texts, rule: Rule, *, fits: bool) -> None:
    """As many outputs, drawn token by token under a rule that is slightly wrong, do not fit."""
    proposed = max(exact, key=lambda text: exact[text])
    texts = [text for length in range(NEW_TOKENS) for text in product(*[tokens_of(exact)] * length)]
    known = {text: next_distribution(model, text) for text in texts if any_begins(exact, text)}
    draws = random.Random(5)
    outputs = []
    for _ in range(STREAMS):
        text: tuple[int, ...] = ()
        agrees = True
        while len(text) < NEW_TOKENS:
            chances, guess = known[text], proposed[len(text)]
            if agrees:
                text = (*text, rule(chances, guess, draws))
                agrees = text[-1] == guess
            else:
                text = (*text, draws.choices(range(len(chances)), chances)[0])
        outputs.append(text)

    assert (fit(outputs, exact) > ACCEPTED) is fits


def tokens_of(exact: Texts) -> list[int]:
    """Return every token that can occur."""
    return sorted({token for text in exact for token in text})


def any_begins(exact: Texts, text: tuple[int, ...]) -> bool:
    """Tell whether some output begins with `text`."""
    return any(known[: len(text)] == text for known in exact)
