"""What a session is opened with, made sense of or refused before any work starts."""

from __future__ import annotations

import os
from collections.abc import Sequence

import psutil
import torch
from torch.nn.parameter import UninitializedParameter

from outgrow.cost.workspaces import Workspace, find_workspace
from outgrow.errors import SessionError, UnknownWorkspace, UnsupportedDevice
from outgrow.planning.plan import Plan
from outgrow.units import format_bytes, parse_bytes

# Pinned memory that a session on a GPU takes at most, as a share of the RAM that is free, if nobody says.
_HOST_SHARE = 0.5
# With this PyTorch's allocator keeps no count, and knows no limit.
_NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"


def refuse_what_is_neither(models: Sequence[object], optimizers: Sequence[object]) -> None:
    """Raise a SessionError for what is no model whose sizes are known, or no optimizer."""
    for item in models:
        if not isinstance(item, torch.nn.Module):
            raise SessionError(f"model is {type(item).__name__}: give a torch.nn.Module, or a sequence of them")
        if any(isinstance(parameter, UninitializedParameter) for parameter in item.parameters()):
            raise SessionError("the model has lazy layers: run one forward pass first, so that its sizes are known")
    for item in optimizers:
        if not isinstance(item, torch.optim.Optimizer):
            raise SessionError(
                f"optimizer is {type(item).__name__}: give a torch.optim.Optimizer, not its parameters"
            )


def refuse_foreign_plan(plan: Plan | None, budget_bytes: int, device: torch.device) -> None:
    """Raise a SessionError for what is no plan, or one for a larger budget or another kind of device."""
    if plan is None:
        return
    if not isinstance(plan, Plan):
        raise SessionError(f"plan is {type(plan).__name__}: give a Plan, such as outgrow.Plan.load(path) reads")
    if plan.budget_bytes > budget_bytes:
        raise SessionError(
            f"the plan is for a budget of {format_bytes(plan.budget_bytes)}, and the session has"
            f" {format_bytes(budget_bytes)}: raise the budget, or make a plan for it"
        )
    if not plan.problem.trace.device.startswith(device.type):
        raise SessionError(
            f"the plan is for a step on {plan.problem.trace.device}, and the model is on {device}: make a plan for it"
        )


def device_of(models: Sequence[torch.nn.Module]) -> torch.device:
    """The one device that all parameters are on.

    Raises:
        SessionError: there are no parameters.
        UnsupportedDevice: they are on several devices, or on one of another kind, or whose memory nobody counts.
    """
    devices = {parameter.device for model in models for parameter in model.parameters()}
    if not devices:
        raise SessionError("the model has no parameters: there is nothing to train")
    device = next(iter(devices))
    if len(devices) > 1 or device.type not in ("cpu", "cuda"):
        names = ", ".join(sorted(str(device) for device in devices))
        raise UnsupportedDevice(f"the model is on {names}: this version trains on the CPU or on one CUDA device")
    if device.type == "cuda" and _NO_CACHING in os.environ:
        raise UnsupportedDevice(
            f"{_NO_CACHING} is set: PyTorch counts no memory of a GPU then, and no budget can be kept. Unset it"
            " before the program starts"
        )
    return device


def memory_of(device: torch.device) -> int:
    """What the device has in all, in bytes."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().total)
    return int(torch.cuda.mem_get_info(device)[1])


def workspace_of(device: torch.device, workspace: str | None) -> Workspace | None:
    """How convolutions get workspaces; None: as without a session.

    Raises:
        UnknownWorkspace: there are no such workspaces, or the model is on the CPU.
    """
    kind = find_workspace(workspace)
    if kind is not None and device.type == "cpu":
        raise UnknownWorkspace(
            f"workspace={workspace!r} is for models on a GPU: this one is on the CPU, where a convolution has one "
            "way to run, and what oneDNN holds for it is kept inside the budget as it is. Leave workspace out"
        )
    return kind


def host_bytes_of(device: torch.device, wanted: int | str | None) -> int | None:
    """The budget of pinned memory; None on a CPU, whose memory that would be.

    Raises:
        SessionError: there is a budget for a model on the CPU.
        InvalidBudget: it cannot be read.
    """
    if device.type == "cpu":
        if wanted is not None:
            raise SessionError(
                "host_budget is for models on a GPU: this one is on the CPU, where RAM is the device that `budget` is"
                " for, and what leaves it goes to the disk. Leave host_budget out"
            )
        return None
    memory = psutil.virtual_memory()
    return int(memory.available * _HOST_SHARE) if wanted is None else parse_bytes(wanted, total_bytes=memory.total)
