"""The training loop.

Two stages: stories alone, from nothing; then stories and chats, a share of each batch either.

Invariants: windows and initial weights follow from the recipe's seed alone (sums on a GPU may
still round differently from run to run); each epoch sees every token about once, plus each
story's opening once more, at a window's start, as a prompt will stand.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from demo_training.forward import Dropout, Parameters, initial_parameters, mean_loss
from demo_training.optimiser import Rule, State, initial_state, update
from demo_training.shape import Shape
from demo_training.tokens import BOUNDARY_ID, Ids

STEPS_PER_REPORT = 50
STEPS_PER_CHECK = 500
CHECK_WINDOWS = 128
"""Held-out windows behind the loss shown while training; the final figure covers all text."""

Starts = npt.NDArray[np.int64]
Step = Callable[
    [Parameters, State, mx.array, mx.array, mx.array, mx.array],
    tuple[mx.array, Parameters, State],
]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything a training run depends on besides shape and corpus."""

    optimiser: str = "muon"
    rate_peak: float = 3e-3
    rate_floor_share: float = 0.01
    warmup_steps: int = 300
    epochs: float = 20.0
    batch_windows: int = 64
    weight_decay: float = 0.1
    dropout: float = 0.1
    seed: int = 20260101
    chat_steps: int = 4500
    chat_rate_peak: float = 1.5e-3
    chat_warmup_steps: int = 100
    chat_share: float = 0.5
    """Of the windows of a batch of the second stage."""
    name_weight: float = 6.0
    """Of a token by which an answer first names whom it was asked for; the others' is one."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One point of the loss curve, in nats a token; the held-out loss only at checks."""

    step: int
    training_loss: float
    held_out_loss: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run; `parameters` are float32."""

    parameters: Parameters
    curve: tuple[Mark, ...]
    steps: int
    tokens_seen: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Chats:
    """Windows of chats `[count, context + 1]`, and marks of that shape on the names asked for."""

    windows: Ids
    marks: npt.NDArray[np.bool_]

    def weights(self, chosen: Starts, name_weight: float) -> npt.NDArray[np.float32]:
        """Return what each token of the `chosen` windows counts."""
        return np.where(self.marks[chosen], np.float32(name_weight), np.float32(1))


def learning_rate(step: int, steps: int, recipe: Recipe) -> float:
    """Return the rate at `step` (from 1): a linear warm-up, then a cosine to the floor."""
    if step <= recipe.warmup_steps:
        return recipe.rate_peak * step / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, steps - recipe.warmup_steps)
    share = recipe.rate_floor_share
    return recipe.rate_peak * (share + (1 - share) * 0.5 * (1 + math.cos(math.pi * done)))


def epoch_starts(stream: Ids, context: int, rng: np.random.Generator) -> Starts:
    """Return shuffled window starts: a grid at a random offset, and each story's opening."""
    last = len(stream) - context - 1
    grid = np.arange(rng.integers(min(context, last + 1)), last + 1, context)
    openings = np.flatnonzero(stream == BOUNDARY_ID)
    starts = np.concatenate([grid, openings[openings <= last]])
    rng.shuffle(starts)
    return starts


def batches(stream: Ids, context: int, recipe: Recipe) -> Iterator[Starts]:
    """Yield batches of window starts for ever, epoch after epoch."""
    rng = np.random.default_rng(recipe.seed)
    left = np.empty(0, np.int64)
    while True:
        left = np.concatenate([left, epoch_starts(stream, context, rng)])
        while len(left) >= recipe.batch_windows:
            yield left[: recipe.batch_windows]
            left = left[recipe.batch_windows :]


def train(
    stream: Ids, held_out: Ids, shape: Shape, recipe: Recipe, *, steps_max: int | None = None
) -> Outcome:
    """Train from scratch; `steps_max` cuts the run (and its schedule) short for a trial."""
    context = shape.max_position_embeddings
    steps = int(recipe.epochs * len(stream) / (context * recipe.batch_windows))
    steps = steps if steps_max is None else min(steps, steps_max)
    windows = _Windows(stream, context)
    alike = mx.ones((recipe.batch_windows, context + 1))
    batched = ((windows.at(starts), alike) for starts in batches(stream, context, recipe))
    parameters = initial_parameters(shape, recipe.seed)
    return _descend(parameters, batched, steps, _HeldOutCheck(held_out, shape), recipe)


def train_chats(
    parameters: Parameters,
    stream: Ids,
    chats: Chats,
    held_out: Ids,
    shape: Shape,
    recipe: Recipe,
    *,
    steps_max: int | None = None,
) -> Outcome:
    """Go on from `parameters` with stories and with chats."""
    context = shape.max_position_embeddings
    of_chats = round(recipe.chat_share * recipe.batch_windows)
    of_stories = replace(
        recipe, batch_windows=recipe.batch_windows - of_chats, seed=recipe.seed + 1
    )
    windows, alike = _Windows(stream, context), mx.ones((of_stories.batch_windows, context + 1))
    batched = (
        (
            mx.concatenate([windows.at(starts), mx.array(chats.windows[chosen].astype(np.int32))]),
            mx.concatenate([alike, mx.array(chats.weights(chosen, recipe.name_weight))]),
        )
        for starts, chosen in zip(
            batches(stream, context, of_stories),
            chat_batches(len(chats.windows), of_chats, recipe.seed),
            strict=False,
        )
    )
    second = replace(recipe, rate_peak=recipe.chat_rate_peak, warmup_steps=recipe.chat_warmup_steps)
    steps = recipe.chat_steps if steps_max is None else min(recipe.chat_steps, steps_max)
    return _descend(parameters, batched, steps, _HeldOutCheck(held_out, shape), second)


