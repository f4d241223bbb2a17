"""The worker's side: a pool of child processes that answer questions, and are killed when late.

What cannot be interrupted, nor bounded by looking at it, is asked of a child: a library, or a
program that came with a model. What is asked and answered is bytes; users know what they mean.

Invariants:
- A child answers one question at a time. One that is late, or died of its question, is replaced
  when the next question comes; one that died while idle is replaced before it is asked.
- A question that is broken off ends its child: nobody meets the answer to another's question.
- Children are started when needed, and end with the worker: their standard input closes, whatever
  happens to it.
"""

from __future__ import annotations

import subprocess
import threading
from contextlib import suppress

from mlxd_worker.killable.framing import read_message, write_message


class NoAnswer(Exception):
    """A question that no child has answered; what that means is for the user to say."""


class Late(NoAnswer):
    """It took too long, and its child was killed."""


class Died(NoAnswer):
    """Its child ended instead, most often for want of memory or of stack."""


class Pool:
    """As many children as threads ask at once. Any thread."""

    def __init__(self, command: tuple[str, ...]) -> None:
        """Start nothing yet; `command` starts a child, which must `serve` (see `process`)."""
        self._command = command
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._closed = False

    def ask(self, question: bytes, *, limit_s: float) -> bytes:
        """Return a child's answer; waits for it, and where there is none to ask, for its start.

        Raises:
            Late: it took longer than `limit_s`.
            Died: the child ended instead.
        """
        child = self._taken()
        late = threading.Event()

        def end() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            answer = _asked(child, question)
        except BaseException:
            _end(child)
            raise
        finally:
            timer.cancel()
        if answer is not None and not late.is_set():
            self._give_back(child)
            return answer
        _end(child)
        raise Late if late.is_set() else Died

    def close(self) -> None:
        """End the children that wait for a question, and keep none that come back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for child in idle:
            _end(child)

    def _taken(self) -> subprocess.Popen[bytes]:
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.poll() is None:
                    return child
                _end(child)  # it died of something else while nobody looked
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _give_back(self, child: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                return
        _end(child)


def _asked(child: subprocess.Popen[bytes], question: bytes) -> bytes | None:
    """Return what a child answers; None where it has ended instead."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        write_message(child.stdin, question)
    except BrokenPipeError:
        return None
    return read_message(child.stdout)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child, and see it off."""
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # what it did not read
                pipe.close()
    child.wait()
