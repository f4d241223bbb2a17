"""Messages in a pipe: each one's size in bytes on a line, then its bytes."""

from __future__ import annotations

from typing import IO


def write_message(stream: IO[bytes], message: bytes) -> None:
    """Write a message and flush it.

    Raises:
        BrokenPipeError: nobody reads any more.
    """
    stream.write(b"%d\n" % len(message))
    stream.write(message)
    stream.flush()


def read_message(stream: IO[bytes]) -> bytes | None:
    """Return the next message, waiting for it; None where the stream ends before its end."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    size = int(line)
    message = stream.read(size)
    return message if len(message) == size else None
