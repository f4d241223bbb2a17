"""What a proof found is written beside the server's other files, or the report says why not."""

from __future__ import annotations

from pathlib import Path

from mlxd_controller.doctor.command import remember_proved
from mlxd_controller.doctor.facts import State
from mlxd_shared.domain.fast_paths import FastPath
from mlxd_shared.ops.findings import FINDINGS_FILE, Proved, read_off

PROVED = Proved("cpu", {"mlx": "1"}, {FastPath.LANES: "slower"})


def test_what_is_off_is_remembered_where_servers_look(tmp_path: Path) -> None:
    """And said; without a directory it is a note, and where nothing can be written a fault."""
    fine = remember_proved(tmp_path, PROVED)
    nowhere = remember_proved(None, PROVED)
    (tmp_path / "file").touch()
    refused = remember_proved(tmp_path / "file", PROVED)

    off = read_off(tmp_path / FINDINGS_FILE, device="cpu", versions={"mlx": "1"})
    assert off == PROVED.off
    assert [each.state for each in (fine, nowhere, refused)] == [
        State.FINE, State.NOTE, State.FAULT
    ]  # fmt: skip
    assert all("lanes" in each.text for each in (fine, nowhere))
