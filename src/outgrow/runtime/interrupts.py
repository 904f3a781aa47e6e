"""Ctrl-C in the middle of a step: our books are closed before anybody is interrupted.

Python runs a signal's handler between any two of its instructions. In a backward pass these are for the most part
ours, and where they are those of a destructor, or of who is told of a death, Python drops what the handler raises. So
while a step is open, a signal that arrives in code of ours waits until that comes to a place where it can be
interrupted.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

# Code that keeps books: beneath it nobody is interrupted.
_OURS = ("outgrow.runtime.", "outgrow.tracing.", "outgrow.session", "outgrow.kinds", "outgrow.learning")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_Handler = Callable[[int, FrameType | None], Any]


class Interrupts:
    """The signals of a session's steps.

    Attributes:
        waiting: whether any arrived and had to wait.
    """

    def __init__(self) -> None:
        self.waiting = False
        self._arrived: list[Callable[[], Any]] = []
        self._usual: dict[int, _Handler] = {}
        self._may_come = self._is_shut = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside is a step. What the program or Python handles waits where it has to, to the end at most."""
        if threading.current_thread() is threading.main_thread():  # handlers run on that one alone
            for number in map(int, _SIGNALS):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._usual[number] = handler
                    signal.signal(number, self._arrive)
        try:
            yield
        finally:
            for number, handler in self._usual.items():
                if signal.getsignal(number) == self._arrive:  # else the program has another one by now
                    signal.signal(number, handler)
            self._usual.clear()
            self.check()

    @contextmanager
    def let_in(self) -> Iterator[None]:
        """Inside nothing is half done, and it may take long: whoever arrives is let in at once."""
        if self._is_shut:
            yield
            return
        self.check()
        before, self._may_come = self._may_come, True
        try:
            yield
        finally:
            self._may_come = before

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Inside everybody waits, whatever takes how long: training state is on its way back."""
        self._is_shut = True
        try:
            yield
        finally:
            self._is_shut = False

    def check(self) -> None:
        """Nothing is half done here: let in who waits. Raises what the program's handlers do."""
        if threading.current_thread() is threading.main_thread():
            while self._arrived:
                handle = self._arrived.pop(0)
                self.waiting = bool(self._arrived)
                handle()

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        handler = self._usual[number]
        if self._may_come or not _is_ours(frame):
            handler(number, frame)
        else:
            self._arrived.append(partial(handler, number, None))
            self.waiting = True


def _is_ours(frame: FrameType | None) -> bool:
    """Whether code of ours runs, or what it called."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(_OURS):
            return True
        frame = frame.f_back
    return False
