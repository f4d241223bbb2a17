"""Faults that are planted in a machine: the doctor names each, and only that one."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from mlxd_controller.doctor.checks import judge
from mlxd_controller.doctor.facts import (
    ConfigurationFile,
    Disk,
    Facts,
    Finding,
    Port,
    PortUse,
    Secret,
    State,
    Store,
)
from mlxd_controller.doctor.probes import (
    ask_server,
    probe_configuration,
    probe_disk,
    probe_memory,
    probe_port,
    probe_secret,
    probe_store,
)
from mlxd_shared import config
from mlxd_shared.domain.units import format_bytes
from mlxd_shared.security.net import parse_address
from mlxd_shared.security.secure_channel import PLAIN

SOUND = dict.fromkeys(("jinja2", "llguidance", "mlx", "mlx-cpu", "numpy", "tokenizers"), "1.0")
WELL = Facts(
    versions=SOUND,
    total_nbytes=16 << 30,
    available_nbytes=8 << 30,
    reserve_fraction=0.1,
    disks=(Disk("sockets in", Path("/tmp"), 1 << 40),),
    ports=(Port("gRPC", "127.0.0.1:8555", PortUse.NOBODY),),
    stores=(Store("hub cache", Path("/hub"), models=3),),
    secrets=(Secret("token file", Path("/token"), 0o600),),
)


def faults(facts: Facts) -> list[Finding]:
    """Return the faults alone."""
    return [finding for finding in judge(facts) if finding.state is State.FAULT]


def test_a_sound_machine_has_no_fault() -> None:
    """Each check says what it has looked at."""
    findings = judge(WELL)

    checks = ["configuration", "backend", "device", "memory", "disk", "port", "store", "secrets"]
    assert [(each.check, each.state) for each in findings] == [
        (check, State.FINE) for check in checks
    ]


def test_a_configuration_file_that_is_refused(tmp_path: Path) -> None:
    """With the file and the key, as every other command would say; a good one is named."""
    path = tmp_path / "c.toml"
    path.write_text("adress = 'x:1'")
    read = {"MLXD_CONFIG": str(path)}
    (fault,) = faults(replace(WELL, configuration=probe_configuration(read)))
    assert fault.check == "configuration"
    assert fault.text.startswith(f"{path}: adress: there is no such key")
    path.write_text("address = 'x:1'")
    assert probe_configuration(read) == ConfigurationFile(path)
    assert judge(replace(WELL, configuration=ConfigurationFile(path)))[0].text == str(path)
    assert probe_configuration({"XDG_CONFIG_HOME": str(tmp_path)}) == ConfigurationFile()


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({**SOUND, "mlx-cpu": None}, "without a backend"),
        ({**SOUND, "mlx-cuda-13": "1.0"}, "mlx-cpu and mlx-cuda-13 are installed together"),
        ({**SOUND, "numpy": None}, "numpy are not installed"),
    ],
)
def test_no_backend_two_backends_and_half_an_installation(
    versions: dict[str, str | None], said: str
) -> None:
    """Each is the backend's one fault, with what to install."""
    own = {name: version for name, version in versions.items() if version is not None}
    (fault,) = faults(replace(WELL, versions=own))

    assert fault.check == "backend"
    assert said in fault.text
    assert "install" in fault.text


def test_a_backend_for_gpus_without_one() -> None:
    """It is the device's fault; with a GPU there is none."""
    versions = {name: v for name, v in SOUND.items() if name != "mlx-cpu"} | {"mlx-cuda-13": "1.0"}
    facts = replace(WELL, versions=versions)

    assert [fault.check for fault in faults(facts)] == ["device"]
    assert faults(replace(facts, gpus=("gpu0 H100",))) == []


