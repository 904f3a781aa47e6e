"""Times and workspaces for a trace that nobody ran: a roofline over FLOPs and bytes. Pure; no torch."""

from __future__ import annotations

from dataclasses import replace

from outgrow.cost.hardware import Hardware, OpClass
from outgrow.tracing.ir import Op, Trace

_PRODUCTS = ("mm.", "addmv", "matmul", "linear", "attention", "einsum")


def estimate(trace: Trace, hardware: Hardware) -> Trace:
    """The trace with estimated seconds and workspaces on `hardware`; a measured trace is returned as it is."""
    if trace.measured:
        return trace
    on_device = replace(trace, device=hardware.device_type)
    return on_device.with_ops([_estimated(op, on_device, hardware) for op in trace.ops])


def _estimated(op: Op, trace: Trace, hardware: Hardware) -> Op:
    seconds = op_seconds(op, hardware)
    return replace(op, seconds=seconds, workspace_bytes=workspace_bytes(op, trace))


def op_seconds(op: Op, hardware: Hardware) -> float:
    """Time of one op on `hardware`, in seconds: what the roofline allows over the share of it that such ops reach.

    A view runs no kernel, and takes no time.
    """
    if not op.moved_bytes and not op.flops:
        return 0.0
    share = hardware.efficiency.get(op_class(op), 1.0)
    return hardware.op_overhead_seconds + hardware.roofline_seconds(op.flops, op.moved_bytes, op.dtype) / share


def op_class(op: Op) -> OpClass:
    """What an op is to the device, by its name."""
    if "convolution" in op.name:
        return OpClass.CONVOLUTION
    if any(part in op.name for part in _PRODUCTS):
        return OpClass.PRODUCT
    return OpClass.NORMALIZATION if "_norm" in op.name else OpClass.OTHER


def workspace_bytes(op: Op, trace: Trace) -> int:
    """What an op holds beyond its outputs.

    On a CPU, oneDNN lays out the operands of a convolution in blocks of channels: forward holds a copy of its
    input and of its output, backward of two of its operands at a time (seen in the allocator's own reports).
    In channels_last order only the weight is rearranged, in backward its gradient as well. On a GPU, cuDNN has for
    each convolution an algorithm that needs none.
    """
    if trace.device != "cpu" or "convolution" not in op.name:
        return 0
    if op.channels_last:
        is_backward = "backward" in op.name
        weight = trace.values[op.inputs[2 if is_backward else 1]].nbytes
        return 2 * weight if is_backward else weight
    sizes = sorted((trace.values[index].nbytes for index in (*op.inputs, *op.outputs)), reverse=True)
    return sum(sizes[:2])
