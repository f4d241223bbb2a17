"""Workers on several machines: an agent on each, and a launcher and a probe over their agents.

Only `ray_nodes` may be imported with the extra alone; everything else knows no Ray.
"""

from __future__ import annotations

from importlib.util import find_spec

from mlxd_shared.domain.errors import InvalidRequest

NEEDS = "ray"


def check_usable(package: str = NEEDS) -> None:
    """Refuse to join a fleet without the extra, which brings `package`.

    Raises:
        InvalidRequest: naming `fleet`.
    """
    if find_spec(package) is None:
        raise InvalidRequest.of("fleet", "needs the extra fleet: pip install 'mlxd[fleet]'")
