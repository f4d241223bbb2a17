"""Templates of models that see: some write a message's content only where it is a list of parts.

Runs in the process of `render_process`, as `environment` does. Which form a template wants is asked
of itself, with a conversation of one word.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from mlxd_worker.chat.environment import render

_PROBE: Final = "probecontent"
_PROBE_CHARS_MAX: Final = 1 << 20


@functools.lru_cache(maxsize=8)
def wants_lists(template: str, special: tuple[tuple[str, str], ...] = ()) -> bool:
    """Tell whether a template writes a text that is a part of a list, and not one that is alone."""
    return not _writes(template, special, _PROBE) and _writes(template, special, _as_list(_PROBE))


def list_content(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content, if it is a text, is a list of that one part."""
    content = message["content"]
    return {**message, "content": _as_list(content)} if isinstance(content, str) else message


def _as_list(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _writes(template: str, special: tuple[tuple[str, str], ...], content: object) -> bool:
    variables = {
        "documents": None,
        "tools": None,
        **dict(special),
        "add_generation_prompt": True,
        "messages": [{"role": "user", "content": content}],
    }
    try:
        text = render(template, variables, now_s=0.0, chars_max=_PROBE_CHARS_MAX)
    except Exception:  # noqa: BLE001 - whatever it runs into, it does not write this
        return False
    return _PROBE in text
