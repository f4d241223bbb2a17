"""Images in requests over HTTP: base64, as a field of its own or in a data URL. Pure.

Invariants:
- Here no address is fetched: an image is in its request, or is refused by name. What the operator
  allows is fetched before (`fetching`), and is then in the request.
- How long the text may be is checked before it is decoded; what it decodes to is not looked into.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import ClassVar, Final

import msgspec

from mlxd import ContentPart
from mlxd_gateway.common.failures import BadField
from mlxd_gateway.common.fates import structs_in
from mlxd_shared import config
from mlxd_shared.security.image_urls import is_link

NO_FETCHING: Final = "no address is fetched unless --image-urls names its host: send the image"
URL_HELP: Final = "a data URL, or http(s) to a host that `--image-urls` names"
"""What becomes of an image's address."""
UNSAID: Final = "application/octet-stream"
"""The type of a file that tells itself what it is."""
_DATA_URL: Final = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+);base64,", re.IGNORECASE)
_HEAD_CHARS_MAX: Final = 256


class Linked(msgspec.Struct):
    """A part of a request that may have the address of an image."""

    link_field: ClassVar[str] = "url"
    """The field that has it."""

    @property
    def link(self) -> str:
        """The address; empty: there is none."""
        text: str | None = getattr(self, self.link_field)
        return text or ""

    @link.setter
    def link(self, text: str) -> None:
        setattr(self, self.link_field, text)


def links_in(request: msgspec.Struct) -> list[tuple[str, Linked]]:
    """Return what of a request has an address to fetch, each behind the path of its field."""
    return [
        (f"{path}.{struct.link_field}", struct)
        for path, struct in structs_in(request)
        if isinstance(struct, Linked) and is_link(struct.link)
    ]


def write_data_url(content: bytes) -> str:
    """Return a data URL of an image."""
    return f"data:{UNSAID};base64,{base64.b64encode(content).decode()}"


def image_of_url(url: str, field: str) -> ContentPart:
    """Return the image that a data URL holds.

    Raises:
        BadField: another URL, no base64, or too long; names `field`.
    """
    head = _DATA_URL.match(url[:_HEAD_CHARS_MAX])
    if head is None:
        if url[:5].lower() == "data:":
            raise BadField(field, "is no data URL of an image in base64")
        raise BadField(field, f"is no data URL, and {NO_FETCHING}")
    kind = head["type"].lower()
    media_type = "" if kind == UNSAID else kind
    return image_of_base64(url[head.end() :], field, media_type=media_type)


def image_of_base64(text: str, field: str, *, media_type: str = "") -> ContentPart:
    """Return the image that base64 spells.

    Raises:
        BadField: it is none, or too long; names `field`.
    """
    most = -(-config.IMAGE_BYTES_MAX // 3) * 4
    if len(text) > most:
        raise BadField(field, f"at most {config.IMAGE_BYTES_MAX} bytes of an image")
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadField(field, f"is no base64: {error}") from error
    if not content:
        raise BadField(field, "has no bytes")
    return ContentPart(image=content, media_type=media_type)