def test_too_little_memory() -> None:
    """What others hold and the reserve come before models; the least is named."""
    least = config.DOCTOR_MEMORY_BYTES_MIN
    enough = replace(WELL, total_nbytes=10 * least, available_nbytes=2 * least)

    assert faults(enough) == []
    (fault,) = faults(replace(enough, available_nbytes=2 * least - 1))
    assert (fault.check, format_bytes(least) in fault.text) == ("memory", True)
    assert 0 < probe_memory()[1] <= probe_memory()[0]


def test_a_full_disk(tmp_path: Path) -> None:
    """Less than the least that is free, or nothing that can be written, is a fault by its path."""
    full = Disk("sockets in", tmp_path, config.DOCTOR_DISK_BYTES_MIN - 1)
    (fault,) = faults(replace(WELL, disks=(full,)))
    assert (fault.check, str(tmp_path) in fault.text) == ("disk", True)

    probed = probe_disk("models in", tmp_path / "not" / "there")
    stat = os.statvfs(tmp_path)
    assert probed.problem == ""
    assert probed.free_nbytes == pytest.approx(stat.f_bavail * stat.f_frsize, rel=0.1)
    assert list(tmp_path.iterdir()) == []
    refused = probe_disk("models in", Path("/proc/self"))
    assert [fault.check for fault in faults(replace(WELL, disks=(refused,)))] == ["disk"]


@pytest.mark.asyncio
async def test_a_taken_port() -> None:
    """Somebody else's is a fault; one that is free again is none."""

    async def ask() -> PortUse:
        return await ask_server(address.target, PLAIN)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = parse_address(f"127.0.0.1:{listener.getsockname()[1]}")
        taken = await probe_port("gRPC", address, ask)
    free = await probe_port("gRPC", address, ask)

    (fault,) = faults(replace(WELL, ports=(taken,)))
    assert (fault.check, address.target in fault.text) == ("port", True)
    assert faults(replace(WELL, ports=(free,))) == []


@pytest.mark.asyncio
async def test_who_listens_is_asked_once_somebody_does(tmp_path: Path) -> None:
    """A server of ours is a note, and no fault; a socket that nobody listens at is free."""

    async def ask() -> PortUse:
        return PortUse.OURS

    path = tmp_path / "s"
    free = await probe_port("gRPC", parse_address(f"unix:{path}"), ask)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        taken = await probe_port("gRPC", parse_address(f"unix:{path}"), ask)

    assert (free.use, taken.use) == (PortUse.NOBODY, PortUse.OURS)
    notes = [each for each in judge(replace(WELL, ports=(taken,))) if each.check == "port"]
    assert [note.state for note in notes] == [State.NOTE]
    nowhere = await probe_port("gRPC", parse_address("203.0.113.1:1"), ask)
    assert [fault.check for fault in faults(replace(WELL, ports=(nowhere,)))] == ["port"]


def test_an_unreadable_store(tmp_path: Path) -> None:
    """It is named with the system's word; one that is not there is a note."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    unreadable, absent = probe_store("hub cache", loop, 0), probe_store("hub", tmp_path / "no", 0)

    (fault,) = faults(replace(WELL, stores=(unreadable,)))
    assert (fault.check, str(loop) in fault.text) == ("store", True)
    assert faults(replace(WELL, stores=(absent, probe_store("hub", tmp_path, 0)))) == []
    assert not absent.there


@pytest.mark.parametrize("mode", [0o644, 0o606, 0o620, 0o602])
def test_a_loose_token_file(mode: int, tmp_path: Path) -> None:
    """Others may neither read nor write it; the permissions are named."""
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(mode)
    (fault,) = faults(replace(WELL, secrets=(probe_secret("token file", token),)))
    token.chmod(0o640)  # of a group, as containers mount them

    assert (fault.check, f"({mode:o})" in fault.text) == ("secrets", True)
    assert faults(replace(WELL, secrets=(probe_secret("token file", token),))) == []
    missing = probe_secret("token file", tmp_path / "none")
    assert [fault.check for fault in faults(replace(WELL, secrets=(missing,)))] == ["secrets"]
