"""`mlxd status`: the server, its memory and its workers, once or repeatedly."""

from __future__ import annotations

from typing import Annotated

import typer

from mlxd.messages import DeviceStatus, PrefixStore, Status, WorkerStatus
from mlxd_controller.cli import options as o
from mlxd_controller.cli.completion import named_model
from mlxd_controller.cli.grouping import ask_server
from mlxd_controller.cli.outcome import ExitCode, complain
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.terminal import show
from mlxd_shared import config
from mlxd_shared.domain.figures import HostMemory, PrefixDisk
from mlxd_shared.domain.units import format_bytes, format_duration

LINES_MAX = 5
"""Of a failed worker's last output; --json has all that is kept."""
ModelFilter = Annotated[str, named_model("Only this model's workers.", metavar="[MODEL]")]


@ask_server
async def status(
    model: ModelFilter = "",
    *,
    watch: o.Watch = False,
    interval: o.Interval = config.WATCH_INTERVAL_DEFAULT_S,
    as_json: o.Json = False,
    where: Server,
) -> ExitCode | None:
    """Show the server's workers and memory. --json includes every counter."""
    if watch:
        return await _watch(where, model, interval_s=interval, as_json=as_json)
    async with where.client() as client:
        _show(await client.status(model), as_json=as_json)
    return None


async def _watch(where: Server, model: str, *, interval_s: float, as_json: bool) -> ExitCode:
    async with (
        where.client() as client,
        client.watch_status(model, interval_s=interval_s) as statuses,
    ):
        async for current in statuses:
            if not as_json:
                show.clear_screen()
            _show(current, as_json=as_json)
    complain("the server ended the watch")
    return ExitCode.ERROR


def _show(status: Status, *, as_json: bool) -> None:
    if as_json:
        show.json_line(status)
        return
    show.fields(describe(status))
    for worker in status.workers:
        typer.echo()
        show.fields(_worker(worker))


def describe(status: Status) -> list[tuple[str, str]]:
    """Return the lines about a process, its machines and their devices: names and texts."""
    host, up_s = status.host_memory, 0.0
    if status.now is not None and status.start_time is not None:
        up_s = (status.now - status.start_time).total_seconds()
    running = f"mlxd {status.version}, pid {status.pid}, up {format_duration(up_s)}"
    others = [machine for machine in status.machines if machine.machine_id != host.machine_id]
    return [  # no mapping: people name machines, and one may be called as another line is
        (status.role.value, running),
        ("host memory", _memory(host)),
        *((machine.machine or "machine", _memory(machine)) for machine in others),
        *((device.name, _device(device)) for device in status.devices),
        *(() if status.prefix_store is None else _prefixes(status.prefix_store)),
    ]


def _device(device: DeviceStatus) -> str:
    places = "" if device.models_max is None else f", models at most: {device.models_max}"
    return (
        f"{device.product or device.kind}, {format_bytes(device.reserved_nbytes)} promised of"
        f" {format_bytes(device.budget_nbytes)}, {format_bytes(device.held_nbytes)} held{places}"
        f"{', above its marks' if device.pressed else ''}{', lost' if device.lost else ''}"
    )


def _prefixes(store: PrefixStore) -> list[tuple[str, str]]:
    """Return the lines about prompts on disk: all, then by model, however it was loaded."""
    by_model: dict[str, tuple[int, int, int]] = {}
    for folder in store.folders:
        name = folder.model or folder.form
        blocks, nbytes, in_clear = by_model.get(name, (0, 0, 0))
        in_clear += 0 if folder.encrypted else folder.blocks
        by_model[name] = (blocks + folder.blocks, nbytes + folder.nbytes, in_clear)
    whole = f"{format_bytes(store.nbytes)} of {format_bytes(store.budget_nbytes)} in {store.path}"
    return [
        ("prompts on disk", whole),
        *(
            (
                f"  {name}",
                f"{format_bytes(nbytes)} in {blocks}{'' if in_clear else ' encrypted'} files",
            )
            for name, (blocks, nbytes, in_clear) in sorted(by_model.items())
            if blocks
        ),
    ]


def _memory(machine: HostMemory) -> str:
    return (
        f"{format_bytes(machine.available_nbytes)} of {format_bytes(machine.total_nbytes)}"
        f" available, {format_bytes(machine.resident_nbytes)} in mlxd"
        f"{', lost' if machine.lost else ''}"
    )


def _disk(disk: PrefixDisk) -> str:
    return (
        f"{format_bytes(disk.nbytes)} of {format_bytes(disk.budget_nbytes)} in {disk.blocks}"
        f"{' encrypted' if disk.encrypted else ''} files;"
        f" {disk.written} written, {disk.read} read, {disk.refused} refused;"
        f" {disk.hit_tokens} tokens not computed"
    )


def _worker(worker: WorkerStatus) -> list[tuple[str, str]]:
    """Return the lines about a worker; one that has reported nothing has no figures."""
    identity = (
        f"{worker.state.value}, pid {worker.pid or '-'},"
        f" {show.short(worker.model_digest)} at {worker.address or '-'}"
    )
    return [
        (worker.model_name, identity),
        ("model", worker.model_path),
        *(_figures(worker).items() if worker.mlx_version else ()),
        ("error", worker.last_error),
        ("exit", "" if worker.exit_code is None else str(worker.exit_code)),
        *(
            ("last output" if not i else "", show.log_line(line))
            for i, line in enumerate(worker.last_lines[-LINES_MAX:])
        ),
    ]


def _figures(worker: WorkerStatus) -> dict[str, str]:
    memory, library = worker.memory, worker.math_library
    accounts = ", ".join(f"{a.name} {format_bytes(a.nbytes)}" for a in memory.accounts if a.nbytes)
    return {
        "runs on": (
            f"{worker.backend} (MLX {worker.mlx_version}), {library.name} {library.version},"
            f" {library.threads} threads, compiled steps {'on' if worker.compiles else 'off'}"
        ),
        "because": library.reason,
        "switched off": "; ".join(worker.fast_paths_off),
        "streams": (
            f"{worker.streams_running} running, {worker.streams_waiting} waiting"
            f" (longest {format_duration(worker.oldest_wait_s)}), {worker.rows_max} rows"
        ),
        "in force": show.form(worker),
        "context": (
            f"{worker.context_length} of {worker.context_length_max} tokens; in use"
            f" {worker.kv_tokens_used} of {worker.kv_tokens_capacity}"
        ),
        "memory": (
            f"{format_bytes(memory.total_nbytes)} held ({accounts or 'nothing'}),"
            f" {format_bytes(memory.unaccounted_nbytes)} unaccounted"
        ),
        "on disk": "" if worker.prefix_disk is None else _disk(worker.prefix_disk),
        "": (
            f"MLX {format_bytes(memory.mlx_active_nbytes)} active,"
            f" {format_bytes(memory.mlx_cache_nbytes)} pooled,"
            f" {format_bytes(memory.mlx_peak_nbytes)} at most;"
            f" process {format_bytes(memory.resident_nbytes)}"
        ),
        "devices": ", ".join(f"{name} {format_bytes(n)}" for name, n in memory.devices.items()),
        "figures": f"{format_duration(worker.figures_age_s)} old, {worker.cpu_s:.1f} s of CPU",
    }
