"""The door for a router in front: models as engines of `vllm.grpc.engine`, each at a port.

Nothing here but this file and `services` may be imported without the extra.
"""

from __future__ import annotations

from importlib.util import find_spec

from mlxd_shared.domain.errors import InvalidRequest

NEEDS = "smg_grpc_proto"


def check_usable(package: str = NEEDS) -> None:
    """Refuse to open the door without the extra, which brings `package`.

    Raises:
        InvalidRequest: naming `router`.
    """
    if find_spec(package) is None:
        raise InvalidRequest.of("router", "needs the extra router: pip install 'mlxd[router]'")
