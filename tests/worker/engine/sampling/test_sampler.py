"""The sampler: the right distribution, by seed and position, and never a neighbour's business."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_shared.domain.requests import Sampling
from mlxd_worker.engine.masks.masks import AllowedTokens, words_count
from mlxd_worker.engine.sampling.columns import KeptColumns, draw_keys, stream_states, words_of
from mlxd_worker.engine.sampling.sampler import (
    SUPPORT_WIDTHS,
    TOKEN_INVALID,
    TOKEN_NONE,
    TOKEN_WIDE,
    Draw,
    Purpose,
    gumbel_noise,
    sample,
)
from tests.support.reference_sampler import draw_key, final_distribution, mix64
from tests.worker.distributions import chi_squared_tail, fit_probability
from tests.worker.draws import (
    ACCEPTED,
    DRAWS,
    LOGITS,
    PLAIN,
    counts_of,
    draw_many,
    ints,
    keys_of,
    options,
    tokens_of,
)


def from_probabilities(*probabilities: float) -> mx.array:
    """Return one row of logits whose softmax at T 1 is `probabilities`."""
    return mx.array([[math.log(p) for p in probabilities]], dtype=mx.float32)


@pytest.mark.parametrize(
    ("logits", "sampling", "token"),
    [
        ([1.0, 5.0, 4.0], options(top_k=1), 1),
        ([1.0, 5.0, 4.0], options(temperature=0.0), 1),
        ([5.0, 5.0, 5.0], options(temperature=0.0), 0),
        ([5.0, 5.0, 5.0], options(top_k=1), 0),
        ([math.log(0.5), math.log(0.3), math.log(0.2)], options(top_p=0.4), 0),
        ([math.log(0.5), math.log(0.3), math.log(0.2)], options(min_p=0.7), 0),
        ([math.log(0.6), math.log(0.2), math.log(0.2)], options(top_k=2, top_p=0.7), 0),
        ([0.0, 5.0, 4.0], replace(PLAIN, temperature=0.0, logit_bias=((0, 6.0),)), 0),
        ([0.0, 5.0, 4.0], replace(PLAIN, temperature=0.0, logit_bias=((1, -2.0),)), 2),
        ([0.0, 5.0, 4.0], replace(PLAIN, logit_bias=((1, -100.0), (2, -100.0))), 0),
        ([1.0, 5.0, 4.0], options(temperature=1e-6), 1),
        ([3.0], options(top_k=5, top_p=0.5), 0),
    ],
)
def test_cases_by_hand(logits: list[float], sampling: Sampling, token: int) -> None:
    """Where the options leave one token, it is that one at every position."""
    rows = mx.broadcast_to(mx.array([logits], dtype=mx.float32), (64, len(logits)))
    assert set(tokens_of(rows, [Draw(sampling, position) for position in range(64)])) == {token}


@pytest.mark.parametrize(
    ("sampling", "support"),
    [
        (options(top_p=0.49), {0}),  # kept where what comes before is less than p
        (options(top_p=0.51), {0, 1}),
        (options(top_p=0.74), {0, 1}),
        (options(top_p=0.76), {0, 1, 2}),
        (options(top_p=0.0), {0, 1, 2}),
        (options(top_p=1.0), {0, 1, 2}),
        (options(min_p=0.49), {0, 1, 2}),
        (options(min_p=0.51), {0}),
        (options(top_k=2), {0, 1}),
        (options(top_k=3), {0, 1, 2}),
        (options(top_k=99), {0, 1, 2}),
        (options(top_k=2, top_p=0.6), {0}),  # of the two, the first has 2/3
        (options(top_k=2, top_p=0.7), {0, 1}),
        (options(temperature=0.01), {0}),
        (options(temperature=0.5, top_p=0.66), {0}),  # T first: then the best has 2/3
        (options(temperature=0.5, top_p=0.67), {0, 1}),
    ],
)
def test_the_support_is_exact(sampling: Sampling, support: set[int]) -> None:
    """Each cut keeps exactly the tokens that it should, of (1/2, 1/4, 1/4)."""
    rows = mx.broadcast_to(from_probabilities(0.5, 0.25, 0.25), (256, 3))
    drawn = set(tokens_of(rows, [Draw(sampling, position) for position in range(256)]))
    assert drawn == support


FIXED_DRAWS: list[tuple[Sampling, list[int]]] = [
    (options(), [631, 990, 616, 233, 492, 862, 576, 214]),
    (options(temperature=0.8, top_k=40, top_p=0.9), [567, 435, 165, 743, 856, 699, 523, 988]),
]


def test_draws_at_neighbouring_positions_are_independent() -> None:
    """Two draws in a row, of two seeds, of two choices, of two purposes: all joint counts fit."""
    size = 5
    logits = LOGITS[:size]
    exact = final_distribution(logits, PLAIN).tolist()
    pairs = [a * b for a, b in itertools.product(exact, exact)]
    base = draw_many(logits, PLAIN)
    others = {
        "position": base[1:],
        "seed": draw_many(logits, replace(PLAIN, seed=PLAIN.seed + 1)),
        "next word of the seed": draw_many(logits, replace(PLAIN, seed=PLAIN.seed + (1 << 32))),
    }
    rows = mx.broadcast_to(mx.array([logits], dtype=mx.float32), (DRAWS, size))
    others["choice"] = tokens_of(rows, [Draw(PLAIN, p, choice=1) for p in range(DRAWS)])
    others["purpose"] = tokens_of(
        rows, [Draw(PLAIN, p, purpose=Purpose.DRAFT) for p in range(DRAWS)]
    )
    for name, other in others.items():
        joint = counts_of([a * size + b for a, b in zip(base, other, strict=False)], size * size)
        assert fit_probability(joint, pairs) > ACCEPTED, name


def test_the_noise_is_gumbel_to_the_tail() -> None:
    """A million values have the moments and the right tail of the standard Gumbel distribution."""
    noise = gumbel_noise(keys_of(8), mx.arange(131_072, dtype=mx.uint32)[None])
    mean, variance = float(mx.mean(noise)), float(mx.var(noise))
    assert abs(mean - 0.57722) < 5 * 1.2826 / math.sqrt(noise.size)
    assert abs(variance - math.pi**2 / 6) < 0.02
    edges = [-2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, math.inf]
    below = ints(mx.stack([mx.sum(noise < edge) for edge in edges]))
    shares = [math.exp(-math.exp(-edge)) for edge in edges]
    counts = [b - a for a, b in itertools.pairwise([0, *below])]
    expected = [b - a for a, b in itertools.pairwise([0.0, *shares])]
    assert fit_probability(counts, expected) > ACCEPTED
    assert bool(mx.all(mx.isfinite(noise)))


def test_the_key_hash_is_the_documented_one() -> None:
    """A resumed stream relies on the keys: they are SplitMix64's and never change."""
    assert mix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # SplitMix64's first output for seed 0
    places = [
        (seed, choice, position, purpose)
        for seed in (0, 1, 7, -1, (1 << 64) - 2)
        for choice in range(3)
        for position in range(50)
        for purpose in Purpose
    ]
    seeds, choices, positions, purposes = zip(*places, strict=True)

    keys = draw_keys(stream_states(zip(seeds, choices, strict=True)), positions, purposes)

    assert len(set(keys)) == len(places)
    assert words_of(keys) == [
        draw_key(seed=seed, choice=choice, position=position, purpose=purpose)
        for seed, choice, position, purpose in places
    ]


