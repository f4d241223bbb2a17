"""What prefix caches have done, for figures and metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mlxd_shared.domain.cache_reasons import CacheReason


@dataclass(slots=True)
class PrefixCounts:
    """What prefix caches have done, since the process began."""

    lookups: Counter[tuple[bool, CacheReason]] = field(default_factory=Counter)
    """By hit and reason."""
    hit_tokens: int = 0
    disk_tokens: int = 0
    """Those of them that came from disk."""
    evictions: int = 0
    evicted_nbytes: int = 0

    @property
    def mean_hit_tokens(self) -> int:
        """How many tokens a prompt had put back on average."""
        return self.hit_tokens // max(self.lookups.total(), 1)
