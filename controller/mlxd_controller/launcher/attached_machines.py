"""The machines of the attached workers: each machine is one device, as all its workers report.

Invariants:
- Workers that report the same machine share its memory. Workers of an earlier version report none,
  and are taken to share one machine without a name.
- A machine is one device, whose name stays while any worker reports that machine. The first device
  is named as if it were alone; two machines of the same name get different names.
- A worker that has not reported yet is on no machine. A machine is lost when all its workers are.
- Until a worker reports, an unnamed machine stands in; the first one reported takes its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxd_controller.launcher.station import Station
from mlxd_shared.domain.devices import DeviceKind, kind_of
from mlxd_shared.domain.figures import HostMemory, ProcessStatus


@dataclass(frozen=True, slots=True)
class AttachedMachine:
    """One machine and its workers, at least one; `said` holds the last report of each."""

    node: str
    device: str
    """The name of its device."""
    stations: tuple[Station, ...]
    said: tuple[ProcessStatus, ...]

    @property
    def kind(self) -> DeviceKind:
        """The kind of its device."""
        return kind_of(self.said[0].workers[0].backend)

    @property
    def places(self) -> int:
        """How many of its workers are present to take a model."""
        return sum(station.present for station in self.stations)

    @property
    def memory(self) -> HostMemory:
        """The least memory reported by live workers; if none is live, by the last reports.

        The report of a worker that has gone does not describe the machine as it is now.
        """
        speaking = [station.status for station in self.stations if station.status is not None]
        hosts = [status.host for status in speaking or self.said]
        return HostMemory(
            machine=self.node,
            machine_id=self.said[0].host.machine_id,
            total_nbytes=min(host.total_nbytes for host in hosts),
            available_nbytes=min(host.available_nbytes for host in hosts),
            resident_nbytes=sum(
                station.figures.memory.resident_nbytes
                for station in self.stations
                if station.figures is not None
            ),
            lost=all(station.lost for station in self.stations),
        )


class AttachedMachines:
    """The machines of some workers, as they are when looked at."""

    def __init__(self, stations: Sequence[Station]) -> None:
        self._stations = stations
        self._names: dict[str, tuple[str, str]] = {}
        """The names of each machine and its device, by the machine's id."""

    def look(self) -> tuple[AttachedMachine, ...]:
        """Return the machines, in the order of their first workers."""
        groups: dict[str, list[tuple[Station, ProcessStatus]]] = {}
        for station in self._stations:
            if station.last is not None:
                groups.setdefault(station.last.host.machine_id, []).append((station, station.last))
        self._names = {known: names for known, names in self._names.items() if known in groups}
        return tuple(
            AttachedMachine(
                *self._names_of(group[0][1]),
                tuple(station for station, _ in group),
                tuple(status for _, status in group),
            )
            for group in groups.values()
        )

    def list_stations(self) -> list[tuple[str, Station]]:
        """Return the workers that have reported, each with its device's name."""
        return [
            (machine.device, station) for machine in self.look() for station in machine.stations
        ]

    def stations_of(self, device: str) -> tuple[Station, ...]:
        """Return the workers on a device's machine; "" means any machine."""
        return tuple(station for name, station in self.list_stations() if device in ("", name))

    def may_serve(self, device: str) -> bool:
        """Return whether a worker on this device's machine may still come."""
        stations = self.stations_of(device)
        return not self._names or any(not station.lost for station in stations)

    def all_gone(self, device: str) -> bool:
        """Return whether the device's workers have all gone, and none may be starting."""
        return all(station.last is not None for station in self._stations) and all(
            station.is_gone for station in self.stations_of(device)
        )

    def _names_of(self, status: ProcessStatus) -> tuple[str, str]:
        host = status.host
        if host.machine_id not in self._names:
            taken = {node for node, _ in self._names.values()}
            node = f"{host.machine}-{host.machine_id}" if host.machine in taken else host.machine
            self._names[host.machine_id] = (node, self._device_name(node, status))
        return self._names[host.machine_id]

    def _device_name(self, node: str, status: ProcessStatus) -> str:
        name = kind_of(status.workers[0].backend).first_name
        is_first = all("/" in device for _, device in self._names.values())
        return name if is_first or not node else f"{node}/{name}"
