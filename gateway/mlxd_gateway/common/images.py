"""Images in requests over HTTP: base64, as a field of its own or in a data URL. Pure.

Invariants:
- No address is ever fetched: an image comes with its request, or is refused by name.
- How long the text may be is checked before it is decoded; what it decodes to is not looked into.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

from mlxd import ContentPart
from mlxd_gateway.common.failures import BadField
from mlxd_shared import config

NO_FETCHING: Final = "no address is fetched: send the image itself"
_DATA_URL: Final = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+);base64,", re.IGNORECASE)
_HEAD_CHARS_MAX: Final = 256


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
    return image_of_base64(url[head.end() :], field, media_type=head["type"].lower())


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