def test_columns_serve_while_the_rows_are_the_same() -> None:
    """The arrays of what rows ask for are made again only where a row is another one."""
    first, second = options(top_k=5), options(top_k=5)
    kept = KeptColumns()

    columns = kept.of("narrow", 0, (first, second), (0, 0))

    assert kept.of("narrow", 0, (first, second), (0, 0)) is columns
    assert kept.of("narrow", 0, (second, first), (0, 0)) is not columns
    assert kept.of("narrow", 0, (second,), (0,)).temperatures.shape == (1, 1)
    assert kept.of("narrow", 0, (second,), (1,)).choices == (1,)
    kept.clear()
    assert kept.of("narrow", 0, (first, second), (0, 0)) is not columns


def test_drawn_tokens_never_change() -> None:
    """A stream resumed by a later version, or on another machine, goes on with the same draws."""
    logits = mx.array([[math.sin(token) for token in range(1_000)]], dtype=mx.float32)
    rows = mx.broadcast_to(logits, (8, 1_000))
    for sampling, expected in FIXED_DRAWS:
        assert tokens_of(rows, [Draw(sampling, position) for position in range(8)]) == expected


VOCABULARY = 2_000


def any_sampling() -> st.SearchStrategy[Sampling]:
    """Generate options of every kind, so that batches mix all ways of drawing."""
    return st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        top_k=st.sampled_from([0, 1, 5, 64, 65, 300, 1_500, 5_000]),
        top_p=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.02, 0.3]),
        seed=st.integers(0, (1 << 64) - 1),
        logit_bias=st.sampled_from([(), ((3, 5.0), (1_999, -3.0))]),
        xtc_probability=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
        xtc_threshold=st.sampled_from([0.0, 0.005, 0.02, 0.5]),
    )


