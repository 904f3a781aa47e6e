"""The family of errors that Outgrow raises. Every one says what happened and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping

from outgrow.units import format_bytes


class OutgrowError(Exception):
    """Base of every error that is Outgrow's own."""


class InvalidBudget(OutgrowError, ValueError):
    """A budget that is no number of bytes: an unknown unit, a sign, a share of nothing."""


class BudgetTooSmall(OutgrowError):
    """No plan keeps the step inside the budget.

    Attributes:
        budget_bytes: the budget that was asked for, in bytes.
        least_bytes: the least budget that can work, in bytes, as far as it is known.
        holders: what takes it, in bytes, by name ("parameters", "saved", ...).
        where: the op at which it is needed, empty when it is not one op.
        exact: False when the step was still being recorded, so that a later op may need yet more.
    """

    def __init__(
        self,
        budget_bytes: int,
        least_bytes: int,
        holders: Mapping[str, int],
        where: str = "",
        *,
        exact: bool = True,
    ) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes
        self.exact = exact
        self.say(least_bytes, holders, where)

    def say(self, least_bytes: int, holders: Mapping[str, int], where: str) -> None:
        """Name another least budget: who raised the error did not know of all that is to come."""
        self.least_bytes, self.holders, self.where = least_bytes, dict(holders), where
        parts = sorted(self.holders.items(), key=lambda item: -item[1])
        taken = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)
        so_far = "" if self.exact else " so far in this step" if where else " that is known of before the first step"
        at = f" at {where}" if where else ""
        self.args = (
            f"the budget of {format_bytes(self.budget_bytes)} is too small: the least budget{so_far} is"
            f" {format_bytes(least_bytes)}"
            f" ({least_bytes} bytes){at}, taken by {taken}. Raise the budget, or lower the batch or input size.",
        )

    def __reduce__(self) -> tuple[object, ...]:
        rebuild = (self.budget_bytes, self.least_bytes, self.holders, self.where)
        return _rebuild_budget_too_small, (*rebuild, self.exact)


def _rebuild_budget_too_small(
    budget_bytes: int, least_bytes: int, holders: Mapping[str, int], where: str, exact: bool
) -> BudgetTooSmall:
    return BudgetTooSmall(budget_bytes, least_bytes, holders, where, exact=exact)


class HostBudgetTooSmall(OutgrowError):
    """The budget of pinned host memory does not even hold the buffers on the way to the disk.

    Attributes:
        budget_bytes: the host budget that was asked for, in bytes.
        least_bytes: the least that can work, in bytes.
        reason: what the system said when it gave no memory; empty where nobody asked it.
    """

    def __init__(self, budget_bytes: int, least_bytes: int, reason: str = "") -> None:
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.reason = reason
        said = f" The system gave no pinned memory: {reason.splitlines()[0]}." if reason else ""
        super().__init__(
            f"the host budget of {format_bytes(budget_bytes)} is too small: what leaves the device passes through"
            f" pinned buffers, which take {format_bytes(least_bytes)} at least.{said} Raise host_budget, or leave it"
            " out for half of the RAM that is free."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return HostBudgetTooSmall, (self.budget_bytes, self.least_bytes, self.reason)


class InvalidPlan(OutgrowError, ValueError):
    """A policy of the program's own made a plan that no step can follow."""


class DeviceOutOfMemory(OutgrowError, MemoryError):
    """The device refused memory although everything that could leave it had left."""


class SpillError(OutgrowError, OSError):
    """The disk tier cannot be used or failed: missing, read-only, full, or an I/O error."""

    def __str__(self) -> str:
        """What went wrong in words; its number is in `errno`."""
        return self.strerror or super().__str__()


class ReportError(OutgrowError, OSError):
    """A report, picture or trace cannot be written: no such folder, no permission, a full disk."""


class SessionError(OutgrowError, RuntimeError):
    """A session used in a way that cannot work: closed, nested, or sharing a model."""


class TraceMismatch(OutgrowError, ValueError):
    """A plan or trace file that does not belong here: wrong format, or made for another trace."""


class TuningError(OutgrowError, ValueError):
    """A question to the tuner that has no answer: no samples, no parameters, a step that cannot be built."""


class UnknownHardware(OutgrowError, ValueError):
    """No hardware profile has this name."""


class UnknownNetwork(OutgrowError, ValueError):
    """No network has this name."""


class UnknownPaper(OutgrowError, ValueError):
    """No paper whose figures are here has this name."""


class UnknownPolicy(OutgrowError, ValueError):
    """No policy has this name."""


class UnknownWorkspace(OutgrowError, ValueError):
    """Convolutions cannot be told to take workspaces of this kind, or not on this device."""


class UnsupportedModel(OutgrowError, ValueError):
    """The model keeps its parameters in a way that Outgrow cannot manage: sharded over processes, say."""


class UnsupportedDevice(OutgrowError, ValueError):
    """The model lives on a device that Outgrow cannot manage."""
