"""A peer that opens streams and resets them at once, as fast as its connection takes them.

Its few frames are written by hand (RFC 9113, RFC 7541): no client library would do this.
"""

from __future__ import annotations

import socket

TIMEOUT_S = 60.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _RST_STREAM, _SETTINGS, _PING = 1, 3, 4, 6
_END_STREAM, _END_HEADERS, _ACK = 0x1, 0x4, 0x1
_CANCEL = 8
_HEAD_NBYTES = 9
_ASKED = b"all read"


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
    parts = [_PREFACE, _frame(_SETTINGS, b"")]
    for number in range(1, 2 * streams, 2):
        parts.append(_frame(_HEADERS, headers, flags=_END_HEADERS, stream=number))
        parts.append(_frame(_RST_STREAM, _CANCEL.to_bytes(4, "big"), stream=number))
    parts.append(_frame(_PING, _ASKED))
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.sendall(b"".join(parts))
        _await_answer(connection)


def _await_answer(connection: socket.socket) -> None:
    with connection.makefile("rb") as stream:
        while True:
            head = stream.read(_HEAD_NBYTES)
            assert len(head) == _HEAD_NBYTES, "the server hung up"
            payload = stream.read(int.from_bytes(head[:3], "big"))
            if (head[3], head[4] & _ACK, payload) == (_PING, _ACK, _ASKED):
                return
