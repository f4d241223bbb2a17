"""Each option against the exact distribution: 20,000 draws fit it, and a wrong sampler's do not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from mlxd_shared.domain.requests import Sampling
from mlxd_worker.engine.masks.masks import AllowedTokens, words_count
from mlxd_worker.engine.sampling.sampler import SUPPORT_WIDTHS
from tests.support.effort import spread_evenly
from tests.support.reference_sampler import final_distribution
from tests.worker.distributions import fit_probability
from tests.worker.draws import ACCEPTED, DRAWS, LOGITS, counts_of, draw_many, options

# Four that stand out, and a crowd that has about as much together; ids are not ranks.
RANKED = [4.6, 4.4, 3.4, 3.2, *(0.25 - 0.004 * rank for rank in range(160))]
CROWD = tuple(RANKED[(token * 11 + 5) % len(RANKED)] for token in range(len(RANKED)))
RANKS = sorted(range(len(CROWD)), key=lambda token: -CROWD[token])
RECENT = {RANKS[0]: 1, RANKS[1]: 3, RANKS[2]: 1, RANKS[60]: 2}
XTC = {"xtc_probability": 0.3, "xtc_threshold": 0.065}


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked for, and what a sampler would do that gets some of it slightly wrong."""

    sampling: Sampling
    logits: Sequence[float] = CROWD
    recent: Mapping[int, int] = field(default_factory=dict)
    forbidden: tuple[int, ...] = ()
    allowed: frozenset[int] | None = None
    ends: tuple[int, ...] = ()
    wrong: tuple[Mapping[str, Any], ...] = ()
    """Changes of the options, or of the case, that make another distribution."""

    def count_draws(self, draws: int = DRAWS, *, hopeful: bool = False) -> list[int]:
        """Return how often each token comes in so many draws."""
        size = len(self.logits)
        tokens = draw_many(
            self.logits,
            self.sampling,
            draws,
            hopeful=hopeful,
            recent=self.recent,
            forbidden=self.forbidden,
            mask=None if self.allowed is None else pack_ids(self.allowed, size),
            ends=self.ends,
        )
        return counts_of(tokens, size)

    def exact(self) -> list[float]:
        """Return how often each should come."""
        exact: list[float] = final_distribution(
            self.logits,
            self.sampling,
            recent=self.recent,
            forbidden=self.forbidden,
            allowed=self.allowed,
            ends=self.ends,
        ).tolist()
        return exact

    def change(self, changes: Mapping[str, Any]) -> Case:
        """Return the case with options, or with parts of its own, changed."""
        own = {name: changes[name] for name in changes if name in Case.__dataclass_fields__}
        others = {name: changes[name] for name in changes if name not in own}
        return replace(self, sampling=replace(self.sampling, **others), **own)

    def wrongs(self) -> list[Mapping[str, Any]]:
        """Return all changes that have to show: the case's own, T 5 % off, and cuts off by one."""
        sampling = self.sampling
        changes = list(self.wrong)
        changes += [{"temperature": sampling.temperature * factor} for factor in (1.05, 0.95)]
        if (sampling.top_k or sampling.top_p < 1.0 or sampling.min_p) and not self.wrong:
            changes += off_by_one(self)
        return changes


def pack_ids(allowed: Collection[int], vocab_size: int) -> AllowedTokens:
    """Return a mask of these tokens."""
    bits = sum(1 << token for token in allowed)
    return AllowedTokens(bits.to_bytes(4 * words_count(vocab_size), "little"))


def off_by_one(case: Case) -> list[Mapping[str, Any]]:
    """Return cuts that keep one token less, or one more, than the case's do."""
    kept = sum(probability > 0.0 for probability in case.exact())
    return [{"top_p": 1.0, "min_p": 0.0, "top_k": kept + change} for change in (-1, 1)]


