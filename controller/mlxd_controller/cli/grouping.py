"""Commands as their authors write them: options in groups, a server to ask, an end to come to.

Invariants:
- typer is shown a plain function: each field of a group is a parameter, under the field's name, and
  `Server` is the fields of `Reach`, last. The command itself gets one value a group.
- Every command that asks a server begins and ends in the same way (`outcome.run`). Those that need
  one to do their work take `--start` too, and have one started where none answers: once the command
  line is known to be right, and before anything is asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter
from typing import Annotated, Any, NoReturn, TypeAlias, get_type_hints

import typer

from mlxd_controller.cli.outcome import ExitCode, report, run
from mlxd_controller.cli.security import Reach, Server, server
from mlxd_shared.domain.errors import MlxdError

Work: TypeAlias = Coroutine[Any, Any, ExitCode | None]
"""What a command does; without an exit code it is done."""
Session: TypeAlias = Callable[[], NoReturn]
"""Work with event loops of its own, which it ends as `outcome.run` does."""
_CONTEXT = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
_START_OPTION = typer.Option(
    "--start/--no-start",
    help="Start a server in the background if none answers on this machine.",
)
_START = Parameter(
    "start", Parameter.KEYWORD_ONLY, default=True, annotation=Annotated[bool, _START_OPTION]
)


def spread_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the fields of each parameter which is a dataclass of options."""
    groups = _groups(command)

    def spread(**values: Any) -> None:  # noqa: ANN401 - what typer has read
        command(**_gather(values, groups))

    return _show(spread, command, _spread(command, groups))


def ask_server(command: Callable[..., Work | Session]) -> Callable[..., None]:
    """Return a command whose work runs to its end; its parameter `where` is the server to ask.

    Its other parameters may be groups too.
    """
    return _ask(command, starts=False)


def ask_or_start_server(command: Callable[..., Work | Session]) -> Callable[..., None]:
    """Return the same of a command that needs a server: one is started where none answers.

    What the command refuses when it is called, it refuses before a server is started.
    """
    return _ask(command, starts=True)


def _ask(command: Callable[..., Work | Session], *, starts: bool) -> Callable[..., None]:
    groups = {name: kind for name, kind in _groups(command).items() if kind is not Server}

    def ask(context: typer.Context, **values: Any) -> None:  # noqa: ANN401 - what typer has read
        start = values.pop("start", False)
        gathered = _gather(values, groups | {"where": Reach})
        where = server(context, gathered.pop("where"))
        work = command(where=where, **gathered)
        with ExitStack() as undone:
            if not callable(work):
                undone.callback(work.close)
            if start:
                _start_server(where)
            undone.pop_all()
        if callable(work):
            work()
        run(work, address=where.address, flags=where.flags)

    own = [parameter for parameter in _spread(command, groups) if parameter.name != "where"]
    more = [_START] if starts else []
    return _show(ask, command, [_CONTEXT, *own, *more, *_parameters_of(Reach)])


def _start_server(where: Server) -> None:
    # Imported here: most commands start nothing.
    from mlxd_controller.cli.background.starting import ensure_server  # noqa: PLC0415

    try:
        ensure_server(where)
    except MlxdError as error:
        raise typer.Exit(report(error, where.address, where.flags)) from error


def _groups(command: Callable[..., object]) -> Mapping[str, type]:
    hints = get_type_hints(command).items()
    return {name: kind for name, kind in hints if isinstance(kind, type) and is_dataclass(kind)}


def _spread(command: Callable[..., object], groups: Mapping[str, type]) -> list[Parameter]:
    """Return the command's parameters, each group's fields in its place."""
    shown: list[Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group = groups.get(parameter.name)
        shown += [parameter] if group is None else _parameters_of(group)
    return shown


def _parameters_of(group: type) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def _gather(values: dict[str, Any], groups: Mapping[str, type]) -> dict[str, Any]:
    made = {
        name: group(**{field.name: values.pop(field.name) for field in fields(group)})
        for name, group in groups.items()
    }
    return values | made


def _show(
    shown: Callable[..., None], command: Callable[..., object], parameters: Sequence[Parameter]
) -> Callable[..., None]:
    """Give a function the name, the help and the parameters that typer is to see."""
    shown.__name__, shown.__doc__, shown.__annotations__ = command.__name__, command.__doc__, {}
    vars(shown)["__signature__"] = inspect.Signature(parameters)
    return shown
