"""Options that several commands share, and the values that people write for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeVar

import typer

from mlxd_shared.config import WATCH_INTERVAL_MIN_S
from mlxd_shared.domain.requests import SamplingOptions
from mlxd_shared.domain.units import parse_bytes, parse_duration

_T = TypeVar("_T")
SAMPLING_PANEL = "Sampling (absent: the model's own values, see `mlxd models --json`)"


def _parser(parse: Callable[[str], _T]) -> Callable[[str | _T], _T]:
    """Let the message of `parse`'s ValueError reach the user; a default comes parsed already."""

    def check(text: str | _T) -> _T:
        if not isinstance(text, str):
            return text
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return check


def read_bias(text: str) -> tuple[int, float]:
    """Return what ID=BIAS says.

    Raises:
        ValueError: `text` is not that.
    """
    token_id, equals, bias = text.partition("=")
    try:
        if equals and token_id.isdecimal():
            return int(token_id), float(bias)
    except ValueError:
        pass  # no number: told below
    raise ValueError(f"--logit-bias: {text!r} is not ID=BIAS, for example 42=-5")


# What `Annotated` needs to know of a parsed value is only that somebody has parsed it.
duration = _parser(parse_duration)
size = _parser(parse_bytes)
bias = _parser(read_bias)

# Only the --address before the command reads MLXD_ADDRESS, so that no flag loses to it.
GlobalAddress = Annotated[
    str,
    typer.Option(
        "--address",
        metavar="HOST:PORT|unix:PATH",
        help="The server's address. This and the options below are also accepted after the"
        " command.",
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
Output = Annotated[
    Literal["wide", "json"] | None,
    typer.Option("--output", "-o", help="wide: all columns, however long; json: as --json."),
]
Watch = Annotated[bool, typer.Option("--watch", help="Repeat at every interval, until Ctrl-C.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def duration_option(text: str, *, show_default: bool = True) -> Any:  # noqa: ANN401 - typer's own
    """Return an option whose value is a duration, in seconds once it is read."""
    return typer.Option(parser=duration, metavar="DURATION", help=text, show_default=show_default)


Interval = Annotated[
    float,
    duration_option(f"With --watch; at least {WATCH_INTERVAL_MIN_S}s."),
]
ShownEvery = Annotated[
    float,
    duration_option(f"From one look at the server to the next; at least {WATCH_INTERVAL_MIN_S}s."),
]
KeepAlive = Annotated[
    float | None,
    duration_option(
        "How long the model stays after its last use, such as 5m; -1: forever, 0: not at all."
    ),
]


def _drawing(help_text: str, *, metavar: str | None = None) -> Any:  # noqa: ANN401 - typer's own
    return typer.Option(metavar=metavar, help=help_text, rich_help_panel=SAMPLING_PANEL)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The options of every command that may say how tokens are drawn."""

    temperature: Annotated[float | None, _drawing("0 always takes the most likely token.")] = None
    top_k: Annotated[int | None, _drawing("Keep the k most likely tokens; 0 is off.")] = None
    top_p: Annotated[
        float | None, _drawing("Keep the most likely tokens with total probability p; 1 is off.")
    ] = None
    min_p: Annotated[
        float | None,
        _drawing("Drop tokens less likely than this share of the best one; 0 is off."),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _drawing("Divide positive and multiply negative logits of recent tokens; 1 is off."),
    ] = None
    presence_penalty: Annotated[
        float | None, _drawing("Subtract once from every recent token's logit; 0 is off.")
    ] = None
    frequency_penalty: Annotated[
        float | None, _drawing("Subtract for every occurrence of a recent token; 0 is off.")
    ] = None
    repeat_last_n: Annotated[
        int | None,
        _drawing("How many of the last tokens the penalties consider; 0 is off, -1: all."),
    ] = None
    xtc_probability: Annotated[
        float | None,
        _drawing(
            "Probability, at each position, of excluding all top choices but the last; 0 is off."
        ),
    ] = None
    xtc_threshold: Annotated[float | None, _drawing("The least probability of a top choice.")] = (
        None
    )
    seed: Annotated[int | None, _drawing("Make the draws repeatable.")] = None
    logit_bias: Annotated[
        list[str] | None,
        _drawing("Add to the logit of one token; repeatable.", metavar="ID=BIAS"),
    ] = None

    def values(self) -> SamplingOptions:
        """Return the values that were given.

        Raises:
            typer.BadParameter: a bias that is not ID=BIAS.
        """
        biases = tuple(bias(text) for text in self.logit_bias or ())
        return SamplingOptions(**asdict(self) | {"logit_bias": biases})


def given_flags(context: typer.Context) -> Mapping[str, str]:
    """Return the flags that a command was given, by the parameters that they set."""
    parameters = ((str(param.name), param.opts) for param in context.command.params)
    sources = ((name, flags, context.get_parameter_source(name)) for name, flags in parameters)
    return {
        name: flags[0]
        for name, flags, source in sources
        if flags[0].startswith("-") and source is not None and source.name == "COMMANDLINE"
    }


def server_address(context: typer.Context, own: str | None) -> str:
    """Return the command's own --address, else the one before the command."""
    return own if own is not None else str(context.find_root().params["address"])
