"""Ctrl-C in the middle of a step: our books are closed before anybody is interrupted.

Python runs a signal's handler between any two of its instructions. In a backward pass these are for the most part
ours, and where they are those of a destructor, or of who is told of a death, Python drops what the handler raises. So
while a step is open, a signal that arrives in code of ours waits until that comes to a place where it can be
interrupted.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Code that keeps books: beneath it nobody is interrupted. All else of a session is called by these. So is planning,
# which may take long, and lets in who waits.
_OURS = ("outgrow.runtime.", "outgrow.tracing.", "outgrow.session.session", "outgrow.session.kind")
# Those by which programs are ended, timed, or told that they will be ended.
_SIGNALS = tuple(
    map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2))
)

_Handler = Callable[[int, FrameType | None], Any]


class Interrupts:
    """The signals of a session's steps.

    Attributes:
        waiting: whether any arrived and had to wait.
    """

    def __init__(self) -> None:
        self.waiting = False
        self._arrived: list[int] = []
        # The program's handlers, or Python's. They stay known: a program may put ours back when the step is over.
        self._usual: dict[int, _Handler] = {}
        self._open_at: FrameType | None = None
        self._is_shut = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside is a step. What the program or Python handles waits where it has to, to the end at most."""
        if _is_main_thread():  # handlers run on that one alone
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler) and handler != self._arrive:
                    self._usual[number] = handler
                    signal.signal(number, self._arrive)
        try:
            yield
        finally:
            if _is_main_thread():
                for number in _SIGNALS:
                    if signal.getsignal(number) == self._arrive:  # else the program has another one by now
                        signal.signal(number, self._usual[number])
            self.check()

    @contextmanager
    def let_in(self) -> Iterator[None]:
        """Inside nothing of the caller's is half done, and it may take long: whoever arrives is let in at once.

        Not where code of ours runs that is called from there.
        """
        if self._is_shut:
            yield
            return
        self.check()
        before, self._open_at = self._open_at, sys._getframe(2)
        try:
            yield
        finally:
            self._open_at = before

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Inside everybody waits, whatever takes how long: nobody could be told, or training state is on its way."""
        before, self._is_shut = self._is_shut, True
        try:
            yield
        finally:
            self._is_shut = before

    def check(self) -> None:
        """Nothing is half done here: let in who waits. Raises what the program's handlers do."""
        if _is_main_thread():
            while self._arrived:
                number = self._arrived.pop(0)
                self.waiting = bool(self._arrived)
                self._usual[number](number, sys._getframe())

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        if self._has_to_wait(frame):
            self._arrived.append(number)
            self.waiting = True
        else:
            self._usual[number](number, frame)

    def _has_to_wait(self, frame: FrameType | None) -> bool:
        """Whether code of ours runs, or has called what runs."""
        while frame is not None and frame is not self._open_at:
            if str(frame.f_globals.get("__name__", "")).startswith(_OURS):
                return True
            frame = frame.f_back
        return False


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
