"""The worker's side: a pool of child processes that answer questions, and are killed when late.

What cannot be interrupted, nor bounded by looking at it, is asked of a child: a library, or a
program that came with a model. What is asked and answered is bytes; users know what they mean.

Invariants:
- A child answers one question at a time. One that is late, or died of its question, is replaced
  when the next question comes; one that died while idle is replaced before it is asked.
- A question that is broken off ends its child: nobody meets the answer to another's question.
- One that was killed, for whatever question, is asked nothing more (`questions`).
- Children are started when needed, and end with the worker: their standard input closes, whatever
  happens to it. A pool that is closed has none, and starts none.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from mlxd_worker.killable.process import read_message, write_message
from mlxd_worker.killable.questions import Closed, Died, Late, Stop, Turn, Unready


@dataclass(frozen=True, slots=True)
class First:
    """What every child is asked before anything else."""

    question: Callable[[], bytes]
    """Made anew for each child: it may be large, and is held for no longer."""
    limit_s: float
    check: Callable[[bytes], object]
    """Raises where the answer will not do; the child is ended then, and the error is the user's."""


class Pool:
    """As many children as threads ask at once. Any thread."""

    def __init__(
        self,
        command: tuple[str, ...],
        *,
        first: First | None = None,
        timer: Callable[[float, Callable[[], None]], threading.Timer] = threading.Timer,
    ) -> None:
        """Start nothing yet; `command` starts a child, which must `serve` (see `process`).

        timer: what calls a function after so many seconds.
        """
        self._command = command
        self._first = first
        self._timer = timer
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[bytes]] = set()
        """Those that were started and not seen off, the idle ones among them."""
        self._idle: list[subprocess.Popen[bytes]] = []
        self._closed = False

    def ask(self, question: bytes, *, limit_s: float, stop: Stop | None = None) -> bytes:
        """Return a child's answer; waits for it, and where there is none to ask, for its start.

        Raises:
            Late: it took longer than `limit_s`.
            Died: the child ended instead.
            Unready: no child could do what it was told first.
            Stopped: `stop` was set.
            Closed: the pool is, or was before the answer came.
        """
        stop = stop or Stop()
        stop.check()
        child, is_new = self._take_child()
        if is_new and self._first is not None:
            self._begin(child, self._first, stop)
        answer = self._answer(child, question, limit_s=limit_s, stop=stop)
        self._give_back(child)
        return answer

    def _begin(self, child: subprocess.Popen[bytes], first: First, stop: Stop) -> None:
        """Send a child the first message; end it if that fails."""
        try:
            first.check(self._answer(child, first.question(), limit_s=first.limit_s, stop=stop))
        except (Late, Died) as error:
            raise Unready(is_late=isinstance(error, Late)) from error
        except BaseException:
            self._see_off(child)
            raise

    def _answer(
        self, child: subprocess.Popen[bytes], question: bytes, *, limit_s: float, stop: Stop
    ) -> bytes:
        """Return this child's answer; end the child if there is none."""
        turn = Turn(child)
        timer = self._timer(limit_s, turn.end_late)
        try:
            timer.start()
            stop.watch(child)
            answer = _ask_child(child, question)
            turn.finish()
            stop.forget()
            stop.check()
        except BaseException:
            turn.finish()
            stop.forget()
            self._see_off(child)
            raise
        finally:
            timer.cancel()
        if answer is not None and not turn.is_late:
            return answer
        self._see_off(child)
        if turn.is_late:
            raise Late
        raise Closed if self._closed else Died

    def rest(self) -> None:
        """End the children that wait for a question; the next one starts another."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            self._see_off(child)

    def close(self) -> None:
        """End all children, whoever asks them, and start none any more; waits until they are gone.

        They are killed, so it takes no longer than the system does to end them.
        """
        with self._lock:
            self._closed = True
            children = tuple(self._children)
        for child in children:
            child.kill()
        self.rest()
        for child in children:
            child.wait()  # one that is asked is seen off by whoever asks

    def _take_child(self) -> tuple[subprocess.Popen[bytes], bool]:
        """Return a child, and whether it has been asked nothing yet."""
        dead: list[subprocess.Popen[bytes]] = []
        try:
            with self._lock:  # while one is started, too: `close` must know of it
                if self._closed:
                    raise Closed
                while self._idle:
                    child = self._idle.pop()
                    if child.poll() is None:
                        return child, False
                    dead.append(child)  # of something else, while nobody looked
                child = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                self._children.add(child)
                return child, True
        finally:
            for child in dead:
                self._see_off(child)

    def _give_back(self, child: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                return
        self._see_off(child)

    def _see_off(self, child: subprocess.Popen[bytes]) -> None:
        """End a child that nobody asks."""
        _end(child)
        with self._lock:
            self._children.discard(child)


def _ask_child(child: subprocess.Popen[bytes], question: bytes) -> bytes | None:
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
