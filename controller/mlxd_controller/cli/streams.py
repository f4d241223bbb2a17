"""Standard streams that were closed before the process began (`>&-`) lead nowhere.

Python has None for such a stream, and the system gives its number to the next file that is opened:
a library's word on stderr would go into a socket of ours.
"""

from __future__ import annotations

import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""By their descriptors' numbers."""


def open_closed() -> None:
    """Open each standard stream that is closed on the null device.

    To be called before anything is opened, and before a module that keeps `sys.stderr`.
    """
    for descriptor, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)  # the lowest number free, so most likely this one
        if opened != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - the system's own signature
        setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))
