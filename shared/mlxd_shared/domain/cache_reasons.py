"""Why no more of a prompt could be reused; the same words in logs, metrics and usage."""

from __future__ import annotations

import enum


class CacheReason(enum.StrEnum):
    """What kept the prefix cache from giving more; see types.proto."""

    NONE = "none"
    """Nothing: the rest of the prompt was never cached."""
    DIVERGED = "diverged"
    """What was cached goes on with other tokens."""
    NON_TRIMMABLE_DIVERGENCE = "non_trimmable_divergence"
    """More tokens matched, but no layer state of that length was kept."""
    EVICTED = "evicted"
    """More was cached once and had to make room."""
