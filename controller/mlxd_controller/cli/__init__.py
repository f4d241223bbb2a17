"""The command line, `mlxd`. Output goes to stdout, everything about the output to stderr.

Exit codes, the same for every command:

    0    done
    1    the server or the work failed
    2    bad usage, or a request that the server refuses (the message names the field)
    3    no such model
    4    no server answers at the address
    5    the model does not fit (never, or not now)
    130  interrupted (Ctrl-C); the request was cancelled
    141  the reader of our output closed it
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType

# gRPC's handlers around fork() start its threads again in the child, where they crash at times
# before the child becomes a worker (seen in 2 of 60 starts under uvloop, whose fork() runs them).
# A process that only forks to exec has no use for them. gRPC reads this when it is imported.
NO_FORK_HANDLERS = ("GRPC_ENABLE_FORK_SUPPORT", "0")
# gRPC writes to stderr when a server goes away, which commands report themselves, and which would
# break a full-screen view. Set the variable to see those lines.
NO_GRPC_LOG = ("GRPC_VERBOSITY", "ERROR")
INTERRUPTED = 130
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""By their descriptors' numbers."""


def main() -> None:
    """Run the command line and end the process with its exit code."""
    # Until a command runs there is nothing to end in good order, and no place for an exception:
    # one that is raised in the midst of an import is a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_at_once)
    os.environ.setdefault(*NO_FORK_HANDLERS)
    os.environ.setdefault(*NO_GRPC_LOG)
    open_closed()  # before the modules below open files, or keep a stream
    # What modules make stays: looking for garbage in it took a twentieth of a short command's time.
    gc.disable()
    # Imported here, so that importing this package (for its docstring, or the demo) stays cheap.
    from mlxd_controller.cli.app import app  # noqa: PLC0415
    from mlxd_controller.cli.output import run_guarded  # noqa: PLC0415

    gc.freeze()
    gc.enable()
    run_guarded(app)


def leave_at_once(_number: int, _frame: FrameType | None) -> None:
    """End the process as Ctrl-C ends a command that has not begun."""
    os._exit(INTERRUPTED)


def take_interrupts() -> None:
    """Have Ctrl-C be a KeyboardInterrupt from now on, which a command knows how to handle."""
    if signal.getsignal(signal.SIGINT) is leave_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def open_closed() -> None:
    """Open each standard stream that the process began without (`>&-`) on the null device.

    Python has None for such a stream, and the system gives its number to the next file that is
    opened: a library's word on stderr would go into a socket of ours.
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
