"""`outgrow limits`: the deepest network or the largest batch that fits a budget on some device."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

from rich.console import Console
from rich.status import Status
from rich.table import Table

from outgrow.cli.job import OptionError, find_listed, make_job
from outgrow.cli.options import Options
from outgrow.cost.hardware import Hardware
from outgrow.cost.measure import this_machine
from outgrow.cost.profiles import find_hardware
from outgrow.cost.workspaces import find_workspace
from outgrow.planning.policies import find as find_policy
from outgrow.tracing.ir import Trace
from outgrow.tuning.limits import Limit, largest
from outgrow.units import format_bytes, format_seconds, parse_bytes

What = Literal["depth", "batch"]

# Families that grow deeper, by the name of their member of some size; the least size first.
_DEPTHS: dict[str, Callable[[int], str]] = {
    "resnet": lambda size: f"resnet-{3 * (44 + size) + 2}",  # SuperNeurons' rule: the third stage alone grows
    "vgg": lambda size: f"vgg-{100 * size - 84}",  # vDNN's: 16, 116, 216, ...
    "gpt": lambda size: f"gpt-{size}x384",
}


def limits(family: str, what: What, options: Options, hardware: str | None, as_json: bool) -> None:
    """Find the limit, and print it: a table, or with `as_json` one line of JSON.

    `hardware` names the device; None is the machine at hand.
    """
    if options.workspace is not None and hardware is None:
        raise OptionError("--workspace is of a GPU: name one with --hardware, or leave it out")
    device = this_machine() if hardware is None else find_hardware(hardware)
    budget = parse_bytes(options.budget or "100%", total_bytes=device.memory_bytes)
    policy = find_policy(options.policy or "auto").name
    name_of, options = _members(family, what, options)
    stderr = Console(stderr=True)
    with stderr.status("Looking") if stderr.is_terminal else nullcontext() as status:

        def trace_of(size: int) -> Trace:
            if isinstance(status, Status):
                status.update(f"{what} {_label(name_of(size), what, size)}: does it fit?")
            batch = size if what == "batch" else options.batch
            return make_job(replace(options, network=name_of(size), batch=batch, budget=None)).untimed_trace()

        found = largest(
            trace_of,
            budget_bytes=budget,
            hardware=device,
            policy=policy,
            workspace=find_workspace(options.workspace),
        )
    result = _figures(family, what, options, device, budget, policy, found, name_of)
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        Console().print(_table(result))


def _members(family: str, what: What, options: Options) -> tuple[Callable[[int], str], Options]:
    """The name of the network of each size, and the options with a network that exists."""
    if what == "batch":
        name = find_listed(family).name
        return (lambda size: name), replace(options, network=name)
    name_of = _DEPTHS.get(family.strip().lower())
    if name_of is None:
        raise OptionError(
            f"{family!r} is no family that grows deeper: give one of {', '.join(_DEPTHS)}, "
            "or --what batch for a network of one depth"
        )
    return name_of, replace(options, network=name_of(1))


def _label(name: str, what: What, size: int) -> str:
    return name if what == "depth" else str(size)


def _figures(
    family: str,
    what: What,
    options: Options,
    device: Hardware,
    budget: int,
    policy: str,
    found: Limit | None,
    name_of: Callable[[int], str],
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "family": family,
        "what": what,
        "hardware": device.name,
        "budget_bytes": budget,
        "policy": policy,
        "workspace": options.workspace,
        "fits": found is not None,
        "network": None,
        "batch": None,
        "predicted_peak_bytes": None,
        "predicted_step_seconds": None,
        "samples_per_second": None,
        "time_ratio": None,
    }
    if found is not None:
        batch = found.size if what == "batch" else options.batch
        prediction = found.prediction
        result |= {
            "network": name_of(found.size),
            "batch": batch,
            "predicted_peak_bytes": prediction.peak_bytes,
            "predicted_step_seconds": prediction.step_seconds,
            "samples_per_second": batch / prediction.step_seconds,
            "time_ratio": prediction.step_seconds / prediction.plain_step_seconds,
        }
    return result


def _table(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['family']}: the largest {result['what']} that fits", show_header=False)
    table.add_row("device", result["hardware"])
    table.add_row("budget", format_bytes(result["budget_bytes"]))
    table.add_row("policy", result["policy"])
    if result["workspace"] is not None:
        table.add_row("workspace", result["workspace"])
    if not result["fits"]:
        table.add_row("", "not even the smallest fits")
        return table
    table.add_row("network", result["network"])
    table.add_row("batch", str(result["batch"]))
    table.add_row("predicted peak", format_bytes(result["predicted_peak_bytes"]))
    table.add_row("time of a step (estimate)", format_seconds(result["predicted_step_seconds"]))
    table.add_row("samples per second", f"{result['samples_per_second']:.1f}")
    table.add_row("time against enough memory", f"{result['time_ratio']:.2f} x")
    return table
