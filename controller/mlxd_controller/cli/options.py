"""Options that several commands share, and the values that people write for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from mlxd_shared.domain.requests import SamplingOptions
from mlxd_shared.domain.units import parse_bytes, parse_duration

_T = TypeVar("_T")
SAMPLING_PANEL = "Sampling (absent: the model's own values, see `mlxd models --json`)"


def _parser(parse: Callable[[str], _T]) -> Callable[[str | _T], _T]:
    """Let the message of `parse`'s ValueError reach the user; a default comes parsed already."""

    def checked(text: str | _T) -> _T:
        if not isinstance(text, str):
            return text
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return checked


def _bias(text: str) -> tuple[int, float]:
    token_id, equals, bias = text.partition("=")
    try:
        if equals and token_id.isdecimal():
            return int(token_id), float(bias)
    except ValueError:
        pass  # no number: told below
    message = f"--logit-bias: {text!r} is not ID=BIAS, for example 42=-5"
    raise ValueError(message)


# What `Annotated` needs to know of a parsed value is only that somebody has parsed it.
duration = _parser(parse_duration)
size = _parser(parse_bytes)
bias = _parser(_bias)

# Only the --address before the command reads MLXD_ADDRESS, so that no flag loses to it.
GlobalAddress = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="MLXD_ADDRESS",
        metavar="HOST:PORT|unix:PATH",
        help="The server's address; also accepted after the command.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|unix:PATH",
        help="The server's address.  [env var: MLXD_ADDRESS]",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
KeepAlive = Annotated[
    float | None,
    typer.Option(
        "--keep-alive",
        parser=duration,
        metavar="DURATION",
        help="How long the model stays after its last use, such as 5m; -1: forever, 0: not at all.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 always takes the most likely token.", rich_help_panel=SAMPLING_PANEL),
]
TopK = Annotated[
    int | None,
    typer.Option(help="Keep the k most likely tokens; 0 is off.", rich_help_panel=SAMPLING_PANEL),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Keep the most likely tokens with total probability p; 1 is off.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Drop tokens less likely than this share of the best one; 0 is off.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help="Divide positive and multiply negative logits of recent tokens; 1 is off.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(
        help="Subtract once from every recent token's logit; 0 is off.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        help="Subtract for every occurrence of a recent token; 0 is off.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
RepeatLastN = Annotated[
    int | None,
    typer.Option(
        help="How many of the last tokens the penalties consider; 0 is off, -1: all.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
XtcProbability = Annotated[
    float | None,
    typer.Option(
        "--xtc-probability",
        help="Probability, at each position, of excluding all top choices but the last; 0 is off.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
XtcThreshold = Annotated[
    float | None,
    typer.Option(
        "--xtc-threshold",
        help="The least probability of a top choice.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Make the draws repeatable.", rich_help_panel=SAMPLING_PANEL),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID=BIAS",
        help="Add to the logit of one token; repeatable.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]


def sampling(
    *,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float | None,
    presence_penalty: float | None,
    frequency_penalty: float | None,
    repeat_last_n: int | None,
    xtc_probability: float | None,
    xtc_threshold: float | None,
    seed: int | None,
    logit_bias: list[str] | None,
) -> SamplingOptions:
    """Return the values that were given.

    Raises:
        typer.BadParameter: a bias that is not ID=BIAS.
    """
    return SamplingOptions(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repeat_last_n=repeat_last_n,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
        seed=seed,
        logit_bias=tuple(bias(text) for text in logit_bias or ()),
    )


def server_address(context: typer.Context, own: str | None) -> str:
    """Return the command's own --address, else the one before the command."""
    return own if own is not None else str(context.find_root().params["address"])
