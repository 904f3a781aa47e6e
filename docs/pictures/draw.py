"""Draws the pictures of how-it-works.md from a plan: a ResNet-18 on a Titan X, at 60% of its plain peak.

    python docs/pictures/draw.py

Needs matplotlib. Nothing is trained. The device is a profile, so that every machine draws the same.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import outgrow
from outgrow.cli.job import make_job
from outgrow.cli.options import Options
from outgrow.planning.plan import Plan
from outgrow.tracing.ir import Phase
from outgrow.tracing.liveness import plain_profile

FOLDER = Path(__file__).parent
GIB = 2**30
SHARE = 0.6
KEPT, AWAY, GONE = "#4c72b0", "#dd8452", "#55a868"


def main() -> None:
    """Make the plan, and draw it twice."""
    matplotlib.rcParams["svg.hashsalt"] = "outgrow"  # the same file each time
    matplotlib.rcParams["font.size"] = 10
    hardware = outgrow.find_hardware("titan-x")
    job = make_job(Options("resnet-18", batch=64))
    trace = job.fake_trace(hardware)
    peak = plain_profile(trace).peak_bytes
    plan = job.plan(trace, int(SHARE * peak), hardware)
    _draw(_memory, plan, "memory.svg")
    _draw(_decisions, plan, "decisions.svg")


def _draw(what: Any, plan: Plan, name: str) -> None:
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    what(axes, plan)
    axes.set_xlabel("operators of the step, in order")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FOLDER / name, metadata={"Date": None})
    plt.close(figure)


def _memory(axes: Any, plan: Plan) -> None:
    """Live bytes at each op: plain, under the plan, and the budget."""
    trace = plan.problem.trace
    free = outgrow.plan(trace, budget=1 << 50, policy="keep", hardware=plan.problem.hardware).simulate()
    ops = range(len(free.curve))
    axes.plot(ops, [nbytes / GIB for nbytes in free.curve], color="0.45", label="plain PyTorch")
    axes.plot(ops, [nbytes / GIB for nbytes in plan.simulate().curve], color=KEPT, label="under the budget")
    axes.axhline(plan.budget_bytes / GIB, color="crimson", linestyle="--", linewidth=1, label="budget")
    first_back = next(number for number, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD)
    axes.axvline(first_back, color="0.8", linewidth=1, zorder=0)
    axes.set_ylim(0)
    axes.text(first_back, 0, " backward, optimizer", va="bottom", color="0.4")
    axes.text(first_back, 0, "forward ", va="bottom", ha="right", color="0.4")
    axes.set_ylabel("live GiB")
    axes.legend(frameon=False, loc="upper right")


def _decisions(axes: Any, plan: Plan) -> None:
    """A bar for each saved value, as thick as it is large: where it is between its two uses."""
    problem = plan.problem
    offloads = {item.value: item for item in plan.offloads}
    drops = {item.value: item for item in plan.recomputes}
    items = [item for item in problem.candidates if item.nbytes > 2**20]
    tops = [0.0, *accumulate(item.nbytes / GIB for item in items)]

    def op(tick: int) -> int:
        return problem.tick_ops[tick]

    for item, top in zip(items, tops, strict=False):
        parts = [(op(item.first_pack), op(item.first_unpack), KEPT)]
        if item.value in offloads:
            move = offloads[item.value]
            back = item.first_unpack if move.in_tick < 0 else move.in_tick
            parts.append((op(move.out_tick), op(back), AWAY))
        elif item.value in drops:
            parts.append((op(drops[item.value].drop_tick), op(item.first_unpack), GONE))
        for start, end, color in parts:
            height = item.nbytes / GIB
            axes.broken_barh([(start, max(1, end - start))], (top, height * 0.9), color=color)
    axes.set_ylabel("saved values, GiB")
    axes.set_xlim(-5, 450)
    axes.invert_yaxis()
    handles: list[Patch | Line2D] = [
        Patch(color=KEPT, label="here"),
        Patch(color=AWAY, label="away, between its copies"),
        Patch(color=GONE, label="dropped, made anew"),
    ]
    axes.legend(handles=handles, frameon=False, loc="lower right")


if __name__ == "__main__":
    main()
