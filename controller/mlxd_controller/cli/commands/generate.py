"""`mlxd generate` and `mlxd tokenize`: text in, text or tokens out."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from mlxd.messages import Delta, Finished
from mlxd_controller.cli import formats as f
from mlxd_controller.cli import options as o
from mlxd_controller.cli import show
from mlxd_controller.cli.outcome import ExitCode, complain, piped, run, usage_error
from mlxd_controller.cli.security import Server, server
from mlxd_shared.domain.formats import ResponseFormat
from mlxd_shared.domain.requests import FinishReason, SamplingOptions
from mlxd_shared.ops.terminal import without_steering

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help='A name, alias or digest; "" if the server has one model.'
    ),
]
Prompt = Annotated[
    str | None,
    typer.Argument(help="The text to continue; absent: standard input, without a final newline."),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="The most tokens to generate.  [default: until the context is full]"),
]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeatable.")
]
StopTokenId = Annotated[
    list[int] | None, typer.Option(metavar="ID", help="End before this token; repeatable.")
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Continue past the model's end-of-sequence tokens.")
]
MinTokens = Annotated[
    int | None, typer.Option(help="Ignore every end and stop before this many tokens.")
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Print one line per token: its log-probability, and the N (0 to 20) best tokens.",
    ),
]
Speculate = Annotated[
    int | None,
    typer.Option(
        metavar="DEPTH",
        help="Guess at most this many tokens at once (0 to 16); the text stays the same.",
    ),
]
Priority = Annotated[
    int | None,
    typer.Option(min=-(1 << 31), max=(1 << 31) - 1, help="Higher is served earlier.  [default: 0]"),
]
NoMigrate = Annotated[
    bool,
    typer.Option("--no-migrate", help="Fail if the worker dies, instead of continuing on another."),
]
RequestId = Annotated[str, typer.Option(help="An id for the server's log.", show_default=False)]
Stats = Annotated[bool, typer.Option("--stats", help="Print usage and timings on stderr.")]


@dataclass(frozen=True, slots=True)
class Job:
    """One requested completion."""

    model: str
    prompt: str
    sampling: SamplingOptions
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    min_tokens: int | None
    logprobs: int | None
    speculation_depth: int | None
    response_format: ResponseFormat | None
    priority: int | None
    keep_alive_s: float | None
    request_id: str
    migrate: bool | None


def generate(
    context: typer.Context,
    model: ModelName,
    prompt: Prompt = None,
    *,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    ignore_eos: IgnoreEos = False,
    min_tokens: MinTokens = None,
    logprobs: Logprobs = None,
    speculate: Speculate = None,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    repetition_penalty: o.RepetitionPenalty = None,
    presence_penalty: o.PresencePenalty = None,
    frequency_penalty: o.FrequencyPenalty = None,
    repeat_last_n: o.RepeatLastN = None,
    xtc_probability: o.XtcProbability = None,
    xtc_threshold: o.XtcThreshold = None,
    seed: o.Seed = None,
    logit_bias: o.LogitBias = None,
    json_object: f.JsonObject = False,
    json_schema: f.JsonSchema = None,
    regex: f.Regex = None,
    grammar: f.Grammar = None,
    choice: f.Choice = None,
    priority: Priority = None,
    keep_alive: o.KeepAlive = None,
    request_id: RequestId = "",
    no_migrate: NoMigrate = False,
    stats: Stats = False,
    as_json: o.Json = False,
    address: o.Address = None,
) -> None:
    """Stream a completion. --json prints one object per message."""
    job = Job(
        model=model,
        prompt=_prompt(prompt),
        sampling=o.sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
            repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty, repeat_last_n=repeat_last_n,
            xtc_probability=xtc_probability, xtc_threshold=xtc_threshold, logit_bias=logit_bias,
        ),
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
        logprobs=logprobs,
        speculation_depth=speculate,
        response_format=f.response_format(
            json_object=json_object,
            json_schema=json_schema,
            regex=regex,
            grammar=grammar,
            choice=choice,
        ),
        priority=priority,
        keep_alive_s=keep_alive,
        request_id=request_id,
        migrate=False if no_migrate else None,
    )  # fmt: skip
    where = server(context, address)
    run(_generate(where, job, as_json=as_json, stats=stats), address=where.address)


def _prompt(argument: str | None) -> str:
    if argument is not None:
        return argument
    if sys.stdin.isatty():
        usage_error("no prompt: give it as an argument, or pipe it in")
    return piped().removesuffix("\n")


async def _generate(where: Server, job: Job, *, as_json: bool, stats: bool) -> ExitCode:
    finished: Finished | None = None
    async with where.client() as client:
        stream = client.generate(
            job.prompt,
            model=job.model,
            sampling=job.sampling,
            max_tokens=job.max_tokens,
            stop=job.stop,
            stop_token_ids=job.stop_token_ids,
            ignore_eos=True if job.ignore_eos else None,
            min_tokens=job.min_tokens,
            logprobs=job.logprobs,
            speculation_depth=job.speculation_depth,
            response_format=job.response_format,
            priority=job.priority,
            keep_alive_s=job.keep_alive_s,
            request_id=job.request_id,
            migrate=job.migrate,
        )
        shown, watched = "", sys.stdout.isatty()
        async with stream:
            try:
                async for event in stream:
                    if as_json:
                        show.json_line(event)
                    elif isinstance(event, Delta):
                        text = event.text if job.logprobs is None else show.logprobs(event)
                        text = without_steering(text) if watched else text
                        typer.echo(text, nl=False)
                        shown = text or shown
                    if isinstance(event, Finished):
                        finished = event
            finally:
                # The shell's prompt, and an error, begin on a line of their own.
                if shown and not shown.endswith("\n"):
                    typer.echo()
    assert finished is not None  # the stream would have raised
    if stats:
        typer.echo(summary(finished), err=True)
    if finished.reason is FinishReason.CANCELLED:
        complain("the server's operator ended the stream before it was complete")
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


def tokenize(
    context: typer.Context,
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
    address: o.Address = None,
) -> None:
    """Print the token ids of a text."""
    where = server(context, address)
    run(
        _tokenize(where, model, _prompt(text), special=special, as_json=as_json),
        address=where.address,
    )


async def _tokenize(
    where: Server, model: str, text: str, *, special: bool, as_json: bool
) -> ExitCode:
    async with where.client() as client:
        token_ids = await client.tokenize(text, model=model, add_special_tokens=special)
    if as_json:
        show.json_line(token_ids)
    else:
        typer.echo(" ".join(map(str, token_ids)))
    return ExitCode.OK
