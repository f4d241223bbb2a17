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


class Stopped(NoAnswer):
    """Whoever asked wants no answer any more."""


class Stop:
    """Ends a question that another thread asks, begun or not. Any thread."""

    def __init__(self) -> None:
        """Let it be asked."""
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_set = False

    def set(self) -> None:
        """Kill the child that looks for the answer; let none begin."""
        with self._lock:
            self._is_set = True
            if self._child is not None:
                self._child.kill()

    def check(self) -> None:
        """Raise where it is set.

        Raises:
            Stopped: it is.
        """
        with self._lock:
            if self._is_set:
                raise Stopped

    def watch(self, child: subprocess.Popen[bytes]) -> None:
        """Know whom to kill.

        Raises:
            Stopped: it is set already.
        """
        with self._lock:
            if self._is_set:
                raise Stopped
            self._child = child

    def forget(self) -> None:
        """Kill nobody from here on."""
        with self._lock:
            self._child = None


class Pool:
    """As many children as threads ask at once. Any thread."""

    def __init__(
        self, command: tuple[str, ...], *, first: bytes | None = None, first_s: float = 0.0
    ) -> None:
        """Start nothing yet; `command` starts a child, which must `serve` (see `process`).

        first: what every child is asked before anything else, for at most `first_s`; its answer is
        nobody's.
        """
        self._command = command
        self._first = first
        self._first_s = first_s
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._closed = False

    def ask(self, question: bytes, *, limit_s: float, stop: Stop | None = None) -> bytes:
        """Return a child's answer; waits for it, and where there is none to ask, for its start.

        Raises:
            Late: it took longer than `limit_s`.
            Died: the child ended instead.
            Stopped: `stop` was set.
        """
        stop = stop or Stop()
        stop.check()
        child, is_new = self._taken()
        if is_new and self._first is not None:
            self._answer(child, self._first, limit_s=self._first_s, stop=stop)
        answer = self._answer(child, question, limit_s=limit_s, stop=stop)
        self._give_back(child)
        return answer

    def _answer(
        self, child: subprocess.Popen[bytes], question: bytes, *, limit_s: float, stop: Stop
    ) -> bytes:
        """Return an answer of this child, which is ended where there is none."""
        late = threading.Event()

        def end() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            stop.watch(child)
            answer = _asked(child, question)
            stop.forget()
            stop.check()
        except BaseException:
            stop.forget()
            _end(child)
            raise
        finally:
            timer.cancel()
        if answer is not None and not late.is_set():
            return answer
        _end(child)
        raise Late if late.is_set() else Died

    def rest(self) -> None:
        """End the children that wait for a question; the next one starts another."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            _end(child)

    def close(self) -> None:
        """End the children that wait for a question, and keep none that come back."""
        with self._lock:
            self._closed = True
        self.rest()

    def _taken(self) -> tuple[subprocess.Popen[bytes], bool]:
        """Return a child, and whether it has been asked nothing yet."""
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.poll() is None:
                    return child, False
                _end(child)  # it died of something else while nobody looked
        child = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return child, True

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
