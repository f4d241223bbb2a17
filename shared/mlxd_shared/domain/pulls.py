"""How far the download of a model from a hub is, and what it has brought. Sizes are in bytes."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PullPhase(enum.Enum):
    """What a download is doing."""

    UNKNOWN = "unknown"
    WAITING = "waiting"
    """Another revision or other files of the model are being downloaded, and go first."""
    LISTING = "listing"
    """The hub is asked which files there are."""
    DOWNLOADING = "downloading"
    VERIFYING = "verifying"
    """What has arrived of a file is compared with its hash."""
    DONE = "done"


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model that was downloaded. `path` is its folder, on the machine that downloaded it.

    It can be loaded by its `name`, ORG/NAME or ORG/NAME@REVISION. `digest` is empty if its files
    cannot be read as a model.
    """

    name: str
    repository: str
    revision: str
    commit: str
    path: str
    digest: str
    files: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PullProgress:
    """One step of a download; `pulled` is set in the last one alone.

    `file_digest` is sha256:HEX, or git:HEX for git's hash of a blob, or empty. A `file_size_nbytes`
    or `total_nbytes` of 0 is not known (yet). The figures of all files include those that were
    there.
    """

    phase: PullPhase
    file: str = ""
    file_digest: str = ""
    file_done_nbytes: int = 0
    file_size_nbytes: int = 0
    done_nbytes: int = 0
    total_nbytes: int = 0
    pulled: PulledModel | None = None
