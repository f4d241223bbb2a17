"""The processes in which grammars are tried out (`trial`): started when needed, killed when late.

Invariants:
- A process tries one grammar at a time. One that is late, or died of what it was given, is
  replaced when the next grammar comes.
- Processes end with the worker: their standard input closes, whatever happens to it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Final

COMMAND: Final = (sys.executable, "-m", "mlxd_worker.constraints.trial")


class TrialError(Exception):
    """A grammar that did not survive its trial; the text says what became of it."""


class Trials:
    """A pool of such processes; as many as threads run trials at once. Any thread."""

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        """Start nothing yet."""
        self._command = command
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._closed = False

    def run(self, source: str, *, limit_s: float) -> str:
        """Return why the library refuses a grammar; an empty text where it is good.

        Raises:
            TrialError: it took longer than `limit_s`, or ended the process.
        """
        process = self._taken()
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            answer = _asked(process, source)
        except BaseException:
            _end(process)
            raise
        finally:
            timer.cancel()
        if answer is not None and not late.is_set():
            self._give_back(process)
            return answer
        _end(process)
        if late.is_set():
            raise TrialError(f"not compiled within {limit_s:g} s")
        raise TrialError("takes more memory, or a deeper stack, than there is for it")

    def close(self) -> None:
        """End the processes that wait for work, and keep none that come back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            _end(process)

    def _taken(self) -> subprocess.Popen[bytes]:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                _end(process)  # it died of something else while nobody looked
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _give_back(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return
        _end(process)


def _asked(process: subprocess.Popen[bytes], source: str) -> str | None:
    """Return what a process answers; None where it has ended instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    text = source.encode()
    try:
        process.stdin.write(b"%d\n" % len(text))
        process.stdin.write(text)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        return None
    answer: str = json.loads(line)
    return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, and see it off."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # what it did not read
                pipe.close()
    process.wait()
