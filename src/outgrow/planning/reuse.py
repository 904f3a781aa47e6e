"""Which ops may write their result over an input that dies with them (Layrub's intra-layer reuse).

In the backward pass the gradient of an elementwise layer is as large as the gradient that it is made from, and the
latter is wanted no more: one buffer serves both. The table here says for which operators; `runtime/reuse.py` looks
in each step whether the buffer is really nobody else's.
"""

from __future__ import annotations

from dataclasses import dataclass

from outgrow.planning.problem import Problem
from outgrow.tracing.ir import Kind, Op, Phase


@dataclass(frozen=True, slots=True)
class InPlaceForm:
    """How an operator writes over its first argument.

    Attributes:
        overload: the overload that writes to a tensor that is given, and `target` its keyword for that tensor.
        nodes: autograd's nodes whose formula is this one op and reads the incoming gradient once, without the
            number at their end. After any other op the formula may read the gradient again.
        one_edge: the node does so only where nobody but its first input wants a gradient.
    """

    overload: str
    target: str
    nodes: tuple[str, ...]
    one_edge: bool = False


def _grad_input(*nodes: str) -> InPlaceForm:
    return InPlaceForm("grad_input", "grad_input", nodes)


# Operators on a TensorIterator, which allows its output to be one of its inputs. `hardswish_backward` and
# `native_dropout_backward` are not here: their `out` forms make the result elsewhere first and copy it.
IN_PLACE_FORMS: dict[str, InPlaceForm] = {
    "aten.threshold_backward.default": _grad_input("ReluBackward", "ThresholdBackward"),
    "aten.gelu_backward.default": _grad_input("GeluBackward"),
    "aten.silu_backward.default": _grad_input("SiluBackward"),
    "aten.sigmoid_backward.default": _grad_input("SigmoidBackward"),
    "aten.tanh_backward.default": _grad_input("TanhBackward"),
    "aten.hardtanh_backward.default": _grad_input("HardtanhBackward"),
    "aten.hardsigmoid_backward.default": _grad_input("HardsigmoidBackward"),
    "aten.hardshrink_backward.default": _grad_input("HardshrinkBackward"),
    "aten.softshrink_backward.default": _grad_input("SoftshrinkBackward"),
    "aten.softplus_backward.default": _grad_input("SoftplusBackward"),
    "aten.leaky_relu_backward.default": _grad_input("LeakyReluBackward"),
    "aten.elu_backward.default": _grad_input("EluBackward", "CeluBackward"),
    "aten.log_sigmoid_backward.default": _grad_input("LogSigmoidBackward"),
    "aten.mul.Tensor": InPlaceForm("out", "out", ("MulBackward", "ExpBackward"), one_edge=True),
    "aten.div.Tensor": InPlaceForm("out", "out", ("DivBackward",), one_edge=True),
    "aten.neg.default": InPlaceForm("out", "out", ("NegBackward",)),
}


def reusable_ops(problem: Problem) -> tuple[int, ...]:
    """The ops whose result may take the place of their first input, by number.

    The input is a value that only the backward pass holds, read by this op alone and gone right after it; result
    and input are as large as each other. Who else holds a gradient is counted as autograd does it on a CPU: there are
    none elsewhere.
    """
    trace = problem.trace
    if not problem.sees_all:
        return ()
    saved = {item.value for item in trace.saved}
    readers: dict[int, int] = {}
    for op in trace.ops:
        if op.outputs:  # a view reads nothing
            for index in op.inputs:
                readers[index] = readers.get(index, 0) + 1
    return tuple(
        number
        for number, op in enumerate(trace.ops)
        if op.name in IN_PLACE_FORMS
        and op.phase is Phase.BACKWARD
        and op.inputs
        and len(op.outputs) == 1
        and op.inputs[0] not in saved
        and readers[op.inputs[0]] == 1
        and _takes_its_place(problem, number, op)
    )


def overwritten(problem: Problem, op: int) -> int | None:
    """The value whose place the result of `op` may take, None if operator, lifetimes or sizes do not allow it."""
    record = problem.trace.ops[op]
    if record.name not in IN_PLACE_FORMS or not record.inputs or len(record.outputs) != 1:
        return None
    return record.inputs[0] if _takes_its_place(problem, op, record) else None


def _takes_its_place(problem: Problem, number: int, op: Op) -> bool:
    source, result = problem.trace.values[op.inputs[0]], problem.trace.values[op.outputs[0]]
    return (
        source.kind is Kind.TEMPORARY
        and 0 <= source.birth < number
        and source.death == number + 1
        and result.version == 0
        and result.birth == number
        and source.nbytes == result.nbytes > 0
    )
