"""A clock that a test moves, and memory that a test sizes."""

from __future__ import annotations

from collections.abc import Iterable

from mlxd_models.fit.plan import Device
from mlxd_shared.domain.figures import HostMemory

UNIX_OFFSET_S = 1_000_000.0


class FakeClock:
    """Implements ports.Clock."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now = now_s

    def now_s(self) -> float:
        """Return the test's time."""
        return self.now

    def unix_s(self) -> float:
        """Return the test's time, for people."""
        return self.now + UNIX_OFFSET_S


class FakeProbe:
    """Implements ports.DeviceProbe."""

    def __init__(self, device: Device, *others: Device) -> None:
        self.device = device
        self.others = others
        self.pids: tuple[int, ...] = ()
        self.error: OSError | None = None
        """What the system says in place of figures."""
        self.elsewhere: tuple[HostMemory, ...] = ()
        """The machines, where workers run on others."""

    def read(self, own_pids: Iterable[int]) -> tuple[Device, ...]:
        """Return the test's devices; remember whose memory was asked for."""
        self.pids = tuple(own_pids)
        if self.error is not None:
            raise self.error
        return (self.device, *self.others)

    def machines(self) -> tuple[HostMemory, ...]:
        """Return the test's machines."""
        return self.elsewhere
