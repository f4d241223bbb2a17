"""What a proof found is remembered by device and versions, whatever ends the writer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlxd_shared.domain.fast_paths import FastPath
from mlxd_shared.ops.findings import (
    DEVICES_MAX,
    FINDINGS_FILE,
    Proved,
    UnreadableFindings,
    read_off,
    remember,
)

VERSIONS = {"mlxd": "1", "mlx-cpu": "2"}
WRITER = """
import itertools, sys
from pathlib import Path
from mlxd_shared.domain.fast_paths import FastPath
from mlxd_shared.ops.findings import Proved, remember

for number in itertools.count():
    remember(Path(sys.argv[1]), Proved("cpu", {"mlxd": "1"}, {FastPath.LANES: str(number)}))
    print(number, flush=True)
"""


def test_findings_are_of_one_device_with_these_versions(tmp_path: Path) -> None:
    """Another device's, and those of other versions, switch nothing off; the last proof counts."""
    off = {FastPath.LANES: "slower", FastPath.RUN_AHEAD: "wrong"}
    path = tmp_path / "models" / FINDINGS_FILE
    assert read_off(path, device="cpu", versions=VERSIONS) == {}
    remember(path.parent, Proved("gpu", VERSIONS, {FastPath.ROW_KERNEL: "wrong"}))
    remember(path.parent, Proved("cpu", VERSIONS, off))

    assert read_off(path, device="cpu", versions=VERSIONS) == off
    assert read_off(path, device="gpu", versions=VERSIONS) == {FastPath.ROW_KERNEL: "wrong"}
    assert read_off(path, device="cpu", versions={**VERSIONS, "mlxd": "2"}) == {}
    assert read_off(path, device="other", versions=VERSIONS) == {}
    remember(path.parent, Proved("cpu", VERSIONS, {}))
    assert read_off(path, device="cpu", versions=VERSIONS) == {}
    assert read_off(path, device="gpu", versions=VERSIONS) == {FastPath.ROW_KERNEL: "wrong"}


def test_the_file_is_bounded(tmp_path: Path) -> None:
    """The device that was proved longest ago makes room."""
    for number in range(DEVICES_MAX + 1):
        remember(tmp_path, Proved(f"d{number}", VERSIONS, {FastPath.LANES: "slower"}))

    known = json.loads((tmp_path / FINDINGS_FILE).read_text())["devices"]
    assert list(known) == [f"d{number}" for number in range(1, DEVICES_MAX + 1)]


BAD = {
    "torn": '{"version": 1, "devices": {"cpu": {"versions": {}',
    "of a later version": '{"version": 2, "devices": {}}',
    "of somebody else": '["a"]',
    "without versions": '{"version": 1, "devices": {"cpu": {"off": {}}}}',
    "with a number": '{"version": 1, "devices": {"cpu": {"versions": {}, "off": {"lanes": 1}}}}',
    "too long": '{"version": 1, "devices": {}}' + " " * (1 << 20),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_is_none_switches_nothing_off_and_is_replaced(
    kind: str, tmp_path: Path
) -> None:
    """Who reads it is told why; the next proof writes it anew."""
    path = tmp_path / FINDINGS_FILE
    path.write_text(BAD[kind])
    with pytest.raises(UnreadableFindings):
        read_off(path, device="cpu", versions=VERSIONS)
    remember(tmp_path, Proved("cpu", VERSIONS, {FastPath.LANES: "slower"}))

    assert read_off(path, device="cpu", versions=VERSIONS) == {FastPath.LANES: "slower"}


def test_a_path_that_is_none_is_no_finding(tmp_path: Path) -> None:
    """Of these versions it cannot be; of later ones, on another device, it stays in the file."""
    entry = {"versions": VERSIONS, "off": {"warp": "slower"}}
    devices = {"cpu": entry, "later": {**entry, "versions": {"mlxd": "9"}}}
    path = tmp_path / FINDINGS_FILE
    path.write_text(json.dumps({"version": 1, "devices": devices}))
    with pytest.raises(UnreadableFindings, match="warp"):
        read_off(path, device="cpu", versions=VERSIONS)
    remember(tmp_path, Proved("cpu", VERSIONS, {}))

    assert json.loads(path.read_text())["devices"]["later"] == devices["later"]


def test_what_was_written_outlives_its_writer_whenever_that_is_killed(tmp_path: Path) -> None:
    """The file is whole after each blow, and has the last finding that was said to be in it."""
    for blow in range(4):
        folder = tmp_path / str(blow)
        command = [sys.executable, "-c", WRITER, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            said = [int(writer.stdout.readline()) for _ in range(blow + 1)]
            writer.kill()
            said += map(int, writer.stdout.read().splitlines())

        off = read_off(folder / FINDINGS_FILE, device="cpu", versions={"mlxd": "1"})
        assert int(off[FastPath.LANES]) >= said[-1]
