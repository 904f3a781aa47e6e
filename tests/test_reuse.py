"""Backward ops write over the gradient that they are made from, unless somebody else can see it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outgrow
from outgrow.planning.plan import Plan, make_plan
from outgrow.planning.problem import Problem
from outgrow.planning.reuse import IN_PLACE_FORMS, reusable_ops
from outgrow.runtime import reuse
from outgrow.runtime.reuse import EXAMPLES, Reuser
from outgrow.tracing.ir import Phase

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 7
KEEPING_STEPS = (4, 6)  # after the two that are recorded, and a third
WIDTH = 24
Function = Callable[[torch.Tensor], torch.Tensor]

FUNCTIONS = [(name, number) for name, functions in EXAMPLES.items() for number in range(len(functions))]


class ReuseAll:
    """Nothing moves; every op that may takes the place of its input."""

    name = "reuse-all"

    def plan(self, problem: Problem) -> Plan:
        return make_plan(self.name, problem, (), reuses=reusable_ops(problem))


class Net(nn.Module):
    """Two linear layers with a function between them; sums of squares make gradients differ from row to row."""

    def __init__(self, function: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.function = function

    def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
        return self.second(self.function(self.first(x), k)).pow(2).sum()


Finish = Callable[[torch.Tensor, Net, int], None]


def backward(loss: torch.Tensor, model: Net, k: int) -> None:
    loss.backward()


def train(
    function: Callable[[torch.Tensor, int], torch.Tensor],
    *,
    session_wanted: bool,
    finish: Finish = backward,
    shape: tuple[int, ...] = (5, 8),
) -> list[torch.Tensor]:
    """The gradients of all steps, plain or in a session that reuses what it may."""
    torch.manual_seed(0)
    model = Net(function)
    found: list[torch.Tensor] = []

    def step(k: int) -> None:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(k))
        finish(model(x, k), model, k)

    def collect() -> None:
        found.extend(torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters())
        model.zero_grad()

    if not session_wanted:
        for k in range(STEPS):
            step(k)
            collect()
        return found
    with outgrow.Session(model, budget="1GiB", policy=ReuseAll(), least_moved_bytes=1) as session:
        for k in range(STEPS):
            with session.step():
                step(k)
            collect()
        assert session.plan is not None
    return found


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def overwrites(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops that wrote over their input so far."""
    found: list[str] = []
    really = Reuser.write_over

    def write_over(self: Reuser, func: Any, *rest: Any) -> torch.Tensor:
        found.append(str(func))
        return really(self, func, *rest)

    monkeypatch.setattr(Reuser, "write_over", write_over)
    return found


# --- which ops ---


def test_every_operator_of_the_table_is_tested_here() -> None:
    assert set(EXAMPLES) == set(IN_PLACE_FORMS)


@pytest.mark.parametrize(("name", "number"), FUNCTIONS)
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)], ids=["matrix", "view"])
def test_an_op_writes_over_its_gradient_and_gives_the_same_bits(
    name: str, number: int, shape: tuple[int, ...], overwrites: list[str]
) -> None:
    def function(x: torch.Tensor, k: int) -> torch.Tensor:
        return EXAMPLES[name][number](x + 0.0)  # not in place on a view: that has a node of its own

    ours = train(function, session_wanted=True, shape=shape)
    assert overwrites.count(name) >= STEPS - 3  # one step without a plan, one recorded, and one to prove it
    assert same(ours, train(function, session_wanted=False, shape=shape))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3),
}


@pytest.mark.parametrize("name", IN_PLACE_FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_form_in_place_gives_the_bits_of_the_plain_op(name: str, dtype: torch.dtype, layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(3, 7, 67, 31, generator=generator).to(dtype) for _ in range(3)]
    for tensor in tensors:
        tensor.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), -0.0, -float("inf")])
    func = _function_named(name)
    args: list[Any] = [LAYOUTS[layout](tensor) for tensor in tensors]
    arguments = {
        "aten.threshold_backward.default": [*args[:2], 0],
        "aten.hardtanh_backward.default": [*args[:2], -1, 1],
        "aten.hardshrink_backward.default": [*args[:2], 0.5],
        "aten.softshrink_backward.default": [*args[:2], 0.5],
        "aten.softplus_backward.default": [*args[:2], 1, 20],
        "aten.leaky_relu_backward.default": [*args[:2], 0.01, False],
        "aten.elu_backward.default": [args[0], 1, 1, 1, False, args[1]],
        "aten.log_sigmoid_backward.default": [*args[:2], args[2].abs().neg().exp()],
        "aten.neg.default": args[:1],
    }.get(name, args[:2])
    plain = func(*arguments)
    address = args[0].data_ptr()
    ours = reuse._write_over(func, tuple(arguments), {})
    assert ours.data_ptr() == address
    assert ours.stride() == plain.stride()
    assert torch.equal(_bits(ours), _bits(plain))