def some_tokens(seed: int) -> AllowedTokens:
    """Return a mask of about half of the vocabulary."""
    return AllowedTokens(random.Random(seed).randbytes(4 * words_count(VOCABULARY)))


any_draw = st.builds(
    Draw,
    sampling=any_sampling(),
    position=st.integers(0, 10_000),
    forbidden=st.sampled_from([(), (), (0, 7, 1_999)]),
    mask=st.one_of(st.none(), st.integers(0, 9).map(some_tokens)),
    ends=st.sampled_from([(), (2,), (5, 900, 1_200)]),
)


@given(draws=st.lists(any_draw, min_size=1, max_size=9), seed=st.integers(0, 1_000))
def test_a_row_draws_the_same_token_alone_and_in_any_mix(draws: list[Draw], seed: int) -> None:
    """Neighbours change nothing, also where many logits are equal, as bfloat16 makes them."""
    logits = mx.random.normal((len(draws), VOCABULARY), key=mx.random.key(seed)) * 2
    logits = logits.astype(mx.bfloat16).astype(mx.float32)
    together = tokens_of(logits, draws)
    alone = [tokens_of(logits[row : row + 1], [draw])[0] for row, draw in enumerate(draws)]
    assert together == alone
    assert tokens_of(logits[::-1], draws[::-1]) == together[::-1]
    hopeful = ints(sample(logits, draws, hopeful=True))
    assert all(a in (b, TOKEN_WIDE) for a, b in zip(hopeful, together, strict=True))


@pytest.mark.parametrize("top_k", [1, 40, *SUPPORT_WIDTHS, SUPPORT_WIDTHS[-1] + 1, VOCABULARY])
def test_every_way_of_drawing_gives_the_same_token(top_k: int) -> None:
    """A reduced support is only faster: the vocabulary with the rest masked draws the same."""
    positions = 64
    logits = mx.random.normal((positions, VOCABULARY), key=mx.random.key(top_k))
    floor = mx.sort(logits, axis=-1)[:, VOCABULARY - top_k][:, None]
    masked = mx.where(logits >= floor, logits, -mx.inf)
    narrow = [Draw(options(top_k=top_k), position) for position in range(positions)]
    whole = [Draw(options(), position) for position in range(positions)]
    assert tokens_of(logits, narrow) == tokens_of(masked, whole)


