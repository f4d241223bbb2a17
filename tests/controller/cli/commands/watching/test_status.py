"""What `mlxd status` says of machines and devices."""

from __future__ import annotations

from dataclasses import replace

from mlxd.messages import DeviceStatus, ProcessRole, Status
from mlxd_controller.cli.commands.watching.status import describe
from mlxd_shared.config import GIB
from mlxd_shared.domain.figures import HostMemory

OWN = HostMemory("desk", "id-desk", 8 * GIB, 4 * GIB, GIB)
CPU = DeviceStatus("cpu", "cpu", 8 * GIB, 6 * GIB, 5 * GIB, 0, 0, False, "", "", "", False, None)
STATUS = Status(ProcessRole.CONTROLLER, "1.0", 7, None, None, OWN, (CPU,), (), (), (OWN,))


def test_who_has_one_machine_reads_of_no_other() -> None:
    """Its memory is the host's, and its device has neither places nor a state to tell of."""
    lines = describe(STATUS)

    assert [name for name, _ in lines] == ["controller", "host memory", "cpu"]
    assert lines[1][1] == "4.0 GiB of 8.0 GiB available, 1.0 GiB in mlxd"
    assert lines[2][1] == "cpu, 5.0 GiB promised of 6.0 GiB, 0 B held"


def test_a_machine_may_be_called_as_another_line_is() -> None:
    """People name machines: no line takes the place of another."""
    other = replace(OWN, machine="controller", machine_id="id-other", lost=True)
    device = replace(CPU, name="controller/cpu", machine="controller", lost=True, models_max=1)

    lines = describe(replace(STATUS, devices=(CPU, device), machines=(OWN, other)))

    names = ["controller", "host memory", "controller", "cpu", "controller/cpu"]
    assert [name for name, _ in lines] == names
    assert lines[2][1].endswith(", lost")
    assert lines[4][1].endswith(", 0 B held, models at most: 1, lost")
