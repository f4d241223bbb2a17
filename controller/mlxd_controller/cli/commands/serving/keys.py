"""`mlxd keys`: who may call a server that runs with --keys-file; needs no running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlxd_controller.cli import options as o
from mlxd_controller.cli.outcome import exit_code_of, leave
from mlxd_controller.cli.terminal import show
from mlxd_shared.domain.errors import BadCredentials, InvalidRequest, MlxdError
from mlxd_shared.security.key_file import editing, read_keys
from mlxd_shared.security.keys import Key, Scope, check_key, hash_of, make_secret

keys = typer.Typer(
    name="keys", no_args_is_help=True, help="Make, list and remove the keys of callers."
)
File = Annotated[
    Path,
    typer.Option(
        "--keys-file", metavar="FILE", envvar="MLXD_KEYS_FILE", help="The file of the keys."
    ),
]
Name = Annotated[str, typer.Argument(help="Whose key it is.")]


@keys.command()
def add(
    name: Name,
    *,
    keys_file: File,
    scope: Annotated[
        list[Scope] | None, typer.Option(help="What it is for; repeatable.  [default: infer]")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that it is for; repeatable.  [default: all]")
    ] = None,
    streams: Annotated[int | None, typer.Option(min=1, help="Requests at once.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Of prompts and answers.")
    ] = None,
) -> None:
    """Make a key and print it, this once: the file keeps its hash. Servers know it at once."""
    secret = make_secret()
    key = Key(
        name,
        hash_of(secret),
        scopes=frozenset(scope or [Scope.INFER]),
        models=frozenset(model or ()),
        streams=streams,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
    )
    try:
        check_key(key)
        with editing(keys_file) as known:
            if any(each.name == name for each in known):
                raise InvalidRequest.of("name", f"{name!r} has a key already; remove it first")
            known.append(key)
    except MlxdError as error:
        leave(error.describe(), exit_code_of(error))
    typer.echo(secret)


@keys.command("list")
def list_keys(*, keys_file: File, as_json: o.Json = False) -> None:
    """List names, scopes and limits."""
    try:
        known = read_keys(keys_file).keys
    except BadCredentials as error:
        leave(error.describe(), exit_code_of(error))
    if as_json:
        for key in known:
            show.json_line(_describe(key))
        return
    heads = ("name", "scopes", "models", "at once", "requests/min", "tokens/min")
    show.table(heads, [tuple(str(value) for value in _describe(key).values()) for key in known])


@keys.command()
def remove(name: Name, *, keys_file: File) -> None:
    """Remove a key. Servers refuse it at once; streams that have begun go on."""
    try:
        with editing(keys_file) as known:
            left = [key for key in known if key.name != name]
            if len(left) == len(known):
                raise InvalidRequest.of("name", f"there is no key {name!r}")
            known[:] = left
    except MlxdError as error:
        leave(error.describe(), exit_code_of(error))


def _describe(key: Key) -> dict[str, str | int]:
    limits = (key.streams, key.requests_per_minute, key.tokens_per_minute)
    streams, requests, tokens = ("-" if limit is None else limit for limit in limits)
    return {
        "name": key.name,
        "scopes": ",".join(sorted(key.scopes)),
        "models": ",".join(sorted(key.models)) or "all",
        "streams": streams,
        "requests_per_minute": requests,
        "tokens_per_minute": tokens,
    }