def test_near_ties_keep_their_noise() -> None:
    """Rounding that swaps the ranks of two logits moves a draw only where the scores were close."""
    positions = 2_000
    logits = mx.random.normal((positions, 200), key=mx.random.key(1)).astype(mx.bfloat16)
    logits = logits.astype(mx.float32)
    moved = logits + 1e-5 * mx.random.normal(logits.shape, key=mx.random.key(2))
    draws = [Draw(options(top_k=150), position) for position in range(positions)]
    scores = mx.sort(logits + gumbel_noise(keys_of(positions), mx.arange(200)[None]), axis=-1)
    close = ints((scores[:, -1] - scores[:, -2] < 1e-3).astype(mx.int32))
    pairs = zip(tokens_of(logits, draws), tokens_of(moved, draws), strict=True)
    differing = [position for position, (a, b) in enumerate(pairs) if a != b]
    assert all(close[position] for position in differing)
    assert sum(close) < positions / 100


def test_a_row_with_unusable_logits_fails_alone() -> None:
    """A row of NaN, +inf or nothing gives TOKEN_INVALID, and its neighbours their usual tokens."""
    logits = mx.random.normal((6, 300), key=mx.random.key(0))
    bad = mx.concatenate(
        [
            logits[:1],
            mx.where(mx.arange(300) == 7, float("nan"), logits[1:2]),
            mx.where(mx.arange(300) == 7, mx.inf, logits[2:3]),
            mx.full((1, 300), -mx.inf),
            logits[4:],
        ]
    )
    for sampling in [options(temperature=0.0), options(), options(top_k=9), options(top_p=0.5)]:
        draws = [Draw(sampling, position) for position in range(6)]
        expected = tokens_of(logits, draws)
        got = tokens_of(bad, draws)
        assert got[1:4] == [TOKEN_INVALID] * 3
        assert [got[0], *got[4:]] == [expected[0], *expected[4:]]


@pytest.mark.parametrize("top_k", [1, 3, 64, 70, 500, 1_100])
def test_equal_logits_are_ranked_by_id(top_k: int) -> None:
    """Where a cut goes through equal logits, the tokens with the lowest ids stay, always."""
    levels = mx.random.randint(0, 3, (VOCABULARY,), key=mx.random.key(top_k))
    values = ints(levels)
    ranked = sorted(range(VOCABULARY), key=lambda token: (-values[token], token))
    rows = mx.broadcast_to(levels[None].astype(mx.float32), (500, VOCABULARY))
    draws = [Draw(options(top_k=top_k, temperature=100.0), position) for position in range(500)]
    assert set(tokens_of(rows, draws)) <= set(ranked[:top_k])


@pytest.mark.parametrize("top_k", [0, 2])
def test_top_p_is_exclusive_to_the_last_bit(top_k: int) -> None:
    """Where the tokens before one sum up to exactly p, that one is out."""
    drawn = draw_many([1.0, 1.0], options(top_k=top_k, top_p=0.5), 2000)

    assert set(drawn) == {0}


def test_min_p_of_one_keeps_all_the_best() -> None:
    """A token that is as likely as the best one reaches every share of it."""
    rows = mx.broadcast_to(mx.array([[1.0, 2.0, 2.0, 0.0]]), (64, 4))
    for sampling in [options(min_p=1.0), options(min_p=1.0, top_k=3)]:
        drawn = set(tokens_of(rows, [Draw(sampling, position) for position in range(64)]))
        assert drawn == {1, 2}


def test_masked_tokens_are_never_drawn() -> None:
    """A logit of -inf, as a constraint sets it, is out of reach at any temperature."""
    logits = mx.where(mx.arange(300) % 100 == 5, 0.0, -mx.inf)[None]
    rows = mx.broadcast_to(logits, (300, 300)).astype(mx.float32)
    for sampling in [options(temperature=100.0), options(top_k=50), options(top_p=0.999)]:
        drawn = set(tokens_of(rows, [Draw(sampling, position) for position in range(300)]))
        assert drawn == {5, 105, 205}


