"""`mlxd fleet`: the machines whose workers a server uses."""

from __future__ import annotations

from collections.abc import Iterator

import typer

from mlxd.messages import DeviceStatus, Status
from mlxd_controller.cli import options as o
from mlxd_controller.cli.grouping import ask_server
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.terminal import show
from mlxd_shared.domain.figures import HostMemory
from mlxd_shared.domain.units import format_bytes

COLUMNS = ("machine", "state", "device", "budget", "promised", "held", "available", "models")
NUMBERS = ("budget", "promised", "held", "available")
SPARE = ("budget", "held")
fleet = typer.Typer(
    name="fleet",
    help="The machines on which a server's workers run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@fleet.callback()
def group() -> None:
    """Show the machines on which a server's workers run."""


@fleet.command("status")
@ask_server
async def status(*, as_json: o.Json = False, where: Server) -> None:
    """List each machine's devices: whether it can be reached, its memory, its models."""
    async with where.client() as client:
        current = await client.status()
    if as_json:
        show.json_line({"machines": current.machines, "devices": current.devices})
        return
    show.table(COLUMNS, list(list_rows(current)), right=NUMBERS, spare=SPARE)


def list_rows(status: Status) -> Iterator[list[str]]:
    """Return a row for each device, by machine."""
    for device in sorted(status.devices, key=lambda one: (one.machine, one.name)):
        hosts = [host for host in status.machines if host.machine == device.machine]
        yield _row(status, device, hosts[0] if hosts else status.host_memory)


def _row(status: Status, device: DeviceStatus, host: HostMemory) -> list[str]:
    models = [
        worker.model_name
        for worker in status.workers
        if worker.exit_code is None and device.name in worker.memory.devices
    ]
    return [
        device.machine or host.machine or "-",
        "lost" if device.lost else "reached",
        f"{device.name} ({device.product or device.kind})",
        format_bytes(device.budget_nbytes),
        format_bytes(device.reserved_nbytes),
        format_bytes(device.held_nbytes),
        format_bytes(host.available_nbytes),
        ", ".join(models) or "-",
    ]
