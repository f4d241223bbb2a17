"""`--fleet` on the command line: what it takes, what it needs, and what it does not go with."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from mlxd_controller.cli.fleet import Fleet
from mlxd_controller.settings import FleetPlace
from tests.support.cli import mlxd


def test_without_it_workers_run_here() -> None:
    """No cluster is joined that nobody asked for."""
    assert Fleet().place() is None


@pytest.mark.parametrize("address", ["auto", "ray://10.0.0.1:6379"])
def test_a_fleet_is_as_it_was_named(address: str) -> None:
    """A folder has a path that does not depend on where the server is started."""
    assert Fleet(address).place() == FleetPlace(address)
    place = Fleet(address, Path("tls")).place()
    assert place == FleetPlace(address, Path("tls").absolute())


@pytest.mark.parametrize(
    "address", ["10.0.0.1:6379", "ray://", "ray://host", "http://h:1", "ray://unix:/x"]
)
def test_another_address_is_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With what was written."""
    with pytest.raises(typer.Exit):
        Fleet(address).place()
    assert f"--fleet {address}" in capsys.readouterr().err


def test_the_folder_for_tls_needs_a_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    """It would be passed over in silence."""
    with pytest.raises(typer.Exit):
        Fleet(fleet_tls=Path("tls")).place()
    assert "--fleet-tls needs --fleet" in capsys.readouterr().err


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("flag", "value"), [("--worker", "w=h:1"), ("--prefix-disk", "1G"), ("--run-dir", "here")]
)
async def test_options_of_this_machine_s_workers_are_refused(flag: str, value: str) -> None:
    """They would have no effect on the nodes."""
    done = await mlxd("serve", "--fleet", "auto", flag, value)
    assert done.code == 2
    assert f"{flag} does not go with --fleet" in done.err
