"""Bytes written by hand: protobuf fields that no stub would write, and frames of HTTP/2."""

from __future__ import annotations

import struct
from collections.abc import Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
ACK, END_STREAM, END_HEADERS = 1, 1, 4
CANCEL = 8
FRAME_HEAD_BYTES = 9
_LENGTH_DELIMITED = 2
_LITERAL_NOT_INDEXED = b"\x00"


def varint(number: int) -> bytes:
    """Return a number as protobuf writes it."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def field(number: int, content: bytes) -> bytes:
    """Return a field of bytes, a text or a message."""
    return varint(number << 3 | _LENGTH_DELIMITED) + varint(len(content)) + content


def empty_fields(number: int, count: int) -> bytes:
    """Return so many empty texts or messages, two bytes each for low numbers."""
    return field(number, b"") * count


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers_block(headers: Mapping[str, str]) -> bytes:
    """Return headers as HPACK's literals, each shorter than 127 bytes, none of them indexed."""
    block = bytearray()
    for name, value in headers.items():
        block += _LITERAL_NOT_INDEXED
        for text in (name.encode(), value.encode()):
            assert len(text) < 0x7F, "longer ones have more than one byte of length"
            block.append(len(text))
            block += text
    return bytes(block)


def grpc_message(content: bytes) -> bytes:
    """Return a message as gRPC frames it within a stream's data."""
    return struct.pack(">BI", 0, len(content)) + content


def parse_frames(buffer: bytearray) -> list[tuple[int, int, bytes]]:
    """Take the whole frames out of a buffer; return each one's kind, flags and payload."""
    frames = []
    while len(buffer) >= FRAME_HEAD_BYTES:
        length = int.from_bytes(buffer[:3], "big")
        end = FRAME_HEAD_BYTES + length
        if len(buffer) < end:
            break
        frames.append((buffer[3], buffer[4], bytes(buffer[FRAME_HEAD_BYTES:end])))
        del buffer[:end]
    return frames