def test_what_is_forbidden_gives_way_to_another_token() -> None:
    """A forbidden token is never drawn, not even by a bias; the rest keeps its proportions."""
    rows = mx.broadcast_to(mx.array([[9.0, 1.0, 1.0]]), (64, 3))
    for sampling in [options(temperature=0.0), options(), options(top_k=2), options(top_p=0.6)]:
        forced = replace(sampling, logit_bias=((0, 100.0),))
        drawn = tokens_of(rows, [Draw(forced, position, forbidden=(0,)) for position in range(64)])
        assert set(drawn) == ({1} if sampling.temperature == 0.0 else {1, 2})


@pytest.mark.parametrize("hopeful", [False, True])
def test_a_row_that_may_draw_nothing_fails_alone(*, hopeful: bool) -> None:
    """Masks that leave nothing give TOKEN_NONE, other than a model at fault, and touch no other."""
    vocabulary = 1_100
    logits = mx.random.normal((5, vocabulary), key=mx.random.key(0))
    logits[3] = mx.array(float("nan"))
    nothing = AllowedTokens(bytes(4 * words_count(vocabulary)))
    only_seven = AllowedTokens((1 << 7).to_bytes(4 * words_count(vocabulary), "little"))
    for sampling in [options(temperature=0.0), options(), options(top_k=9), options(top_p=0.5)]:
        plain = [Draw(sampling, position) for position in range(5)]
        draws = [
            plain[0],
            replace(plain[1], mask=nothing),
            replace(plain[2], mask=only_seven, forbidden=(7,)),
            replace(plain[3], mask=nothing),
            replace(plain[4], mask=only_seven),
        ]
        drawn = ints(sample(logits, draws, hopeful=hopeful))
        (alone,) = ints(sample(logits[:1], plain[:1], hopeful=hopeful))
        assert drawn == [alone, TOKEN_NONE, TOKEN_NONE, TOKEN_INVALID, 7]


@pytest.mark.parametrize(("top_p", "wide"), [(0.5, False), (0.5001, True), (1e-6, False)])
def test_hope_ends_where_the_nucleus_does(top_p: float, *, wide: bool) -> None:
    """Of 2048 equal tokens, half make up exactly 1/2: the support holds that, and not one more."""
    rows = mx.zeros((64, 2 * SUPPORT_WIDTHS[-1]))
    draws = [Draw(options(top_p=top_p), position) for position in range(64)]
    hopeful = ints(sample(rows, draws, hopeful=True))
    assert hopeful == ([TOKEN_WIDE] * 64 if wide else tokens_of(rows, draws))


def test_min_p_may_spare_a_wide_nucleus() -> None:
    """Where min-p drops all that the support lacks, its nucleus need not fit."""
    rows = mx.broadcast_to(mx.where(mx.arange(5_000) < 9, 5.0, 0.0)[None], (64, 5_000))
    for min_p, wide in [(0.0, True), (0.5, False)]:
        draws = [Draw(options(top_p=0.99, min_p=min_p), position) for position in range(64)]
        hopeful = ints(sample(rows, draws, hopeful=True))
        assert hopeful == ([TOKEN_WIDE] * 64 if wide else tokens_of(rows, draws))


def test_a_bias_outside_the_vocabulary_is_a_bug() -> None:
    """Requests are checked before: an id that reaches the sampler and does not exist is a bug."""
    with pytest.raises(AssertionError, match="vocabulary"):
        sample(mx.zeros((1, 4)), [Draw(replace(PLAIN, logit_bias=((4, 1.0),)), 0)])


@pytest.mark.parametrize(
    ("statistic", "freedom", "tail"),
    [(3.841459, 1, 0.05), (18.30704, 10, 0.05), (29.5883, 10, 0.001), (4.865182, 10, 0.9)],
)
def test_the_fit_is_measured_by_the_tabulated_distribution(
    statistic: float, freedom: int, tail: float
) -> None:
    """The yardstick itself agrees with published chi-squared quantiles."""
    assert chi_squared_tail(statistic, freedom) == pytest.approx(tail, rel=1e-4)
