"""A trained model, streams on it that are known by a number, and what each of them gets alone.

Invariants:
- A stream is a function of its number and of the model; its lone run is made once.
- A lone run has one row, wide chunks, nothing to reuse and nobody beside it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_shared.domain.requests import Sampling
from mlxd_worker.constraints.compiler import Constraints
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.engine.request import Submit
from mlxd_worker.models.base import Model
from mlxd_worker.models.loader import inspect_model, load_model
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.real_inputs import real_input
from tests.support.engines import Collected, TinyEngine, engine_on
from tests.support.near_ties import Step
from tests.support.probing import Probe

DEMO = Path(__file__).parents[2] / "shared" / "mlxd_shared" / "demo_model"
MODELS = ("demo", "stories260k")
LONE_CHUNK_TOKENS = 512
LONE_TICK_S = 1e-3
STORIES = 4
STORY_TOKENS = 720
BEGINNING = "Once upon a time there was a little girl named Lily."
SENTENCES = (
    " One day the {} met a {}.",
    ' "Can we play with the {}?" asked the {}.',
    " The {} ran to the {} and smiled.",
    " She was sad that the {} had lost her {}.",
    " They all went home with the {} and a big {}.\n",
)
NOUNS = ("cat", "bird", "ball", "tree", "boy", "dog", "cake", "king", "boat", "flower", "bear")
MIN_TOKENS = (0, 0, 5, 40)
TOP_LOGPROBS = (None, None, None, 0, 4)
FORMATS = (
    ResponseFormat(FormatKind.CHOICE, choices=("yes", "yes, they did", "no", "nobody knows")),
    ResponseFormat(FormatKind.REGEX, r"(The|A) ([a-z]{2,9} ){3,20}[a-z]+\."),
    ResponseFormat(FormatKind.JSON_OBJECT),
)
FORMATTED = 0.25
"""The part of all streams that follow one of `FORMATS`; they end with it."""
STOP_TOKENS = 5
"""How many tokens end a stream that has such."""
BIASED = (0, 0, 3, 20)
"""How many tokens have a bias."""
BIAS_MAX = 3.0
ENDING = 0.2
"""The part of all streams that end at the end of a text, and of those that end at tokens."""
STOPS = ((), (), ("the end", "\n\n", "happy"))
CHOICES: Mapping[str, Sequence[Any]] = MappingProxyType(
    {
        "temperature": (0.0, 0.0, 0.4, 0.7, 1.0, 1.3, 1.7),
        "top_k": (0, 0, 1, 5, 40, 100, 600, 2000),
        "top_p": (1.0, 1.0, 0.95, 0.7, 0.3),
        "min_p": (0.0, 0.0, 0.02, 0.2),
        "repetition_penalty": (1.0, 1.0, 1.2, 0.8),
        "presence_penalty": (0.0, 0.0, 0.6, -0.4),
        "frequency_penalty": (0.0, 0.0, 0.3),
        "repeat_last_n": (64, 8, -1, 0),
        "xtc_probability": (0.0, 0.0, 0.5, 1.0),
        "xtc_threshold": (0.1, 0.02, 0.3, 0.0),
    }
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts and, at most, of outputs: what streams have."""

    prompts: tuple[int, ...]
    outputs: tuple[int, ...]


SHORT = Lengths(prompts=(1, 2, 9, 40, 100, 235, 250), outputs=(1, 12, 30, 60))
"""Some grow out of the first capacity, 256 positions."""
LONG = Lengths(
    prompts=(1, 2, 9, 40, 100, 200, 250, 300, 440, 490, 700), outputs=(1, 30, 90, 150, 200)
)
"""Some grow out of 256 or 512 positions, or begin there."""
TALKATIVE = Lengths(prompts=(1, 9, 40, 100, 200, 250), outputs=(30, 90, 150, 200))
"""More is generated than read, for a model whose prompts take long."""


@dataclass(frozen=True, slots=True)
class Stream:
    """What one client asks for."""

    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    min_tokens: int
    eos_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    stop: tuple[str, ...]
    top_logprobs: int | None
    response_format: ResponseFormat | None

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end it."""
        return tuple(self.eos_ids | self.stop_token_ids)


class Ticking:
    """A clock that goes on by `tick_s` whenever it is read: what is paced by it can be repeated."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._now_s = 0.0

    def __call__(self) -> float:
        """Return the time, in seconds."""
        self._now_s += self._tick_s
        return self._now_s


