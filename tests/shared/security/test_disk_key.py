"""The file with the key for prompts on disk: what is a key, and which files are refused."""

from __future__ import annotations

import base64
import os
from pathlib import Path, PosixPath

import pytest

from mlxd_shared import config
from mlxd_shared.blocks.sealing import DiskKey
from mlxd_shared.domain.errors import BadCredentials
from mlxd_shared.security.disk_key import read_disk_key
from tests.support.disk_keys import secret_of, write_key

SECRET = secret_of(3)
BASE64 = base64.b64encode(SECRET).decode()


def write(path: Path, text: str) -> Path:
    """Write a file of its user alone."""
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    "text",
    [
        SECRET.hex(),
        SECRET.hex().upper() + "\n",
        BASE64 + "\n",
        BASE64 + "\r\n",
        base64.urlsafe_b64encode(SECRET).decode(),
    ],
)
def test_a_key_is_read_in_either_spelling(tmp_path: Path, text: str) -> None:
    """Hexadecimal digits or base64, of either alphabet, with or without an end of line."""
    assert read_disk_key(write(tmp_path / "key", text)).id == DiskKey(SECRET).id


@pytest.mark.parametrize(
    "text",
    [
        SECRET.hex()[:-2],
        SECRET.hex() + "00",
        "z" * 64,
        BASE64[:-4],
        base64.b64encode(SECRET + b"\0").decode(),
        f"{SECRET.hex()}\n{SECRET.hex()}\n",
        "correct horse battery staple",
        "\n",
    ],
)
def test_what_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    """Short, long or no key: the error names the file, says what one is, and repeats nothing."""
    path = write(tmp_path / "key", text)
    with pytest.raises(BadCredentials) as refused:
        read_disk_key(path)
    said = str(refused.value)
    assert said.startswith(f"{path}: a key is 32 random bytes")
    assert "openssl rand -hex 32" in said
    assert not text.strip() or text.strip() not in said


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_file_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    """Whoever could read or write it could read the prompts; what to do is said."""
    path = write_key(tmp_path / "key", mode=mode)
    with pytest.raises(BadCredentials, match=rf"open to others \(mode {mode:04o}\): chmod 600"):
        read_disk_key(path)


@pytest.mark.parametrize("folder", [".", "/etc/keys"], ids=["relative", "absolute"])
@pytest.mark.parametrize(
    "secret",
    [
        SECRET,
        b"\xfc" + bytes(31),
        bytes(3) + b"\x0f\xff" + bytes(27),
        bytes(3) + b"\x03\xff\xc0" + bytes(26),
    ],
)
def test_a_key_in_place_of_a_path_is_not_repeated(folder: str, secret: bytes) -> None:
    """As an option or variable gives one: in either spelling, with base64's slashes too."""
    for text in (secret.hex(), base64.b64encode(secret).decode()):
        with pytest.raises(
            BadCredentials, match="prefix_disk_key: is a key, not a file"
        ) as refused:
            read_disk_key(Path(folder) / text)
        assert text[-12:] not in str(refused.value)


class Replaced(PosixPath):
    """A path at which a private file stands only while somebody asks about the path."""

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Say what stands there for that moment."""
        self.chmod(0o600)
        try:
            return super().stat(follow_symlinks=follow_symlinks)
        finally:
            self.chmod(0o644)


def test_what_is_checked_is_what_is_read(tmp_path: Path) -> None:
    """The open file counts, not what its path means a moment later."""
    write_key(tmp_path / "key", mode=0o644)
    with pytest.raises(BadCredentials, match=r"open to others \(mode 0644\)"):
        read_disk_key(Replaced(tmp_path / "key"))


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """Nobody writes to it, and no start waits for that."""
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(BadCredentials, match="there is no such file"):
        read_disk_key(tmp_path / "key")


@pytest.mark.parametrize("nbytes", [0, config.CREDENTIAL_FILE_BYTES_MAX + 1])
def test_no_more_is_read_than_a_credential_has(tmp_path: Path, nbytes: int) -> None:
    """Nor is nothing: the error says how much."""
    limit = f"1 to {config.CREDENTIAL_FILE_BYTES_MAX} bytes"
    with pytest.raises(BadCredentials, match=f"is empty or too large; {limit}"):
        read_disk_key(write(tmp_path / "key", "a" * nbytes))


def test_a_file_that_is_missing_or_none_is_refused(tmp_path: Path) -> None:
    """By its name: nothing is made in its place."""
    with pytest.raises(BadCredentials, match="there is no such file"):
        read_disk_key(tmp_path / "key")
    with pytest.raises(BadCredentials, match="there is no such file"):
        read_disk_key(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    """He knows the key. Root makes one of somebody's; everybody else has one of root's."""
    path = Path("/etc/passwd")
    if os.geteuid() == 0:
        path = write_key(tmp_path / "key")
        os.chown(path, 12345, 12345)
    with pytest.raises(BadCredentials, match="belongs to another user"):
        read_disk_key(path)
