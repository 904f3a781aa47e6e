"""The figures of a step, as people and programs read them."""

from __future__ import annotations

from dataclasses import dataclass

from outgrow.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Summary:
    """What the last step was predicted and measured to be. Sizes in bytes, times in seconds.

    Predictions are None for a step that had no plan yet. `measured_peak_bytes` is the highest of live bytes; in
    steps that need no watching (the plan keeps everything) it is the one of the recorded step, which they repeat.
    `oom_retries` and `replans` count since the session began.
    """

    policy: str
    budget_bytes: int
    predicted_peak_bytes: int | None
    measured_peak_bytes: int
    predicted_step_seconds: float | None
    step_seconds: float
    kept_bytes: int
    offloaded_bytes: int
    recomputed_bytes: int
    stall_seconds: float
    recompute_seconds: float
    plan_seconds: float
    oom_retries: int
    replans: int

    def __str__(self) -> str:
        planned_peak = "-" if self.predicted_peak_bytes is None else format_bytes(self.predicted_peak_bytes)
        planned_time = "-" if self.predicted_step_seconds is None else format_seconds(self.predicted_step_seconds)
        rows = (
            ("policy", self.policy),
            ("budget", format_bytes(self.budget_bytes)),
            ("peak", f"{format_bytes(self.measured_peak_bytes)} (predicted {planned_peak})"),
            ("step", f"{format_seconds(self.step_seconds)} (predicted {planned_time})"),
            ("kept", format_bytes(self.kept_bytes)),
            ("offloaded", format_bytes(self.offloaded_bytes)),
            (
                "recomputed",
                f"{format_bytes(self.recomputed_bytes)} in {format_seconds(self.recompute_seconds)}",
            ),
            ("stall", format_seconds(self.stall_seconds)),
            ("planning", f"{format_seconds(self.plan_seconds)}, {self.replans} replans"),
            ("page faults", str(self.oom_retries)),
        )
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
