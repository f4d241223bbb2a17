"""Optional parts of an installation, refused by name where what they need is missing."""

from __future__ import annotations

from importlib.util import find_spec

from mlxd_shared.domain.errors import InvalidRequest


def check_extra(field: str, extra: str, *packages: str) -> None:
    """Refuse what needs an extra that is not installed: it brings `packages`, which are looked for.

    Raises:
        InvalidRequest: naming `field`, with what to install.
    """
    if not all(map(_is_there, packages)):
        raise InvalidRequest.of(field, f"needs the extra {extra}: pip install 'mlxd[{extra}]'")


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
