"""`mlxd top`: models, streams, speeds and memory, live, until a key or a signal ends it.

The server is watched; when it is lost, the last figures stay, the head says so, and it is asked
again and again. Only one that does not answer to begin with, or will not let us in, ends the
command.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
from rich.console import Console, ConsoleDimensions

from mlxd import Client
from mlxd.messages import Model, Status
from mlxd_controller.cli import options as o
from mlxd_controller.cli.grouping import ask_server
from mlxd_controller.cli.outcome import is_unreachable, usage_error
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.terminal.ending import ENDING_SIGNALS, end_by
from mlxd_controller.cli.top.choices import Action, Choices, order, press, split_keys
from mlxd_controller.cli.top.figures import Looks, View, view_of
from mlxd_controller.cli.top.frame import ASCII, Blocks, Place, draw
from mlxd_controller.cli.top.keyboard import full_screen, keys_at_once
from mlxd_shared import config
from mlxd_shared.domain import errors as e
from mlxd_shared.domain.units import FOREVER_S
from mlxd_shared.ops.signals import handling
from mlxd_shared.wire.status import RemoteError

_SHUT_OUT = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})


@dataclass(slots=True)
class Board:
    """What is shown, and by whom it is ended. One event loop; `changed` asks for another frame."""

    address: str
    view: View = field(default_factory=View)
    choices: Choices = field(default_factory=Choices)
    lost: str = ""
    is_over: bool = False
    signal: int = 0
    looks: Looks = field(default_factory=Looks)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    to_unload: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    def note_status(self, status: Status, models: Sequence[Model]) -> None:
        """Take what the server says."""
        self.looks.add(status)
        self.view = view_of(status, models, self.looks.kept)
        self.lost = ""
        self.changed.set()

    def note_loss(self, reason: str) -> None:
        """Take that the server does not answer."""
        self.lost = reason
        self.changed.set()

    def note_unload(self, text: str) -> None:
        """Take how an unload has ended."""
        self.choices = Choices(self.choices.sort, self.choices.chosen, note=text)
        self.changed.set()

    def take_keys(self, typed: str) -> None:
        """Act on what was typed."""
        for key in split_keys(typed):
            names = [model.name for model in order(self.view.models, self.choices.sort)]
            self.choices, action = press(self.choices, key, names)
            if action is Action.QUIT:
                self.is_over = True
            elif action is Action.UNLOAD:
                self.to_unload.put_nowait(self.choices.chosen)
        self.changed.set()

    def end(self, number: int = 0) -> None:
        """End the command, by a signal where one is given."""
        self.is_over, self.signal = True, self.signal or number
        self.changed.set()


@ask_server
async def top(*, interval: o.ShownEvery = config.WATCH_INTERVAL_DEFAULT_S, where: Server) -> None:
    """Show models, streams, speeds and memory, live. Keys: q, s, u, up and down."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        usage_error("mlxd top needs a terminal; `mlxd status --watch` and `mlxd ps` do not")
    if not config.WATCH_INTERVAL_MIN_S <= interval < FOREVER_S:
        usage_error(f"--interval: at least {config.WATCH_INTERVAL_MIN_S}s, and not for ever")
    board = Board(where.address)
    async with where.client() as client:
        board.note_status(await client.status(), await client.models())
        watching = asyncio.ensure_future(_watch(client, board, interval))
        unloading = asyncio.ensure_future(_unload(client, board))
        watching.add_done_callback(lambda _: board.end())
        try:
            await _show(board)
        finally:
            ended = await _cancel(watching, unloading)
    if board.signal:
        end_by(board.signal)
    for problem in ended:
        raise problem


async def _show(board: Board) -> None:
    """Draw a frame after every change, until the board is over."""
    console = Console(highlight=False, markup=False, emoji=False)
    blocks = Blocks() if (console.encoding or "").startswith("utf") else ASCII
    with (
        handling(lambda _: board.changed.set(), signal.SIGWINCH),
        handling(board.end, *ENDING_SIGNALS),
        keys_at_once(board.take_keys, board.end),
        full_screen(console) as show,
    ):
        while not board.is_over:
            board.changed.clear()
            size = _fit(console)
            place = Place(size.width, size.height, board.address, board.lost, blocks)
            show(draw(board.view, board.choices, place))
            await board.changed.wait()


def _fit(console: Console) -> ConsoleDimensions:
    """Give the console the terminal's own size, whatever COLUMNS and LINES say; return that.

    Those are as old as the shell's export of them, and a frame follows the window.
    """
    columns, lines = os.get_terminal_size(sys.stdout.fileno())
    if columns and lines:  # a serial line may have none
        console.size = ConsoleDimensions(columns, lines)
    return console.size


async def _watch(client: Client, board: Board, interval_s: float) -> None:
    """Have the board show each status; a server that is lost is asked again, ever more rarely.

    Raises:
        MlxdError: the server does not let us in.
    """
    pause_s = config.RECONNECT_PAUSE_MIN_S
    while True:
        try:
            async with client.watch_status(interval_s=interval_s) as statuses:
                async for status in statuses:
                    board.note_status(status, await client.models())
                    pause_s = config.RECONNECT_PAUSE_MIN_S
            board.note_loss("it has ended")
        except e.MlxdError as error:
            if isinstance(error, e.BadCredentials | e.NotAllowed | e.FieldNotServed):
                raise
            if isinstance(error, RemoteError) and error.code in _SHUT_OUT:
                raise
            board.note_loss(_reason(error))
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, config.RECONNECT_PAUSE_MAX_S)


def _reason(error: e.MlxdError) -> str:
    return "no server there" if is_unreachable(error) else error.describe()


async def _unload(client: Client, board: Board) -> None:
    """Unload the models that the user names, one after the other."""
    while True:
        name = await board.to_unload.get()
        try:
            unloaded = await client.unload(name)
        except e.MlxdError as error:
            board.note_unload(f"{name}: {_reason(error)}")
        else:
            board.note_unload(f"{name} is {unloaded.model.state.value}")


async def _cancel(*tasks: asyncio.Future[None]) -> list[BaseException]:
    """End tasks; return the errors that they had ended by."""
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    return [end for end in ends if end is not None and not isinstance(end, asyncio.CancelledError)]
