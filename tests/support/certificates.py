"""Certificates for tests: an authority of our own, and what it signs, as files."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

SECRET = "correct-horse-battery-staple"
DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate chain and its key, as files."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates and writes them below `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._ca = trustme.CA()
        self.path = self._write(f"{name}.pem", self._ca.cert_pem.bytes())

    def issue(
        self,
        name: str = "server",
        *,
        days: int = 100,
        since_days: int = -200,
        host: str = "localhost",
    ) -> Pair:
        """Return a certificate for `host`, valid from now + since_days to now + days."""
        now = datetime.now(UTC)
        leaf = self._ca.issue_cert(
            host, "127.0.0.1", not_before=now + since_days * DAY, not_after=now + days * DAY
        )
        chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
        return Pair(
            self._write(f"{name}.pem", chain),
            self._write(f"{name}.key", leaf.private_key_pem.bytes()),
        )

    def _write(self, name: str, content: bytes) -> Path:
        path = self._folder / name
        path.write_bytes(content)
        path.chmod(0o600)
        return path


def token_file(folder: Path, value: str = SECRET, *, name: str = "token") -> Path:
    """Write a token to a private file."""
    path = folder / name
    path.write_text(value + "\n", encoding="utf-8")
    path.chmod(0o600)
    return path
