"""`mlxd generate` and `mlxd tokenize`: text in, text or tokens out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from mlxd import Stream
from mlxd.answers import Delta, Finished
from mlxd_controller.cli import options as o
from mlxd_controller.cli.commands.prompts import formats as f
from mlxd_controller.cli.commands.prompts.printing import ChoicePrinter
from mlxd_controller.cli.completion import named_model
from mlxd_controller.cli.grouping import Work, ask_or_start_server
from mlxd_controller.cli.outcome import ExitCode, complain, read_piped, say, usage_error
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.terminal import show
from mlxd_shared.config import CHOICES_MAX
from mlxd_shared.domain.requests import FinishReason

ModelName = Annotated[
    str,
    named_model('A name, alias or digest; "" if the server has one model.', metavar="MODEL"),
]
Prompt = Annotated[
    str | None,
    typer.Argument(help="The text to continue; absent: standard input, without a final newline."),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="The most tokens to generate.  [default: until the context is full]"),
]
Stats = Annotated[bool, typer.Option("--stats", help="Print usage and timings on stderr.")]


@dataclass(frozen=True, slots=True)
class Ask:
    """What else may be said of one completion."""

    max_tokens: MaxTokens = None
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeatable.")
    ] = None
    stop_token_id: Annotated[
        list[int] | None, typer.Option(metavar="ID", help="End before this token; repeatable.")
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue past the model's end-of-sequence tokens.")
    ] = False
    min_tokens: Annotated[
        int | None,
        typer.Option(help="Ignore every end and stop before this many tokens."),
    ] = None
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Print a line a token instead: its log-probability, and the N (0 to 20) best"
            " tokens.",
        ),
    ] = None
    n: Annotated[
        int | None,
        typer.Option(
            "--n",
            "-n",
            min=1,
            max=CHOICES_MAX,
            metavar="N",
            help="Make N completions and print one behind the other.  [default: 1]",
        ),
    ] = None
    echo: Annotated[
        bool, typer.Option("--echo", help="Print the prompt first, as the model reads it.")
    ] = False
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Print a line for each of the prompt's tokens but the first, before the rest: as"
            " --logprobs does.",
        ),
    ] = None
    speculate: Annotated[
        int | None,
        typer.Option(
            metavar="DEPTH",
            help="Guess at most this many tokens at once (0 to 16); the text stays the same.",
        ),
    ] = None
    priority: Annotated[
        int | None,
        typer.Option(
            min=-(1 << 31), max=(1 << 31) - 1, help="Higher is served earlier.  [default: 0]"
        ),
    ] = None
    keep_alive: o.KeepAlive = None
    request_id: Annotated[
        str, typer.Option(help="An id for the server's log.", show_default=False)
    ] = ""
    no_migrate: Annotated[
        bool,
        typer.Option(
            "--no-migrate", help="Fail if the worker dies, instead of continuing on another."
        ),
    ] = False


@ask_or_start_server
def generate(
    model: ModelName,
    prompt: Prompt = None,
    *,
    ask: Ask,
    sampling: o.Sampling,
    form: f.Format,
    stats: Stats = False,
    as_json: o.Json = False,
    where: Server,
) -> Work:
    """Stream a completion. --json prints one object per message."""
    values, chosen, text = sampling.values(), form.choose(), _prompt(prompt)

    async def complete() -> ExitCode:
        async with where.client() as client:
            stream = client.generate(
                text,
                model=model,
                sampling=values,
                max_tokens=ask.max_tokens,
                stop=ask.stop or (),
                stop_token_ids=ask.stop_token_id or (),
                ignore_eos=True if ask.ignore_eos else None,
                min_tokens=ask.min_tokens,
                logprobs=ask.logprobs,
                n=ask.n,
                echo=True if ask.echo else None,
                prompt_logprobs=ask.prompt_logprobs,
                speculation_depth=ask.speculate,
                response_format=chosen,
                priority=ask.priority,
                keep_alive_s=ask.keep_alive,
                request_id=ask.request_id,
                migrate=False if ask.no_migrate else None,
            )
            finished = await _show(
                stream, ask.n or 1, by_token=ask.logprobs is not None, as_json=as_json
            )
        return _conclude_all(finished, stats=stats)

    return complete()


def _prompt(argument: str | None) -> str:
    if argument is not None:
        return argument
    if sys.stdin.isatty():
        usage_error("no prompt: give it as an argument, or pipe it in")
    return read_piped().removesuffix("\n")


async def _show(
    stream: Stream[Delta | Finished], choices: int, *, by_token: bool, as_json: bool
) -> list[Finished]:
    """Print a stream as it comes; return the ends of its choices, in their order."""
    ends: dict[int, Finished] = {}
    printer = ChoicePrinter(choices, by_token=by_token)
    async with stream:
        try:
            async for event in stream:
                if as_json:
                    show.json_line(event)
                else:
                    printer.note(event)
                if isinstance(event, Finished):
                    ends[event.choice] = event
        finally:
            # The shell's prompt, and an error, begin on a line of their own.
            printer.end_line()
    assert ends  # the stream would have raised
    return [ends[choice] for choice in sorted(ends)]


def _conclude_all(ends: Sequence[Finished], *, stats: bool) -> ExitCode:
    """Tell on stderr how each choice ended; return the worst exit code."""
    if len(ends) == 1:
        return conclude(ends[0], "stream", stats=stats)
    codes = []
    for number, end in enumerate(ends, start=1):
        if stats:
            typer.echo(f"choice {number}: {summary(end)}", err=True)
        codes.append(conclude(end, f"stream of choice {number}", stats=False))
    return max(codes)


def conclude(finished: Finished, what: str, *, stats: bool) -> ExitCode:
    """Tell on stderr how a completion ended, with `stats` what it took; return the exit code."""
    if stats:
        say(summary(finished))
    if finished.reason is FinishReason.CANCELLED:
        complain(f"the server's operator ended the {what} before it was complete")
        return ExitCode.ERROR
    return ExitCode.OK


def summary(finished: Finished) -> str:
    """Return the usage and timings of a request as one line."""
    usage = finished.usage
    speed = usage.tokens_per_s
    matched = "" if finished.matched is None else f" {finished.matched!r}"
    parts = [
        f"{usage.completion_tokens} tokens",
        f"{speed:.1f} tokens/s" if speed is not None else "",
        (
            f"first token after {usage.first_token_s * 1000:.0f} ms"
            f" (queue {usage.queue_s * 1000:.0f}, load {usage.load_s * 1000:.0f},"
            f" prompt {usage.prompt_s * 1000:.0f})"
        ),
        f"prompt {usage.prompt_tokens} tokens, {usage.cached_tokens} cached",
        (
            f"{usage.accepted_draft_tokens} of {usage.drafted_tokens} guesses right"
            if usage.drafted_tokens
            else ""
        ),
        f"seed {usage.seed}",
        f"moved {_times(usage.migrations)} to another worker" if usage.migrations else "",
        f"near ties {usage.near_ties}" if usage.near_ties else "",
        f"ended by {finished.reason.value}{matched}",
    ]
    return ", ".join(part for part in parts if part)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


@ask_or_start_server
def tokenize(
    model: ModelName,
    text: Annotated[
        str | None,
        typer.Argument(help="Absent: standard input, without a final newline."),
    ] = None,
    *,
    special: Annotated[
        bool, typer.Option("--special/--no-special", help="Add the model's tokens for a start.")
    ] = True,
    as_json: o.Json = False,
    where: Server,
) -> Work:
    """Print the token ids of a text."""
    whole = _prompt(text)

    async def ask() -> None:
        async with where.client() as client:
            token_ids = await client.tokenize(whole, model=model, add_special_tokens=special)
        show.answer(" ".join(map(str, token_ids)), token_ids, as_json=as_json)

    return ask()
