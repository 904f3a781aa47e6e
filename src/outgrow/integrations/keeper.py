"""Opens and ends a session and its steps for callbacks, which see the start and the end of a step in two calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import torch

from outgrow.errors import SessionError
from outgrow.planning.policies import Policy
from outgrow.session import Session, Step


class SessionOptions(TypedDict, total=False):
    """What `outgrow.Session` takes besides model, optimizer and budget; meanings and defaults are the session's."""

    policy: str | Policy
    host_budget: int | str | None
    spill_dir: str | Path | None
    allow_tmpfs: bool
    least_moved_bytes: int


class StepKeeper:
    """A session for each training, and the step that is open in it.

    `begin` and `end` stand for the two ends of `with session.step():`. What was not ended, because a trainer does not
    report an error, say, is ended by `open` or `close` at the latest.
    """

    def __init__(self, budget: int | str, options: SessionOptions) -> None:
        """Nothing is opened yet. `budget` is in bytes, or a string as `outgrow.Session` reads it."""
        self._budget = budget
        self._options = options
        self._step: Step | None = None
        self.session: Session | None = None

    @property
    def in_step(self) -> bool:
        """Whether a step is open."""
        return self._step is not None

    def open(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """A training begins: open a session over it.

        Raises:
            OutgrowError: see `outgrow.Session`.
        """
        self.close(SessionError("another training began: this one's last step was never ended"))
        self.session = Session(model, optimizers, budget=self._budget, **self._options)

    def begin(self) -> None:
        """A step begins.

        Raises:
            SessionError: no training was begun, or a step is open.
        """
        if self.session is None:
            raise SessionError("a step began before its training: give the callback to the trainer before it trains")
        if self._step is not None:
            raise SessionError("a step is open already: steps of a session do not nest")
        step = self.session.step()
        step.__enter__()
        self._step = step

    def end(self, error: BaseException | None = None) -> None:
        """The step ends, with the error that ended it if there is one; harmless where none is open."""
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None if error is None else type(error), error, None)

    def close(self, error: BaseException | None = None) -> None:
        """The training ends, with the error that ended it if there is one; harmless where none is open.

        The session stays where it is, closed: its figures can still be read.
        """
        try:
            self.end(error)
        finally:
            if self.session is not None:
                self.session.__exit__(None if error is None else type(error), error, None)