class Trained:
    """A trained model, its streams and their lone runs."""

    def __init__(self, folder: Path, *, lengths: Lengths = SHORT) -> None:
        """Load it; its streams are of these lengths."""
        self.model: Model = load_model(
            inspect_model(folder), form=FloatType.F32, progress=lambda *_: None
        )
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self.context_length = self.model.context_max
        self._lengths = lengths
        self._stories = [self._story(seed) for seed in range(STORIES)]
        self._constraints = Constraints(self.tokenizer, self.model.vocab_size)
        self._alone: dict[int, Collected] = {}

    def stream(self, number: int) -> Stream:
        """Return the stream of this number: greedy or drawn, with any of the options."""
        draws = random.Random(number)
        sampling = {name: draws.choice(values) for name, values in CHOICES.items()}
        stops = STOP_TOKENS if draws.random() < ENDING else 0
        wanted = draws.choice(FORMATS) if draws.random() < FORMATTED else None
        ends = wanted is not None or draws.random() < ENDING
        biased = draws.sample(range(self.model.vocab_size), draws.choice(BIASED))
        return Stream(
            prompt=self._prompt(draws),
            sampling=Sampling(
                **sampling,
                seed=draws.getrandbits(64),
                logit_bias=tuple((token, draws.uniform(-BIAS_MAX, BIAS_MAX)) for token in biased),
            ),
            max_tokens=draws.choice(self._lengths.outputs),
            min_tokens=draws.choice(MIN_TOKENS),
            eos_ids=frozenset(self.tokenizer.eos_ids if ends else ()),
            stop_token_ids=frozenset(draws.choices(range(self.model.vocab_size), k=stops)),
            stop=draws.choice(STOPS),
            top_logprobs=draws.choice(TOP_LOGPROBS),
            response_format=wanted,
        )

    def alone(self, number: int) -> Collected:
        """Return what the stream gets alone."""
        if number not in self._alone:
            self._alone[number] = self._run_alone(self.model, number)
        return self._alone[number]

    def steps(self, number: int) -> list[Step]:
        """Return the draws of the stream's lone run, which is made once more."""
        probe = Probe(self.model)
        drawn = self._run_alone(probe, number).drawn
        assert drawn == self.alone(number).drawn, "a lone run can be repeated"
        stream = self.stream(number)
        return [
            Step(
                logits,
                stream.sampling,
                position,
                before=(*stream.prompt, *drawn[:position]),
                ends=stream.ends,
                min_tokens=stream.min_tokens,
                mask=mask,
            )
            for position, (logits, mask) in enumerate(
                zip(probe.rows(), self._masks(stream, drawn), strict=False)
            )
        ]

    def _masks(self, stream: Stream, drawn: Sequence[int]) -> list[bytes | None]:
        """Return what the stream's constraint allows at each of its draws."""
        constraint = self._constraint(stream)
        if constraint is None:
            return [None for _ in drawn]
        matcher = constraint.start()
        masks: list[bytes | None] = []
        for token in drawn:
            masks.append(bytes(matcher.mask()))
            if token not in stream.ends:
                matcher.accept(token)
        return masks

    def _constraint(self, stream: Stream) -> Constraint | None:
        wanted = stream.response_format
        if wanted is None:
            return None
        return self._constraints.find_kept(wanted) or self._constraints.compile(wanted)

    def engine(
        self,
        *,
        rows_max: int = 1,
        chunk: int = LONE_CHUNK_TOKENS,
        tick_s: float = LONE_TICK_S,
        prefix_nbytes: int = 0,
        model: Model | None = None,
    ) -> TinyEngine:
        """Return an engine with caches of its own; without options, one for a lone run."""
        return engine_on(
            model or self.model,
            self.tokenizer,
            rows_max=rows_max,
            context_length=self.context_length,
            chunk=chunk,
            clock=Ticking(tick_s),
            prefix_nbytes=prefix_nbytes,
        )

    def submit(
        self, tiny: TinyEngine, number: int, *, resumed: Sequence[int] = (), **options: Any
    ) -> tuple[Submit, Collected]:
        """Submit the stream, or what follows the ids `resumed`, with what else is `options`; return
        it and its sink.
        """
        stream = self.stream(number)
        return tiny.submit(
            (*stream.prompt, *resumed),
            resumed=len(resumed),
            sampling=stream.sampling,
            max_tokens=stream.max_tokens,
            min_tokens=stream.min_tokens,
            eos_ids=stream.eos_ids,
            stop_token_ids=stream.stop_token_ids,
            stop=stream.stop,
            top_logprobs=stream.top_logprobs,
            constraint=self._constraint(stream),
            submitted_s=0.0,
            **options,
        )

    def _run_alone(self, model: Model, number: int) -> Collected:
        tiny = self.engine(model=model)
        _, sink = self.submit(tiny, number)
        tiny.run()
        return sink

    def _story(self, seed: int) -> tuple[int, ...]:
        """Return the beginning of a text such as the model was trained on."""
        draws = random.Random(seed)
        text = BEGINNING
        ids: tuple[int, ...] = ()
        while len(ids) < STORY_TOKENS:
            text += draws.choice(SENTENCES).format(*draws.sample(NOUNS, 2))
            ids = tuple(self.tokenizer.encode(text))
        return ids[:STORY_TOKENS]

    def _prompt(self, draws: random.Random) -> tuple[int, ...]:
        """Return the beginning of a story, or of one that goes on as another does."""
        longest = min(self.context_length - max(self._lengths.outputs), STORY_TOKENS)
        length = min(draws.choice(self._lengths.prompts), longest)
        one, other = draws.choice(self._stories), draws.choice(self._stories)
        turn = draws.randrange(length + 1)
        return (*one[:turn], *other[turn:length])


def train_model(name: str, *, lengths: Lengths = SHORT) -> Trained:
    """Return one of `MODELS`, or skip the test where it is not there."""
    folder = DEMO if name == "demo" else real_input("models", name)
    return Trained(folder, lengths=lengths)
