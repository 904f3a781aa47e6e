"""Outgrow trains networks that outgrow the memory of one device.

Give it a PyTorch model, an optimizer and a budget in bytes: training stays inside the budget, with gradients equal
to plain PyTorch's to the bit. What is listed here is public; nothing else is promised.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outgrow.api import plan as plan
    from outgrow.api import report as report
    from outgrow.cost.hardware import Hardware as Hardware
    from outgrow.cost.profiles import find_hardware as find_hardware
    from outgrow.errors import BudgetTooSmall as BudgetTooSmall
    from outgrow.errors import DeviceOutOfMemory as DeviceOutOfMemory
    from outgrow.errors import HostBudgetTooSmall as HostBudgetTooSmall
    from outgrow.errors import InvalidBudget as InvalidBudget
    from outgrow.errors import InvalidPlan as InvalidPlan
    from outgrow.errors import OutgrowError as OutgrowError
    from outgrow.errors import ReportError as ReportError
    from outgrow.errors import SessionError as SessionError
    from outgrow.errors import SpillError as SpillError
    from outgrow.errors import TraceMismatch as TraceMismatch
    from outgrow.errors import TuningError as TuningError
    from outgrow.errors import UnknownHardware as UnknownHardware
    from outgrow.errors import UnknownNetwork as UnknownNetwork
    from outgrow.errors import UnknownPaper as UnknownPaper
    from outgrow.errors import UnknownPolicy as UnknownPolicy
    from outgrow.errors import UnknownWorkspace as UnknownWorkspace
    from outgrow.errors import UnsupportedDevice as UnsupportedDevice
    from outgrow.errors import UnsupportedModel as UnsupportedModel
    from outgrow.planning.plan import Plan as Plan
    from outgrow.planning.policies import policies as policies
    from outgrow.planning.simulate import Prediction as Prediction
    from outgrow.session import Session as Session
    from outgrow.summary import Summary as Summary
    from outgrow.tracing.capture import TrainingStep as TrainingStep
    from outgrow.tracing.capture import trace as trace
    from outgrow.tracing.ir import Trace as Trace
    from outgrow.tuning.answer import Candidate as Candidate
    from outgrow.tuning.answer import Tuning as Tuning
    from outgrow.tuning.noise import GradientNoise as GradientNoise
    from outgrow.tuning.noise import NoiseScale as NoiseScale
    from outgrow.tuning.tuner import tune as tune

__version__ = "0.1.0"

# Where each public name lives. They are imported when they are first used: plans can then be read, compared and
# simulated where there is no torch.
_HOMES = {
    "BudgetTooSmall": "errors",
    "DeviceOutOfMemory": "errors",
    "Candidate": "tuning.answer",
    "GradientNoise": "tuning.noise",
    "Hardware": "cost.hardware",
    "HostBudgetTooSmall": "errors",
    "InvalidBudget": "errors",
    "InvalidPlan": "errors",
    "NoiseScale": "tuning.noise",
    "OutgrowError": "errors",
    "Plan": "planning.plan",
    "Prediction": "planning.simulate",
    "ReportError": "errors",
    "Session": "session",
    "SessionError": "errors",
    "SpillError": "errors",
    "Summary": "summary",
    "Trace": "tracing.ir",
    "TraceMismatch": "errors",
    "TrainingStep": "tracing.capture",
    "Tuning": "tuning.answer",
    "TuningError": "errors",
    "UnknownHardware": "errors",
    "UnknownNetwork": "errors",
    "UnknownPaper": "errors",
    "UnknownPolicy": "errors",
    "UnknownWorkspace": "errors",
    "UnsupportedDevice": "errors",
    "UnsupportedModel": "errors",
    "find_hardware": "cost.profiles",
    "plan": "api",
    "policies": "planning.policies",
    "report": "api",
    "trace": "tracing.capture",
    "tune": "tuning.tuner",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
