"""Times and workspaces for a trace that nobody ran: a roofline over FLOPs and bytes. Pure; no torch.

Williams, Waterman, Patterson, "Roofline" (CACM 2009): an op takes as long as the slower of its arithmetic and
its memory traffic.
"""

from __future__ import annotations

from dataclasses import replace

from outgrow.cost.hardware import Hardware
from outgrow.tracing.ir import Op, Trace


def estimate(trace: Trace, hardware: Hardware) -> Trace:
    """The trace with estimated seconds and workspaces; a measured trace is returned as it is."""
    if trace.measured:
        return trace
    return trace.with_ops([_estimated(op, trace, hardware) for op in trace.ops])


def _estimated(op: Op, trace: Trace, hardware: Hardware) -> Op:
    seconds = op_seconds(op, hardware)
    return replace(op, seconds=seconds, workspace_bytes=workspace_bytes(op, trace))


def op_seconds(op: Op, hardware: Hardware) -> float:
    """Time of one op on `hardware`, in seconds."""
    arithmetic = op.flops / hardware.flops_per_second
    traffic = op.moved_bytes / hardware.memory_bandwidth
    return hardware.op_overhead_seconds + max(arithmetic, traffic)


def workspace_bytes(op: Op, trace: Trace) -> int:
    """What an op holds beyond its outputs.

    On a CPU, oneDNN lays out the operands of a convolution in blocks of channels: forward holds a copy of its
    input and of its output, backward of two of its operands at a time (seen in the allocator's own reports).
    In channels_last order only the weight is rearranged, in backward its gradient as well.
    """
    if trace.device != "cpu" or "convolution" not in op.name:
        return 0
    if op.channels_last:
        is_backward = "backward" in op.name
        weight = trace.values[op.inputs[2 if is_backward else 1]].nbytes
        return 2 * weight if is_backward else weight
    sizes = sorted((trace.values[index].nbytes for index in (*op.inputs, *op.outputs)), reverse=True)
    return sum(sizes[:2])
