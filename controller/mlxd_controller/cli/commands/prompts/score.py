"""`mlxd score`: how likely a model finds continuations of a text, a line each."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from mlxd_controller.cli import options as o
from mlxd_controller.cli.commands.prompts.generate import ModelName
from mlxd_controller.cli.grouping import Work, ask_or_start_server
from mlxd_controller.cli.outcome import read_lines, usage_error
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.terminal import show
from mlxd_shared.config import SCORE_CONTINUATIONS_MAX
from mlxd_shared.domain.requests import Reranking, Score, ScoredText

Text = Annotated[str, typer.Argument(metavar="TEXT", help="What stands before the continuations.")]
Continuations = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONTINUATION]...",
        help="What may follow, blanks included; absent: the lines of standard input.",
    ),
]
ParseSpecial = Annotated[
    bool, typer.Option("--special", help="Read the spelling of special tokens as those tokens.")
]
Query = Annotated[
    str | None,
    typer.Option(
        help="Have the model judge TEXT, a document, by this query; continuations begin its"
        ' answer, such as "yes" and "no".',
        show_default=False,
    ),
]
Instruction = Annotated[
    str,
    typer.Option(help="With --query: what a document is to be for it.", show_default=False),
]


@ask_or_start_server
def score(
    model: ModelName,
    text: Text,
    continuation: Continuations = None,
    *,
    special: ParseSpecial = False,
    query: Query = None,
    instruction: Instruction = "",
    as_json: o.Json = False,
    where: Server,
) -> Work:
    """Print log-probability, tokens and text of each continuation; loads the model if necessary.

    A star marks those that greedy decoding would give.
    """
    if instruction and query is None:
        usage_error("--instruction means nothing without --query")
    reranking = None if query is None else Reranking(query, instruction)
    continuations = continuation or read_lines("no continuation")

    async def ask() -> None:
        async with where.client() as client:
            for begin in range(0, len(continuations), SCORE_CONTINUATIONS_MAX):
                some = continuations[begin : begin + SCORE_CONTINUATIONS_MAX]
                (scores,) = await client.score(
                    [ScoredText(text, tuple(some))],
                    model=model,
                    parse_special_tokens=True if special else None,
                    reranking=reranking,
                )
                for each, scored in zip(some, scores, strict=True):
                    _print(each, scored, as_json=as_json)

    return ask()


def _print(continuation: str, scored: Score, *, as_json: bool) -> None:
    star = "*" if scored.is_greedy else " "
    text = f"{scored.logprob:10.4f} {scored.tokens:5} {star} {continuation!r}"
    show.answer(text, {"continuation": continuation} | asdict(scored), as_json=as_json)
