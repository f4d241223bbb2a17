"""Each kind of memory, and trained models, through every end of a worker: the same tokens.

Models as small as these say nothing about time; of each the tokens are compared, and counted is
what of the prompt was read instead of evaluated.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxd import Client
from mlxd_shared.domain.requests import KVFormat, LoadSpec
from tests.bench.outliving_server import (
    Answer,
    Offered,
    ask,
    end_by_kill,
    end_by_unload,
    make_ready,
    prompt_of,
    serving,
    whole_blocks,
    write,
    write_models,
)

DEMO = Path(__file__).parents[2] / "shared" / "mlxd_shared" / "demo_model"
STORIES = Path(__file__).parents[1] / "data" / "models" / "stories260k"
PROMPT_TOKENS = 300
"""Of every kind: one of the trained models has a context of 512."""
NEW_TOKENS = 16
RANDOM_VOCABULARY, STORIES_VOCABULARY, DEMO_VOCABULARY = 320, 512, 4096


@dataclass(frozen=True, slots=True)
class KindOfMemory:
    """A model, and which files there are of a prompt: one a block, one at its end, or both."""

    offered: Offered
    has_entries: bool = True
    has_state: bool = False

    def files(self, prompt: Sequence[int]) -> int:
        """Return how many files a prompt comes to."""
        return whole_blocks(prompt) * self.has_entries + self.has_state


def all_kinds(folder: Path) -> tuple[KindOfMemory, ...]:
    """Return every kind, with the random models that `outliving_models` writes into `folder`."""

    def of(name: str, spec: LoadSpec = LoadSpec()) -> Offered:  # noqa: B008 - frozen
        return Offered(name, folder / name, spec, RANDOM_VOCABULARY)

    return (
        KindOfMemory(of("standard")),
        KindOfMemory(of("q8", LoadSpec(kv_format=KVFormat.Q8))),
        KindOfMemory(of("q4", LoadSpec(kv_format=KVFormat.Q4))),
        KindOfMemory(of("sliding"), has_entries=False, has_state=True),
        KindOfMemory(of("mixed"), has_state=True),
        KindOfMemory(of("hybrid"), has_state=True),
        KindOfMemory(of("latent")),
        KindOfMemory(Offered("demo", DEMO, vocabulary=DEMO_VOCABULARY)),
        KindOfMemory(Offered("stories260k", STORIES, vocabulary=STORIES_VOCABULARY)),
    )


async def measure_kinds(
    place: Path, *, names: Sequence[str] = ()
) -> AsyncIterator[tuple[str, float]]:
    """Yield the tokens that were read, by kind and by what came before; of `names`, or all.

    Raises:
        RuntimeError: a stream had other tokens than the cold one, or nothing was read for it.
    """
    models = place / "kinds"
    kinds = [kind for kind in all_kinds(models) if not names or kind.offered.name in names]
    assert len(kinds) > 1, "one makes room for another"
    chosen = (kind.offered.name for kind in kinds)
    await write_models("tests.bench.outliving_models", str(models), *chosen)
    offered = [kind.offered for kind in kinds]
    cold: dict[str, Answer] = {}

    async def read_again(client: Client, kind: KindOfMemory, end: str) -> tuple[str, float]:
        model = kind.offered
        await make_ready(client, model)
        answer = await ask(client, model.name, _prompt(model), max_tokens=NEW_TOKENS)
        check_same(f"{model.name}, {end}", answer, cold[model.name])
        return f"{model.name}.{end}", float(answer.cached)

    folder = place / "kinds-on-disk"
    async with serving(offered, folder) as client:
        for kind in kinds:
            model, prompt = kind.offered, _prompt(kind.offered)
            await make_ready(client, model)
            cold[model.name] = await ask(client, model.name, prompt, max_tokens=NEW_TOKENS)
            await write(client, model.name, prompt, files=kind.files(prompt))
            await end_by_unload(client, model)
            yield await read_again(client, kind, "unload")
            await end_by_kill(client, model)
            yield await read_again(client, kind, "kill")
        for kind in kinds:
            # There is room for one: each has been evicted by the next, the last by the first.
            yield await read_again(client, kind, "eviction")
    async with serving(offered, folder) as client:
        for kind in kinds:
            yield await read_again(client, kind, "restart")


def check_same(what: str, answer: Answer, cold: Answer) -> None:
    """Compare tokens with those of a cold stream.

    Raises:
        RuntimeError: they differ, or nothing was read.
    """
    if answer.ids != cold.ids:
        message = f"{what}: other tokens than cold: {answer.ids}, not {cold.ids}"
        raise RuntimeError(message)
    if not answer.cached:
        message = f"{what}: nothing was read"
        raise RuntimeError(message)


def _prompt(model: Offered) -> list[int]:
    return prompt_of(PROMPT_TOKENS, seed=1, vocabulary=model.vocabulary)
