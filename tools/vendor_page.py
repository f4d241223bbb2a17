"""Fetches the page's vendored parts from npm, at exact versions, and proves them by their hashes.

python tools/vendor_page.py            # fetch with `npm pack`, and write them and their licences
python tools/vendor_page.py --check    # exit 1 where the committed files are not these; no network

`INTEGRITY` is what npm's registry publishes for each package; the hash of each file that is taken
from it is in `vendored.json` beside the files. To move to a newer version, change both here, run
it, and read what has changed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "gateway/mlxd_gateway/page/static/vendor"
MANIFEST = "vendored.json"


@dataclass(frozen=True, slots=True)
class Package:
    """A package of npm's, and what is taken from it: member of its archive to the file's name."""

    name: str
    version: str
    licence: str
    integrity: str
    files: Mapping[str, str]


PACKAGES = (
    Package(
        "htm",
        "3.1.1",
        "Apache-2.0",
        "sha512-983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5J"
        "D2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        {"preact/standalone.module.js": "htm-preact.js", "LICENSE": "LICENSE.htm"},
    ),
    # Its code comes built into htm's file; this is where its licence is.
    Package(
        "preact",
        "10.5.13",
        "MIT",
        "sha512-q/vlKIGNwzTLu+jCcvywgGrt+H/1P/oIRSD6mV4ln3hm"
        "lC+Aa34C7yfPI4+5bzW8pONyVXYS7SvXosy2dKKtWQ==",
        {"LICENSE": "LICENSE.preact"},
    ),
    Package(
        "uplot",
        "1.6.32",
        "MIT",
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXI"
        "mkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        {
            "dist/uPlot.esm.js": "uPlot.js",
            "dist/uPlot.min.css": "uPlot.css",
            "LICENSE": "LICENSE.uPlot",
        },
    ),
)


def fetch(package: Package) -> dict[str, bytes]:
    """Return the files of a package, under the names that they have here.

    Raises:
        SystemExit: what came is not what was published under this version.
    """
    with tempfile.TemporaryDirectory() as folder:
        spec = f"{package.name}@{package.version}"
        subprocess.run(["npm", "pack", "--silent", spec], cwd=folder, check=True)
        (archive,) = Path(folder).glob("*.tgz")
        digest = hashlib.sha512(archive.read_bytes()).digest()
        integrity = f"sha512-{base64.b64encode(digest).decode()}"
        if integrity != package.integrity:
            sys.exit(f"{spec} is not what was pinned: {integrity}")
        with tarfile.open(archive) as members:
            return {name: _read(members, member) for member, name in package.files.items()}


def _read(archive: tarfile.TarFile, member: str) -> bytes:
    content = archive.extractfile(f"package/{member}")
    assert content is not None, member
    return content.read()


def describe(files: Mapping[str, bytes]) -> str:
    """Return the manifest of vendored files."""
    entries = [
        {
            "package": package.name,
            "version": package.version,
            "licence": package.licence,
            "integrity": package.integrity,
            "files": {
                name: hashlib.sha256(files[name]).hexdigest() for name in package.files.values()
            },
        }
        for package in PACKAGES
    ]
    return json.dumps(entries, indent=2) + "\n"


def find_faults(folder: Path = FOLDER) -> list[str]:
    """Return what in a folder is not as its manifest, and this file, say."""
    entries = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    pinned = [(each.name, each.version, each.licence, each.integrity) for each in PACKAGES]
    listed = [
        (each["package"], each["version"], each["licence"], each["integrity"]) for each in entries
    ]
    faults = [] if listed == pinned else [f"{MANIFEST} names other packages"]
    hashes: dict[str, str] = {}
    for entry in entries:
        hashes |= entry["files"]
    there = {path.name for path in folder.iterdir()} - {MANIFEST}
    faults += [f"{name} is in no package" for name in sorted(there - hashes.keys())]
    faults += [f"{name} is missing" for name in sorted(hashes.keys() - there)]
    for name in sorted(there & hashes.keys()):
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != hashes[name]:
            faults.append(f"{name} was changed")
    return faults


def main() -> int:
    """Check, or fetch and write; return the exit code."""
    if "--check" in sys.argv:
        faults = find_faults()
        print("\n".join(faults) or "the vendored files are the published ones")
        return int(bool(faults))
    files: dict[str, bytes] = {}
    for package in PACKAGES:
        files |= fetch(package)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (FOLDER / name).write_bytes(content)
    (FOLDER / MANIFEST).write_text(describe(files), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