def _function_named(name: str) -> Any:
    _, packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_pytorchs_formulas_read_the_gradient_once_in_the_nodes_of_the_table() -> None:
    torchgen = pytest.importorskip("torchgen")
    path = Path(torchgen.__file__).parent / "packaged/autograd/derivatives.yaml"
    if not path.exists():
        pytest.skip("this PyTorch does not bring its formulas along")
    read: dict[str, list[str]] = {}
    for entry in path.read_text().split("\n- name: ")[1:]:
        name = re.match(r"\w+", entry)
        formula = re.search(r"^  self: (.*)$", entry, re.MULTILINE)
        if name is not None and formula is not None:
            base = name[0].rstrip("_").removesuffix("_forward")
            node = "".join(part.capitalize() for part in base.split("_")) + "Backward"
            read.setdefault(node, []).append(formula[1].split(" : ")[-1])  # what runs without create_graph
    nodes = [node for form in IN_PLACE_FORMS.values() for node in form.nodes]
    assert len(nodes) == len(set(nodes))
    for node in nodes:
        formulas = read[node]
        assert all(len(re.findall(r"\bgrad\b", formula)) == 1 for formula in formulas), (node, formulas)


# --- memory ---


class Chain(nn.Module):
    """Nothing but activations on a large tensor: the peak is at the first of them, in the backward pass."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256))
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for _ in range(4):
            x = self.activation(x)
        return x.mean()


def run_chain(activation: nn.Module, policy: Any, budget: int | str = "1GiB") -> outgrow.Summary:
    model, x = Chain(activation), torch.randn(2000, 256)
    with outgrow.Session(model, budget=budget, policy=policy) as session:
        for _ in range(5):
            with session.step():
                model(x).backward()
                model.zero_grad()
        return session.summary()


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU()], ids=str)
def test_the_peak_falls_by_one_gradient_as_predicted(activation: nn.Module) -> None:
    one = 2000 * 256 * 4
    plain = run_chain(activation, "keep").measured_peak_bytes
    summary = run_chain(activation, ReuseAll())
    assert summary.predicted_peak_bytes is not None
    assert abs(summary.measured_peak_bytes / summary.predicted_peak_bytes - 1) < 0.02
    assert abs(plain - one - summary.measured_peak_bytes) < 0.02 * plain


def test_what_only_fits_with_reuse_moves_nothing() -> None:
    plain = run_chain(nn.ReLU(), "keep").measured_peak_bytes
    budget = plain - 2000 * 256 * 2
    summary = run_chain(nn.ReLU(), ReuseAll(), budget)
    assert summary.measured_peak_bytes <= budget
    assert summary.offloaded_bytes == 0


def test_auto_reuses_where_the_budget_asks_for_it_or_it_is_worth_the_while() -> None:
    """Each such op takes the thread that trains as long as it takes memory to move 600 KB here."""
    trace = activations()
    large, small = 2000 * 256 * 4, 500 * 64 * 4
    hardware = outgrow.Hardware("any", 1 << 40, 1e11, 1e10, 1e9, 1e9)

    def reused(share: float, **options: float) -> list[int]:
        keep = outgrow.plan(trace, budget="1TiB", policy="keep", hardware=hardware)
        plan = outgrow.plan(
            trace,
            budget=int(share * keep.simulate().peak_bytes),
            policy="auto",
            hardware=replace(hardware, **options),
        )
        assert plan.simulate().feasible
        return [trace.values[trace.ops[op].outputs[0]].nbytes for op in plan.reuses]

    assert {*reused(0.7)} == {large, small}
    assert {*reused(0.7, handling_seconds=6e-5)} == {large}


def activations() -> outgrow.Trace:
    """The trace of a step with large activations, and small ones far from the peak."""

    def make() -> outgrow.TrainingStep:
        first = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)))
        last = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
        model = nn.ModuleList([first, last])
        x = torch.randn(2000, 256)

        def step() -> None:
            last(first(x)[:500, :64]).sum().backward()

        return outgrow.TrainingStep(model, None, step)

    return outgrow.trace(make, fake=False)


def test_nothing_is_written_over_where_there_is_no_room_for_the_thread_that_calibrates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(work: Any) -> Any:
        raise MemoryError("can't allocate memory for the stacks of threads")

    plain = run_chain(nn.ReLU(), "keep").measured_peak_bytes
    monkeypatch.setattr(reuse, "run_on_new_thread", refuse)
    reuse.engine_alone.cache_clear()
    assert run_chain(nn.ReLU(), ReuseAll()).measured_peak_bytes >= 0.99 * plain
    monkeypatch.undo()
    assert run_chain(nn.ReLU(), ReuseAll()).measured_peak_bytes < 0.9 * plain


def test_a_gradient_that_two_ops_read_or_that_lives_on_is_not_given_away() -> None:
    def trace_of(forward: Function) -> tuple[Problem, tuple[int, ...]]:
        model = nn.Linear(8, 8)

        def step() -> None:
            F.linear(forward(model(torch.ones(4, 8))), model.weight).sum().backward()

        trace = outgrow.trace(lambda: outgrow.TrainingStep(model, None, step), fake=False)
        problem = Problem(trace, outgrow.Hardware("any", 1 << 40, 1e11, 1e10, 1e9, 1e9), 1 << 40)
        return problem, reusable_ops(problem)

    problem, ops = trace_of(torch.relu)
    assert [problem.trace.ops[op].name for op in ops] == ["aten.threshold_backward.default"]
    assert all(problem.trace.ops[op].phase is Phase.BACKWARD for op in ops)
    assert trace_of(lambda x: x * x)[1] == ()  # the gradient is read twice
    assert trace_of(lambda x: x + torch.relu(x))[1] == ()  # it goes on along the other branch
    kept: list[torch.Tensor] = []

    def kept_by_a_hook(x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x)
        x.register_hook(kept.append)
        return x

    assert trace_of(kept_by_a_hook)[1] == ()


def test_a_recorded_step_under_a_plan_that_reuses_shows_the_plain_step(overwrites: list[str]) -> None:
    torch.manual_seed(0)
    model = Net(lambda x, k: torch.relu(torch.relu(x)))  # the second is proved by the time of the first
    traces = []
    with outgrow.Session(model, budget="1GiB", policy=ReuseAll(), least_moved_bytes=1) as session:
        for _ in range(2):  # the second step is recorded under the plan of the first
            with session.step():
                model(torch.ones(5, 8), 0).backward()
            model.zero_grad()
            assert session.plan is not None
            traces.append(session.plan.problem.trace)
    assert overwrites == []
    assert traces[0] is not traces[1]
    described = [
        [(value.version, value.nbytes, value.birth, value.held, value.death) for value in trace.values]
        for trace in traces
    ]
    assert described[0] == described[1]


def test_an_op_that_fails_over_its_input_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(lambda x, k: torch.relu(x))
    calls = 0

    def fail(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        raise RuntimeError("can't allocate memory")

    with outgrow.Session(model, budget="1GiB", policy=ReuseAll(), least_moved_bytes=1) as session:
        for _ in range(3):
            with session.step():
                model(torch.ones(5, 8), 0).backward()
        monkeypatch.setattr(reuse, "_write_over", fail)
        with pytest.raises(RuntimeError, match="can't allocate memory"), session.step():
            model(torch.ones(5, 8), 0).backward()
    assert calls == 1


# --- who else may see it ---


# What a hook may make of a gradient, in every step, and keep in some.
MADE_BY_A_HOOK: dict[str, Callable[[torch.Tensor], Any]] = {
    "a hook": lambda grad: grad,
    "a view": lambda grad: grad.view(-1)[3:],
    "a detached alias": lambda grad: grad.detach(),
    "numpy": lambda grad: grad.numpy(),
    "dlpack": torch.from_dlpack,
    "a storage": lambda grad: grad.untyped_storage(),
    "a dictionary": lambda grad: {"grad": grad},
    "the base": lambda grad: grad if grad._base is None else grad._base,
}


def _hook_after_node(x: torch.Tensor, kept: list[Any]) -> None:
    assert x.grad_fn is not None
    x.grad_fn.register_hook(lambda inputs, outputs: kept.append(outputs[0].clone()))


def _hook_before_node(x: torch.Tensor, kept: list[Any]) -> None:
    assert x.grad_fn is not None
    x.grad_fn.register_prehook(lambda grads: kept.extend(grads))


def _retain(x: torch.Tensor, kept: list[Any]) -> None:
    x.retain_grad()
    kept.append(x)


# What is there in some steps only.
OTHERS: dict[str, Callable[[torch.Tensor, list[Any]], None]] = {
    "a hook after the node": _hook_after_node,
    "a hook before the node": _hook_before_node,
    "retain_grad": _retain,
}
HOLDERS = (*MADE_BY_A_HOOK, *OTHERS)


def keeping(
    holder: str, kept: list[Any], activation: Function = torch.relu
) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """An activation whose incoming gradient somebody keeps in some late steps."""

    def function(x: torch.Tensor, k: int) -> torch.Tensor:
        x = activation(x)
        keeps = k in KEEPING_STEPS

        def hook(grad: torch.Tensor) -> None:
            made = MADE_BY_A_HOOK[holder](grad)
            if keeps:
                kept.append(made)

        if holder in MADE_BY_A_HOOK:
            x.register_hook(hook)
        elif keeps:
            OTHERS[holder](x, kept)
        return x

    return function


def _contents(item: Any) -> torch.Tensor:
    if isinstance(item, dict):
        item = item["grad"]
    if isinstance(item, torch.UntypedStorage):
        return torch.tensor(item.tolist())
    tensor = torch.as_tensor(item)
    return (tensor if tensor.grad_fn is None or tensor.grad is None else tensor.grad).detach().clone()


def kept_by(
    holder: str, *, session_wanted: bool, shape: tuple[int, ...], activation: Function = torch.relu
) -> list[torch.Tensor]:
    kept: list[Any] = []
    gradients = train(keeping(holder, kept, activation), session_wanted=session_wanted, shape=shape)
    assert len(kept) == len(KEEPING_STEPS)
    return gradients + [_contents(item) for item in kept]


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)], ids=["matrix", "view"])
def test_gradients_that_somebody_keeps_in_some_steps_are_right(
    holder: str, shape: tuple[int, ...], overwrites: list[str]
) -> None:
    ours = kept_by(holder, session_wanted=True, shape=shape)
    assert overwrites  # in the steps in which nobody kept them
    assert same(ours, kept_by(holder, session_wanted=False, shape=shape))


def test_the_holders_of_one_operator_are_not_those_of_another(overwrites: list[str]) -> None:
    # C++ holds the argument of `silu_backward` once less than that of the others: one more, and they are alike.
    ours = kept_by("a hook after the node", session_wanted=True, shape=(5, 8), activation=F.silu)
    assert overwrites
    assert same(ours, kept_by("a hook after the node", session_wanted=False, shape=(5, 8), activation=F.silu))


def test_a_gradient_that_is_a_part_of_a_larger_storage_is_left_alone(overwrites: list[str]) -> None:
    def function(x: torch.Tensor, k: int) -> torch.Tensor:
        x = F.gelu(x)  # its kernel refuses a result that overlaps its input in part

        def hook(grad: torch.Tensor) -> torch.Tensor:
            if k in KEEPING_STEPS:  # the same ops, and a window of the same shape
                return torch.cat([grad, grad[:5]])[2:7]
            return torch.cat([grad, grad[:0]])[0:5]

        x.register_hook(hook)
        return x

    ours = train(function, session_wanted=True)
    assert overwrites
    assert same(ours, train(function, session_wanted=False))


class _Everybody:
    """Every number of holders is that of the engine alone."""

    def __contains__(self, item: object) -> bool:
        return True


@pytest.mark.parametrize("holder", [*MADE_BY_A_HOOK, "a hook before the node"])
def test_these_tests_would_see_a_buffer_that_is_not_ours_to_take(
    holder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse, "alone_at", lambda name: _Everybody())
    ours = kept_by(holder, session_wanted=True, shape=(5, 8))
    assert not same(ours, kept_by(holder, session_wanted=False, shape=(5, 8)))


def _twice_retained(loss: torch.Tensor, model: Net, k: int) -> None:
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def _twice_differentiated(loss: torch.Tensor, model: Net, k: int) -> None:
    slopes = torch.autograd.grad(loss, tuple(model.parameters()), create_graph=True)
    (loss + sum(slope.pow(2).sum() for slope in slopes)).backward()


def _in_a_batch(loss: torch.Tensor, model: Net, k: int) -> None:
    loss.backward(retain_graph=True)
    parameters = tuple(model.parameters())
    many = torch.autograd.grad(loss, parameters, torch.tensor([1.0, 2.0]), is_grads_batched=True)
    for parameter, grads in zip(parameters, many, strict=True):
        parameter.grad = grads.sum(0)


@pytest.mark.parametrize("finish", [_twice_retained, _twice_differentiated, _in_a_batch])
@pytest.mark.parametrize("function", [torch.relu, torch.tanh, lambda x: x * 0.5], ids=["relu", "tanh", "mul"])
def test_other_ways_of_going_backward_are_right(finish: Finish, function: Function) -> None:
    ours = train(lambda x, k: function(x), session_wanted=True, finish=finish)
    assert same(ours, train(lambda x, k: function(x), session_wanted=False, finish=finish))


def _fan_out(x: torch.Tensor, k: int) -> torch.Tensor:
    return torch.relu(x) + torch.tanh(x) if k % 2 else torch.relu(x + 1.0)


def _same_gradient_twice(x: torch.Tensor, k: int) -> torch.Tensor:
    left, right = torch.relu(x), torch.relu(-x)
    return left + right


def _squared(x: torch.Tensor, k: int) -> torch.Tensor:
    return x * x / (1.0 + x * x) + torch.exp(-x)


def _asked_for(x: torch.Tensor, k: int) -> torch.Tensor:
    x = torch.relu(x)
    if k % 2:
        (seen,) = torch.autograd.grad(x.pow(2).sum(), x, retain_graph=True)
        return x * (1.0 + seen.detach() * 1e-3)
    return x * 2.0


@pytest.mark.parametrize("function", [_fan_out, _same_gradient_twice, _squared, _asked_for])
def test_a_gradient_that_goes_more_than_one_way_is_right(function: Callable[..., torch.Tensor]) -> None:
    assert same(train(function, session_wanted=True), train(function, session_wanted=False))


def difference(bias: nn.Parameter) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """The same ops in every step; but in some the gradient of the difference is wanted by both of its terms."""

    def function(x: torch.Tensor, k: int) -> torch.Tensor:
        bias.requires_grad_(k >= 4)
        # Its backward pass is one negation of the gradient, for `x`; `bias` gets the gradient itself.
        return bias - x

    return function


def _gradients_of_bias(*, session_wanted: bool) -> list[torch.Tensor]:
    bias = nn.Parameter(torch.zeros(5, WIDTH))
    return [*train(difference(bias), session_wanted=session_wanted), bias.grad if bias.grad is not None else bias]


def test_an_op_whose_node_reads_the_gradient_again_leaves_it_alone() -> None:
    assert same(_gradients_of_bias(session_wanted=True), _gradients_of_bias(session_wanted=False))


def test_these_tests_would_see_a_node_that_reads_the_gradient_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "alone_at", lambda name: _Everybody())
    assert not same(_gradients_of_bias(session_wanted=True), _gradients_of_bias(session_wanted=False))


def test_an_op_that_gives_other_bits_in_place_is_never_used(
    monkeypatch: pytest.MonkeyPatch, overwrites: list[str]
) -> None:
    really = reuse._write_over

    def wrongly(*args: Any) -> torch.Tensor:
        return really(*args).add_(1e-3)

    monkeypatch.setattr(reuse, "_write_over", wrongly)

    def function(x: torch.Tensor, k: int) -> torch.Tensor:
        return torch.relu(x)

    assert same(train(function, session_wanted=True), train(function, session_wanted=False))
    assert overwrites == []


def test_a_step_that_left_the_plan_writes_over_nothing(overwrites: list[str]) -> None:
    wide, narrow = torch.ones(WIDTH), torch.ones(1)

    def function(x: torch.Tensor, k: int) -> torch.Tensor:
        return torch.relu(x * (narrow if k < 4 else wide))  # the same ops; but what is saved is larger

    torch.manual_seed(0)
    model = Net(function)
    with outgrow.Session(model, budget="1GiB", policy=ReuseAll(), least_moved_bytes=1) as session:
        for k in range(5):
            with session.step():
                model(torch.ones(5, 8), k).backward()
            if k == 3:
                assert overwrites
                overwrites.clear()
    assert overwrites == []