def chat_batches(count: int, size: int, seed: int) -> Iterator[Starts]:
    """Yield batches of `size` places among `count` windows for ever, each once a round."""
    rng = np.random.default_rng([seed, 1])
    left = np.empty(0, np.int64)
    while True:
        while len(left) < size:
            left = np.concatenate([left, rng.permutation(count)])
        yield left[:size]
        left = left[size:]


def _descend(
    parameters: Parameters,
    batched: Iterator[tuple[mx.array, mx.array]],
    steps: int,
    check: "_HeldOutCheck",
    recipe: Recipe,
) -> Outcome:
    """Take `steps` steps, one a batch of windows and their tokens' weights."""
    rule = Rule(muon=recipe.optimiser == "muon", weight_decay=recipe.weight_decay)
    state = initial_state(parameters, rule)
    step_once = _step(check.shape, rule, recipe)
    curve: list[Mark] = []
    losses: list[mx.array] = []
    started = time.monotonic()
    for step, (windows, weights) in zip(range(1, steps + 1), batched, strict=False):
        rate, count = mx.array(learning_rate(step, steps, recipe)), mx.array(float(step))
        loss, parameters, state = step_once(parameters, state, windows, weights, rate, count)
        mx.async_eval([loss, parameters, state])  # type: ignore[no-untyped-call]
        losses.append(loss)
        if step % STEPS_PER_REPORT == 0 or step == steps:
            is_check = step % STEPS_PER_CHECK == 0 or step == steps
            held = check.loss(parameters) if is_check else None
            curve.append(Mark(step, float(np.array(mx.mean(mx.stack(losses)))), held))
            losses.clear()
            _report(curve[-1], steps, time.monotonic() - started)
    seconds = time.monotonic() - started
    seen = steps * recipe.batch_windows * check.shape.max_position_embeddings
    return Outcome(parameters, tuple(curve), steps, seen, seconds)


class _Windows:
    """The stream on the device; windows are gathered there."""

    def __init__(self, stream: Ids, context: int) -> None:
        self._stream = mx.array(stream.astype(np.int32))
        self._span = mx.arange(context + 1)

    def at(self, starts: Starts) -> mx.array:
        """Return `[len(starts), context + 1]` ids."""
        places = mx.array(starts.astype(np.int32))[:, None] + self._span
        return mx.take(self._stream, places)


class _HeldOutCheck:
    """The loss of evenly spread held-out windows: a quick look, not the reported figure."""

    def __init__(self, held_out: Ids, shape: Shape) -> None:
        context = shape.max_position_embeddings
        last = len(held_out) - context - 1
        starts = np.linspace(0, last, min(CHECK_WINDOWS, last + 1)).astype(np.int64)
        self._batches = np.array_split(starts, max(1, len(starts) // 32))
        self._windows = _Windows(held_out, context)
        self.shape = shape

    def loss(self, parameters: Parameters) -> float:
        """Return nats a token."""
        means = [
            np.array(mean_loss(parameters, self._windows.at(batch), self.shape))
            for batch in self._batches
        ]
        return float(np.mean(means))


def _step(shape: Shape, rule: Rule, recipe: Recipe) -> Step:
    seed_key = mx.random.key(recipe.seed)

    def loss_of(
        parameters: Parameters, windows: mx.array, weights: mx.array, count: mx.array
    ) -> mx.array:
        dropout: Dropout | None = None
        if recipe.dropout > 0:
            key = seed_key + count.astype(mx.uint32)
            dropout = Dropout.with_keys(recipe.dropout, key, shape)
        return mean_loss(parameters, windows, shape, dropout, weights)

    gradient = mx.value_and_grad(loss_of)

    def step(
        parameters: Parameters,
        state: State,
        windows: mx.array,
        weights: mx.array,
        rate: mx.array,
        count: mx.array,
    ) -> tuple[mx.array, Parameters, State]:
        loss, gradients = gradient(parameters, windows, weights, count)
        moved, next_state = update(parameters, gradients, state, rule, rate, count)
        return loss, moved, next_state

    if mx.default_device() == mx.gpu:
        compiled: Step = mx.compile(step)
        return compiled
    return step  # compiling for a CPU needs a C++ compiler and gains little


def _report(mark: Mark, steps: int, elapsed_s: float) -> None:
    held = "" if mark.held_out_loss is None else f"  held out {mark.held_out_loss:.4f}"
    print(
        f"step {mark.step}/{steps}  loss {mark.training_loss:.4f}{held}  {elapsed_s:.0f} s",
        flush=True,
    )
