"""`PYTHONPATH=tools python -m tests.bench.forms --data FOLDER`: what each form of weights costs.

Bits a byte of the demo model on held-out stories, counted as `demo_training.evaluate` does, but by
a server and in windows of its context less the token that a request has to generate; and what the
weights take. FOLDER has the corpus that the demo model is trained on.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from demo_training.corpus import held_out_stories
from demo_training.evaluate import Score, sample_of, windows
from demo_training.tokens import BOUNDARY_ID
from mlxd import Client, LoadSpec, Weights
from tests.bench.report import json_line, machine
from tests.support.served import serve

DEMO = Path(__file__).parents[2] / "shared" / "mlxd_shared" / "demo_model"
MODEL = "demo"
CONTEXT = 1024
WEIGHTS_ACCOUNT = "weights"


async def score(client: Client, texts: Sequence[str]) -> Score:
    """Return what the texts cost, token by token, in the form that is loaded."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    total = Score(stories=len(texts), text_nbytes=0, targets=0, bits=0.0)
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        sequence = (BOUNDARY_ID, *ids, BOUNDARY_ID)
        nats = 0.0
        for start, end, first in windows(len(sequence) - 1, CONTEXT - 2):
            (done,) = await client.choices(
                sequence[start : end + 1], n=1, model=MODEL, max_tokens=1, prompt_logprobs=0
            )
            assert done.prompt is not None
            scored = done.prompt.logprobs[first - start :]
            assert len(scored) == end - first
            nats -= sum(position.chosen.logprob for position in scored)
        total = replace(
            total,
            text_nbytes=total.text_nbytes + len(text.encode()),
            targets=total.targets + len(sequence) - 1,
            bits=total.bits + nats / math.log(2),
        )
    return total


async def form_lines(data: Path) -> list[str]:
    """Load the demo model in each form; return JSON lines."""
    texts = [story.text for story in sample_of(held_out_stories(data))]
    lines = []
    async with serve("--model", f"{MODEL}={DEMO}") as server, Client(server.address) as client:
        for weights in (each for each in Weights if each is not Weights.AUTO):
            async with client.load(MODEL, options=LoadSpec(weights=weights)) as updates:
                async for _ in updates:
                    pass
            cost = await score(client, texts)
            (worker,) = (await client.status()).workers
            assert worker.memory is not None
            nbytes = sum(a.nbytes for a in worker.memory.accounts if a.name == WEIGHTS_ACCOUNT)
            sys.stderr.write(
                f"{weights.value:10} {cost.bits_per_byte:.4f} {nbytes / 1e6:8.2f} MB\n"
            )
            lines.append(
                json_line("form", key=weights.value, bits=cost.bits_per_byte, nbytes=nbytes)
            )
            await client.unload(MODEL)
    return lines


async def main() -> None:
    """Measure by itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    lines = await form_lines(parser.parse_args().data)
    sys.stdout.writelines(f"{line}\n" for line in [json_line("machine", **machine()), *lines])


if __name__ == "__main__":
    asyncio.run(main())
