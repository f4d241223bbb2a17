"""A peer that does what no client library would: opens streams and resets them at once, or pings.

Its few frames are written by hand (RFC 9113, RFC 7541).
"""

from __future__ import annotations

import socket
from typing import BinaryIO

from mlxd_shared import config

TIMEOUT_S = 60.0
AT_ONCE = 100
assert AT_ONCE < config.STREAMS_PER_CONNECTION_MAX  # or the transport would refuse some by itself
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 1, 3, 4, 6, 7
_END_HEADERS, _ACK = 0x4, 0x1
_CONCURRENT_STREAMS_MAX = 3
"""A setting's number, as it is in a frame of settings."""
_SETTING_NBYTES = 6
_CANCEL = 8
_PING_NBYTES = 8
_HEAD_NBYTES = 9


def _frame(kind: int, payload: bytes, *, flags: int = 0, stream: int = 0) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + payload


def _header(name: bytes, value: bytes) -> bytes:
    """Return a literal header that is not indexed, without Huffman's code."""
    assert max(len(name), len(value)) < 0x7F
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def flood(port: int, method: str, streams: int) -> None:
    """Open and reset so many streams; return once the server's transport has read all of them.

    Blocks meanwhile: called on the server's event loop, it keeps the server from taking a call.
    """
    headers = b"".join((
        _header(b":method", b"POST"),
        _header(b":scheme", b"http"),
        _header(b":path", method.encode()),
        _header(b":authority", b"x"),
        _header(b"te", b"trailers"),
        _header(b"content-type", b"application/grpc"),
    ))  # fmt: skip
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.sendall(_PREFACE)
        answers = connection.makefile("rb")
        _send(connection, answers, b"")
        for begin in range(0, streams, AT_ONCE):
            numbers = range(2 * begin + 1, 2 * min(begin + AT_ONCE, streams), 2)
            opened = (_frame(_HEADERS, headers, flags=_END_HEADERS, stream=n) for n in numbers)
            _send(connection, answers, b"".join(opened))
            reset = (_frame(_RST_STREAM, _CANCEL.to_bytes(4, "big"), stream=n) for n in numbers)
            _send(connection, answers, b"".join(reset))


def concurrent_streams_max(port: int) -> int | None:
    """Return how many streams a server lets a connection have, by what it says; None: any number.

    Its settings are the first thing that a server says.
    """
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.sendall(_PREFACE + _frame(_SETTINGS, b""))
        answers = connection.makefile("rb")
        head = answers.read(_HEAD_NBYTES)
        assert head[3] == _SETTINGS
        settings = answers.read(int.from_bytes(head[:3], "big"))
    for begin in range(0, len(settings), _SETTING_NBYTES):
        number, value = settings[begin : begin + 2], settings[begin + 2 : begin + _SETTING_NBYTES]
        if int.from_bytes(number, "big") == _CONCURRENT_STREAMS_MAX:
            return int.from_bytes(value, "big")
    return None


def ping(port: int, count: int) -> int:
    """Ping a server so often, each once the one before was answered; return how many it answered.

    It has hung up after fewer.
    """
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.sendall(_PREFACE + _frame(_SETTINGS, b""))
        answers = connection.makefile("rb")
        for number in range(count):
            connection.sendall(_frame(_PING, number.to_bytes(_PING_NBYTES, "big")))
            if not _is_answered(answers, _PING):
                return number
    return count


def _send(connection: socket.socket, answers: BinaryIO, frames: bytes) -> None:
    """Send frames, and wait until the transport has read them: it acknowledges what comes last.

    Settings, because many pings would have the server hang up.
    """
    connection.sendall(frames + _frame(_SETTINGS, b""))
    assert _is_answered(answers, _SETTINGS), "the server hung up"


def _is_answered(answers: BinaryIO, kind: int) -> bool:
    """Read up to the answer to a frame of this kind; return whether it came."""
    while True:
        head = answers.read(_HEAD_NBYTES)
        if len(head) < _HEAD_NBYTES or head[3] == _GOAWAY:
            return False
        answers.read(int.from_bytes(head[:3], "big"))
        if (head[3], head[4] & _ACK) == (kind, _ACK):
            return True
