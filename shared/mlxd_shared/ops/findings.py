"""doctor.json beside the other remembered files: which fast paths are off, by device and version.

    {"version": 1, "devices": {"NAME": {"versions": {"mlx": "0.32.4"}, "off": {"lanes": "why"}}}}

Invariants:
- The file says what one proof or the next one found, whole, whatever ends the writer meanwhile.
- What was found on another device, or with other versions, switches nothing off.
- It has at most DEVICES_MAX devices, the one that was proved last at the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

from mlxd_shared.domain.fast_paths import FastPath
from mlxd_shared.ops.backends import Installed
from mlxd_shared.ops.state_file import replace_json, writing_alone

FINDINGS_FILE: Final = "doctor.json"
DEVICES_MAX: Final = 16
FILE_BYTES_MAX: Final = 1 << 20
_LOCK_FILE = ".doctor.lock"
_VERSION: Final = 1
_Entry: TypeAlias = dict[str, dict[str, str]]
"""Of a device: `versions` and `off`, as the file has them; those of other versions stay in it."""

Off = Mapping[FastPath, str]
"""Why each path is off."""
NONE_OFF: Off = MappingProxyType({})


class UnreadableFindings(Exception):
    """A file that says nothing that could be believed; its text is the reason."""


@dataclass(frozen=True, slots=True)
class Proved:
    """What a proof of the engine found on one device with these versions."""

    device: str
    """What the device calls itself."""
    versions: Mapping[str, str]
    off: Off = field(default_factory=dict)


def versions_of(backend: Installed) -> dict[str, str]:
    """Return the versions by which findings are remembered: ours, and that of MLX's backend."""
    return {"mlxd": metadata.version("mlxd"), backend.distribution: backend.version}


def read_off(path: Path, *, device: str, versions: Mapping[str, str]) -> Off:
    """Return the paths that are off on this device with these versions. Blocks on the disk.

    Raises:
        UnreadableFindings: the file cannot be read, or is none; one that is not there is no error.
    """
    entry = _read(path).get(device)
    if entry is None or entry["versions"] != dict(versions):
        return NONE_OFF
    try:
        return {FastPath(name): reason for name, reason in entry["off"].items()}
    except ValueError as error:
        raise UnreadableFindings(f"not of these versions: {error}") from error


def remember(folder: Path, proved: Proved) -> None:
    """Record findings in place of the former ones of this device.

    A file that cannot be understood, such as one of a later version, is replaced.

    Raises:
        OSError: it cannot be written.
    """
    with writing_alone(folder, _LOCK_FILE):
        try:
            devices = _read(folder / FINDINGS_FILE)
        except UnreadableFindings:
            devices = {}
        devices.pop(proved.device, None)
        off = {path.value: reason for path, reason in proved.off.items()}
        devices[proved.device] = {"versions": dict(proved.versions), "off": off}
        kept = dict(list(devices.items())[-DEVICES_MAX:])
        replace_json(folder / FINDINGS_FILE, {"version": _VERSION, "devices": kept})


def _read(path: Path) -> dict[str, _Entry]:
    try:
        with path.open("rb") as stream:
            raw = stream.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UnreadableFindings(error.strerror or str(error)) from error
    if len(raw) > FILE_BYTES_MAX:
        raise UnreadableFindings(f"over {FILE_BYTES_MAX} bytes long")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UnreadableFindings(f"not JSON: {error}") from error
    match content:
        case {"version": 1, "devices": dict(devices)} if all(map(_is_entry, devices.values())):
            return devices
    raise UnreadableFindings("not what this version of `mlxd doctor` writes")


def _is_entry(value: object) -> bool:
    match value:
        case {"versions": dict(versions), "off": dict(off)}:
            texts = [*versions.values(), *off.values()]
            return all(isinstance(text, str) for text in texts)
    return False