CASES = {
    "plain": Case(options(), LOGITS),
    "cool": Case(options(temperature=0.9), LOGITS),
    "top-k": Case(options(temperature=1.1, top_k=20), LOGITS),
    "top-p": Case(options(top_p=0.8), LOGITS),
    "min-p": Case(options(temperature=1.2, min_p=0.03), LOGITS),
    "all cuts": Case(options(temperature=0.95, top_k=24, top_p=0.95, min_p=0.01), LOGITS),
    "bias": Case(
        options(top_k=120, logit_bias=((RANKS[0], 0.3), (0, -100.0))),
        wrong=(
            {"logit_bias": ((RANKS[0], 0.1), (0, -100.0))},
            {"logit_bias": ((RANKS[0], 0.3),)},
        ),
    ),
    "repetition": Case(
        options(repetition_penalty=1.15),
        recent=RECENT,
        wrong=({"repetition_penalty": 1.25}, {"recent": {**RECENT, RANKS[3]: 1}}),
    ),
    "presence": Case(
        options(presence_penalty=0.5),
        recent=RECENT,
        wrong=({"presence_penalty": 0.8}, {"presence_penalty": 0.0, "frequency_penalty": 0.5}),
    ),
    "frequency": Case(
        options(frequency_penalty=0.4),
        recent=RECENT,
        wrong=({"frequency_penalty": 0.6}, {"recent": {**RECENT, RANKS[1]: 2}}),
    ),
    "penalties, then cuts": Case(
        options(
            temperature=0.9, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.2,
            frequency_penalty=0.1,
        ),
        recent=RECENT,
        wrong=({"recent": {}}, {"top_p": 0.92}),
    ),
    "xtc": Case(
        options(**XTC),
        wrong=(
            {"xtc_probability": 0.4},
            {"xtc_probability": 0.2},
            {"xtc_threshold": 0.05},  # one top choice more
            {"xtc_threshold": 0.1},  # one less
        ),
    ),
    "xtc after cuts": Case(
        options(temperature=0.95, top_k=140, top_p=0.95, min_p=0.001, **XTC),
        wrong=({"xtc_probability": 0.4}, {"xtc_threshold": 0.2}, {"xtc_threshold": 0.0}),
    ),
    "xtc and an end": Case(
        options(**XTC),
        ends=(RANKS[2],),  # the least likely of the top choices: not in its way
        wrong=({"ends": (RANKS[0],)}, {"ends": (RANKS[1],)}),
    ),
    "forbidden": Case(
        options(top_p=0.9),
        forbidden=(RANKS[3], RANKS[4]),
        wrong=({"forbidden": (RANKS[3],)},),
    ),
    "allowed": Case(
        options(temperature=1.1, top_p=0.9),
        allowed=frozenset(RANKS[::2]),
        wrong=({"allowed": frozenset(RANKS[2::2])},),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", spread_evenly(list(CASES), 8))
def test_draws_fit_the_exact_distribution_and_a_wrong_samplers_do_not(name: str) -> None:
    """p > 1e-4 for ours; below it with T 5 % off, a cut off by one, or the option slightly off."""
    case = CASES[name]
    exact = case.exact()
    noise = np.random.default_rng(7)

    assert fit_probability(case.count_draws(), exact) > ACCEPTED
    for changes in case.wrongs():
        wrong = noise.multinomial(DRAWS, case.change(changes).exact()).tolist()
        assert fit_probability(wrong, exact) < ACCEPTED, changes


@pytest.mark.parametrize("changes", [{"temperature": 1.05}, *off_by_one(CASES["top-p"])])
def test_this_very_sampler_with_a_wrong_option_does_not_fit(changes: Mapping[str, Any]) -> None:
    """What is rejected is not only arithmetic: T 5 % off, and one token too few or too many."""
    case = CASES["top-p"]
    assert fit_probability(case.change(changes).count_draws(), case.exact()) < ACCEPTED


def test_a_nucleus_in_a_large_vocabulary_fits_as_well() -> None:
    """Drawn hopefully from the best 1024 of more tokens, the distribution is the same exact one."""
    tail = np.linspace(-16.0, -18.0, SUPPORT_WIDTHS[-1]).tolist()
    case = Case(options(top_p=0.8, **XTC), [*CROWD, *tail])
    assert fit_probability(case.count_draws(DRAWS // 5, hopeful=True), case.exact()) > ACCEPTED


def test_the_reference_is_right_by_hand() -> None:
    """The yardstick itself, on cases that can be reckoned in the head."""
    halves = np.log([0.5, 0.25, 0.25]).tolist()
    for sampling, expected in [
        (options(), [0.5, 0.25, 0.25]),
        (options(temperature=0.5), [2 / 3, 1 / 6, 1 / 6]),
        (options(top_k=2), [2 / 3, 1 / 3, 0.0]),
        (options(top_p=0.6), [2 / 3, 1 / 3, 0.0]),
        (options(min_p=0.6), [1.0, 0.0, 0.0]),
        (options(temperature=0.0), [1.0, 0.0, 0.0]),
        (options(logit_bias=((0, float(np.log(2.0))),)), [2 / 3, 1 / 6, 1 / 6]),
        (options(xtc_probability=1.0, xtc_threshold=0.2), [0.0, 0.0, 1.0]),
        (options(xtc_probability=0.5, xtc_threshold=0.2), [0.25, 0.125, 0.625]),
        (options(xtc_probability=1.0, xtc_threshold=0.4), [0.5, 0.25, 0.25]),
        (options(top_k=2, xtc_probability=1.0, xtc_threshold=0.3), [0.0, 1.0, 0.0]),
    ]:
        assert final_distribution(halves, sampling) == pytest.approx(expected, abs=1e-12)
    zero, penalised = [2.0, 0.0, -1.0], options(repetition_penalty=2.0, presence_penalty=1.0)
    assert final_distribution(zero, penalised, recent={0: 1, 2: 5}) == pytest.approx(
        np.exp([0.0, 0.0, -3.0]) / np.exp([0.0, 0.0, -3.0]).sum()
    )
    assert final_distribution(halves, options(), forbidden=[0], allowed=[0, 1]).tolist() == [
        0,
        1,
        0,
    ]
