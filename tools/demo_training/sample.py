"""Continuations written by the shipped file, for the model card and for a look."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo_training.reference import Reference, log_softmax
from demo_training.tokens import BOUNDARY_ID

PROMPTS = (
    "Once upon a time",
    "The old king looked at his three sons and said",
    "It was a dark night, and the ship",
    '"What is that?" asked the captain.',
    "There was once a poor woman who",
)
TOKENS_MAX = 200
TEMPERATURE = 0.8


def continuation(folder: Path, prompt: str, *, temperature: float, seed: int) -> str:
    """Return the prompt and up to 200 tokens after it; temperature 0 is greedy.

    Text shorter than that was ended by the model itself.
    """
    model = Reference.load(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(seed)
    ids: list[int] = tokenizer.encode(prompt).ids
    for _ in range(TOKENS_MAX):
        scores = model.logits(np.array(ids, np.int64), rows_from=len(ids) - 1)[0]
        if temperature == 0:
            chosen = int(scores.argmax())
        else:
            odds = np.exp(log_softmax(scores / np.float32(temperature)).astype(np.float64))
            chosen = int(rng.choice(len(odds), p=odds / odds.sum()))
        if chosen == BOUNDARY_ID:
            break
        ids.append(chosen)
    text: str = tokenizer.decode(ids)
    return text


def print_samples(folder: Path) -> None:
    """Print every prompt continued greedily, then at temperature 0.8."""
    for temperature in (0.0, TEMPERATURE):
        for seed, prompt in enumerate(PROMPTS):
            text = continuation(folder, prompt, temperature=temperature, seed=seed)
            print(f"--- temperature {temperature}, seed {seed}\n{text}\n", flush=True)
