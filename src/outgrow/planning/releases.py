"""When a plan's values are gone, as ticks: for a runtime whose host runs ahead of its device.

A plan may let a value go "when its copy is done". On a CPU that is seen as it happens. A host that has asked a GPU
for half of the step already sees nothing of the kind; it lets go of memory by having the computation wait for the
copy. It should do that no sooner than the copy is done, or the device stands still, and no later, or what comes back
finds no room in time. The simulator knows when.
"""

from __future__ import annotations

from dataclasses import replace

from outgrow.planning.plan import Plan
from outgrow.planning.simulate import landings


def with_releases(plan: Plan) -> Plan:
    """The same plan, in which every value is gone by a tick: the first one at which its copy is predicted to be done.

    Where that is never before the end of the step, it goes as before.
    """
    gone = landings(plan)
    ticks = len(plan.problem.trace.ticks)
    return replace(
        plan,
        offloads=tuple(
            replace(item, release_tick=max(gone[item.value], item.out_tick))
            if item.release_tick < 0 and gone.get(item.value, ticks) < ticks
            else item
            for item in plan.offloads
        ),
    )
