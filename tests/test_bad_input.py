"""What cannot work is refused with an error that says what it is and what to do."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outgrow
from conftest import open_files_in
from outgrow import (
    BudgetTooSmall,
    InvalidBudget,
    InvalidPlan,
    SessionError,
    SpillError,
    TraceMismatch,
    UnknownPolicy,
    UnsupportedDevice,
)
from outgrow.planning.plan import Offload, Park, Plan, Recompute, make_plan
from outgrow.planning.problem import Problem
from outgrow.session.opening import device_of
from outgrow.tracing.ir import Trace

pytestmark = pytest.mark.usefixtures("one_thread")


class Training:
    """A small network, its optimizer and one batch a step; `momentum` makes later steps larger than the first."""

    def __init__(self, momentum: float = 0.0) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.GELU())]
        self.model = nn.Sequential(nn.Conv2d(3, 8, 3), *layers, nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=momentum)

    def session(self, budget: Any = "1GiB", **options: Any) -> outgrow.Session:
        return outgrow.Session(self.model, self.optimizer, budget=budget, **options)

    def step(self, k: int) -> None:
        generator = torch.Generator().manual_seed(k)
        x, y = torch.randn(4, 3, 16, 16, generator=generator), torch.randint(0, 10, (4,), generator=generator)
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, session: outgrow.Session, wanted: range) -> None:
        for k in wanted:
            with session.step():
                self.step(k)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.fixture
def training() -> Training:
    return Training()


# --- arguments ---


def test_an_unknown_policy_is_refused_with_the_names_that_there_are(training: Training) -> None:
    with pytest.raises(UnknownPolicy, match="'best'") as caught:
        training.session(policy="best")
    assert all(name in str(caught.value) for name in outgrow.policies())


@pytest.mark.parametrize("policy", [3, None, object()])
def test_what_makes_no_plans_is_no_policy(training: Training, policy: object) -> None:
    with pytest.raises(UnknownPolicy, match=f"policy is {type(policy).__name__}"):
        training.session(policy=policy)
    with pytest.raises(UnknownPolicy, match=f"policy is {type(policy).__name__}"):
        outgrow.plan(traced_on_fakes(), budget="1GiB", policy=policy)  # type: ignore[arg-type]


def test_a_plan_is_given_and_not_its_file(training: Training) -> None:
    with pytest.raises(SessionError, match="plan is str: give a Plan"):
        training.session(plan="plan.json")


@pytest.mark.parametrize(
    "budget",
    [
        *(0, -1, -(2**40), True, False, 1.5, 1e9, None, b"8GiB", [8]),
        *("0", "0GiB", "-3GiB", "", " ", "GiB", "12 parsecs", "8 GiB of RAM", "8GiBB", "1e3MB", "0x10", "nan", "inf"),
        *("150%", "0%", "-5%", "%", "9" * 400, "9" * 400 + "GiB"),
    ],
    ids=lambda budget: repr(budget)[:20],
)
def test_a_budget_that_is_none_is_refused(training: Training, budget: object) -> None:
    with pytest.raises(InvalidBudget) as caught:
        training.session(budget)
    assert any(word in str(caught.value) for word in ("budget", "memory", "bytes"))
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("budget", [2**30, "1GiB", "1 gib", "1073741824", "1.5 GB", " 800MB ", "50%", "100 %"])
def test_a_budget_that_is_one_is_taken(training: Training, budget: int | str) -> None:
    with training.session(budget) as session:
        assert session.budget_bytes > 7e8


def test_a_gpu_whose_memory_nobody_counts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = SimpleNamespace(device=torch.device("cuda", 0))
    model: Any = SimpleNamespace(parameters=lambda: [parameter])
    assert device_of([model]) == parameter.device
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    with pytest.raises(UnsupportedDevice, match="PYTORCH_NO_CUDA_MEMORY_CACHING"):
        device_of([model])


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(SessionError, match="no parameters"):
        outgrow.Session(nn.ReLU(), budget="1GiB")
    with pytest.raises(SessionError, match="no parameters"):
        outgrow.Session([], budget="1GiB")


def test_a_model_without_memory_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(UnsupportedDevice, match="on meta"):
        outgrow.Session(model, budget="1GiB")
    with pytest.raises(UnsupportedDevice, match="on cpu, meta"):
        outgrow.Session([model, nn.Linear(4, 4)], budget="1GiB")


def test_a_spill_folder_that_is_a_file_is_refused(training: Training, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("here")
    with pytest.raises(SpillError, match="no folder") as caught:
        training.session(spill_dir=file)
    assert str(file) in str(caught.value)
    assert file.read_text() == "here"


# --- the life of a session ---


def test_closing_twice_is_harmless(training: Training, tmp_path: Path) -> None:
    session = training.session(spill_dir=tmp_path)
    session.close()
    other = tmp_path / "other"
    with other.open("wb"):  # takes the number of the descriptor that the session closed
        session.close()
        session.close()
    assert other.exists()


def test_a_step_after_the_end_is_refused(training: Training) -> None:
    session = training.session()
    session.close()
    with pytest.raises(SessionError, match="closed"), session.step():
        pytest.fail("the step must not begin")


def test_a_step_inside_a_step_is_refused_and_the_outer_one_goes_on(training: Training) -> None:
    plain = Training()
    for k in range(3):
        plain.step(k)
    with training.session() as session:
        for k in range(3):
            with session.step():
                with pytest.raises(SessionError, match="do not nest"), session.step():
                    pytest.fail("the step must not begin")
                training.step(k)
        assert session.summary().step_seconds > 0
    assert all(map(torch.equal, training.parameters, plain.parameters))


def test_a_session_cannot_be_closed_inside_its_step(training: Training) -> None:
    with training.session() as session, session.step():
        with pytest.raises(SessionError, match="not inside"):
            session.close()
        training.step(0)


def test_two_sessions_over_one_model_are_refused(training: Training) -> None:
    with training.session() as session:
        with pytest.raises(SessionError, match="another session is open"):
            training.session()
        with pytest.raises(SessionError, match="another session is open"):
            outgrow.Session([nn.Linear(2, 2), training.model], budget="1GiB")
        training.steps(session, range(2))
    with training.session() as session:
        training.steps(session, range(2))


def test_figures_before_the_first_step_are_refused(training: Training) -> None:
    with training.session() as session, pytest.raises(SessionError, match="no step was finished"):
        session.summary()


# --- budgets below the least ---


def assert_explains(error: BudgetTooSmall, budget: int) -> None:
    """The message has the least budget in bytes, and what takes it; the parts make up the whole."""
    assert error.budget_bytes == budget
    assert error.least_bytes > budget
    assert f"({error.least_bytes} bytes)" in str(error)
    assert "taken by" in str(error)
    assert all(name in str(error) for name, nbytes in error.holders.items() if nbytes)
    assert sum(error.holders.values()) == error.least_bytes


def test_a_budget_below_the_training_state_is_refused_at_once(training: Training, tmp_path: Path) -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        training.session(100_000, spill_dir=tmp_path)
    assert_explains(caught.value, 100_000)
    assert caught.value.least_bytes == 2 * sum(parameter.nbytes for parameter in training.model.parameters())
    assert open_files_in(tmp_path) == []


@pytest.mark.parametrize("what", ["each parameter is updated as its gradient comes", "a teacher that is not frozen"])
def test_no_budget_is_refused_for_gradients_that_may_never_be_together(what: str) -> None:
    torch.manual_seed(0)
    large = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())])
    small = nn.Linear(256, 256)
    if what.startswith("each"):
        optimizers: Any = [torch.optim.SGD([parameter], lr=0.01) for parameter in large.parameters()]
        for parameter, optimizer in zip(large.parameters(), optimizers, strict=True):

            def update(parameter: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
        trained, teacher = large, nn.Identity()
    else:
        optimizers, trained, teacher = torch.optim.SGD(small.parameters(), lr=0.01), small, large
    budget = sum(parameter.nbytes for model in (trained, teacher) for parameter in model.parameters()) + (1 << 20)
    with outgrow.Session([trained, teacher], optimizers, budget=budget) as session:
        for k in range(4):
            with session.step():
                x = torch.randn(16, 256, generator=torch.Generator().manual_seed(k))
                with torch.no_grad():
                    wanted = teacher(x)
                F.mse_loss(trained(x), wanted + 1).backward()
            small.zero_grad()
        assert session.peak_bytes <= budget


def test_a_budget_too_small_for_an_op_is_refused_in_the_first_step(training: Training) -> None:
    before = training.parameters
    state = 2 * sum(parameter.nbytes for parameter in before)
    with training.session(state + 10_000) as session:
        with pytest.raises(BudgetTooSmall) as caught:
            training.steps(session, range(1))
        assert_explains(caught.value, state + 10_000)
        assert caught.value.where.startswith("aten.")
        assert caught.value.where in str(caught.value)
        assert all(map(torch.equal, training.parameters, before))


@pytest.mark.parametrize("policy", ["auto", "lru", "vdnn-all"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_whoever_follows_the_advice_ends_with_a_budget_that_works(policy: str, momentum: float) -> None:
    plain = Training(momentum)
    for k in range(4):
        plain.step(k)
    budget, tried = 100_000, 0
    while True:
        training, tried = Training(momentum), tried + 1
        try:
            with training.session(budget, policy=policy) as session:
                training.steps(session, range(4))
                assert session.peak_bytes <= budget
                break
        except BudgetTooSmall as error:
            assert_explains(error, budget)
            assert tried < 20
            budget = error.least_bytes
    assert tried > 2
    assert all(map(torch.equal, training.parameters, plain.parameters))


def test_where_nothing_may_leave_the_least_budget_is_exact_and_works() -> None:
    training = Training(0.9)
    with training.session() as unbound:
        training.steps(unbound, range(4))
        peak = unbound.peak_bytes
    training = Training(0.9)
    with training.session(peak * 3 // 4, policy="keep") as session, pytest.raises(BudgetTooSmall) as caught:
        training.steps(session, range(4))
    assert_explains(caught.value, peak * 3 // 4)
    assert caught.value.exact
    training = Training(0.9)
    with training.session(caught.value.least_bytes, policy="keep") as session:
        training.steps(session, range(4))
        assert session.peak_bytes <= caught.value.least_bytes
        assert session.summary().offloaded_bytes == 0
    training = Training(0.9)
    less = caught.value.least_bytes - 4096
    with training.session(less, policy="keep") as session, pytest.raises(BudgetTooSmall):
        training.steps(session, range(4))


# --- saved tensors that user code changes ---


class Changed:
    """A step that saves the result of `exp`, and may change it afterwards."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 256)
        self.model = nn.ModuleList([self.first, self.last])

    def step(self, change: Callable[[torch.Tensor], object], meanwhile: Callable[[], object] = lambda: None) -> None:
        saved = torch.exp(self.first(torch.ones(256, 64)) / 8)
        loss = self.last(saved).square().mean()
        meanwhile()
        with torch.no_grad():
            change(saved)
        loss.backward()
        self.model.zero_grad()


def nothing(saved: torch.Tensor) -> None:
    pass


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "as a whole": lambda saved: saved.mul_(2),
    "by a view": lambda saved: saved[3:5].zero_(),
    "by detach": lambda saved: saved.detach().add_(1),
    "by out=": lambda saved: torch.add(saved, 1, out=saved),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_saved_tensor_that_was_changed_is_the_error_of_plain_pytorch(
    change: Callable[[torch.Tensor], object], tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as plain:
        Changed().step(change)
    version = str(plain.value).split("is at version ")[1].split(".")[0]

    kept = Changed()
    with outgrow.Session(kept.model, budget="1GiB") as session:
        for _ in range(2):
            with session.step():
                kept.step(nothing)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught, session.step():
            kept.step(change)
    assert type(caught.value) is type(plain.value)
    assert version in str(caught.value)

    offloaded = Changed()
    with outgrow.Session(offloaded.model, budget="1GiB", policy="vdnn-all", spill_dir=tmp_path) as session:

        def leave() -> None:
            [entry] = [entry for entry in session._pool.entries() if entry.handles == 2]  # of exp and of last
            session._pool.wait_out(entry)
            assert entry.slot is not None

        for _ in range(2):
            with session.step():
                offloaded.step(nothing)
        with session.step():
            offloaded.step(nothing, leave)
        assert session.summary().offloaded_bytes > 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught, session.step():
            offloaded.step(change, leave)
    assert type(caught.value) is type(plain.value)
    assert version in str(caught.value)


def test_a_change_that_plain_pytorch_does_not_see_changes_the_gradient_as_it_does_there(tmp_path: Path) -> None:
    def gradient(session: outgrow.Session | None, changed: Changed) -> torch.Tensor:
        saved = torch.exp(changed.first(torch.ones(256, 64)) / 8)
        loss = changed.last(saved).square().mean()
        if session is not None:
            for entry in session._pool.entries():
                session._pool.wait_out(entry)
        saved.data.mul_(2)  # the version does not change
        del saved
        loss.backward()
        assert changed.first.weight.grad is not None
        gradient = changed.first.weight.grad.clone()
        changed.model.zero_grad()
        return gradient

    plain = gradient(None, Changed())
    changed = Changed()
    with outgrow.Session(changed.model, budget="1GiB", policy="vdnn-all", spill_dir=tmp_path) as session:
        for _ in range(3):
            with session.step():
                assert torch.equal(gradient(session, changed), plain)
        assert session.summary().offloaded_bytes > 0


# --- files ---


@pytest.fixture(scope="module")
def plan() -> outgrow.Plan:
    def make_step() -> outgrow.TrainingStep:
        training = Training(0.9)
        return outgrow.TrainingStep(training.model, training.optimizer, lambda: training.step(0))

    trace = outgrow.trace(make_step)
    hardware = outgrow.Hardware("any", 1 << 34, 1e11, 1e10, 1e9, 1e9)
    return outgrow.plan(trace, budget=400_000, policy="vdnn-all", hardware=hardware)


KINDS = pytest.mark.parametrize("kind", [outgrow.Plan, outgrow.Trace])


@KINDS
@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"garbage", b"\x00\xff\xfe\x80" * 50, b"null", b"3", b'"text"', b"[]", b"[1, 2]", b"{}", b"{" * 2000),
        *(b'{"format": "outgrow-plan-999"}', b'{"format": ["outgrow-plan-1"]}', b'{"format": "outgrow-trace-999"}'),
        *(b'{"format": "outgrow-plan-1"}', b'{"format": "outgrow-trace-3"}', b"[" * 200_000),
    ],
    ids=lambda content: repr(content[:30]),
)
def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path, kind: Any, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(TraceMismatch) as caught:
        kind.load(path)
    assert str(path) in str(caught.value)


def saved_as(kind: Any, plan: outgrow.Plan, path: Path) -> None:
    (plan if kind is outgrow.Plan else plan.problem.trace).save(path)


@KINDS
@pytest.mark.parametrize("share", [0.01, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(plan: outgrow.Plan, tmp_path: Path, kind: Any, share: float) -> None:
    path = tmp_path / "file.json"
    saved_as(kind, plan, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(TraceMismatch):
        kind.load(path)


@KINDS
def test_a_file_of_the_other_kind_is_refused(plan: outgrow.Plan, tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "file.json"
    saved_as(outgrow.Trace if kind is outgrow.Plan else outgrow.Plan, plan, path)
    with pytest.raises(TraceMismatch, match="format"):
        kind.load(path)


@KINDS
def test_a_file_that_is_not_there_is_the_usual_error(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(FileNotFoundError):
        kind.load(tmp_path / "nowhere.json")


HUGE = 10**9
TRACE_FAULTS = [
    *[("ops", "inputs", bad) for bad in ([HUGE], [-1], ["0"], [0.5], 3, None)],
    *[("ops", "outputs", bad) for bad in ([HUGE], [-1], ["0"])],
    *[("ops", "phase", bad) for bad in ("sideways", 3, None)],
    *[("ops", "seconds", bad) for bad in ("fast", None, -1.0, float("nan"), float("inf"))],
    *[("ops", "workspace_bytes", bad) for bad in ("much", None, -1)],
    *[("values", "birth", bad) for bad in (HUGE, -2, "0", None)],
    *[("values", "death", bad) for bad in (HUGE, -1, "0", None)],
    *[("values", "held", bad) for bad in (HUGE, -1, "0", None)],
    *[("values", "nbytes", bad) for bad in (-1, "0", None, 0.5)],
    *[("values", "kind", bad) for bad in ("precious", None)],
    *[("saved", "value", bad) for bad in (HUGE, -1, "0", None)],
    *[("saved", "packed", bad) for bad in (HUGE, -1, "0")],
    *[("saved", "unpacked", bad) for bad in ([HUGE], [-1], ["0"], 3)],
    *[("saved", "released", bad) for bad in (HUGE, -1, "0")],
    *[("ticks", "saved", bad) for bad in (HUGE, -1, "0")],
    *[("ticks", "op", bad) for bad in (HUGE, -1, "0")],
    *[("ticks", "event", bad) for bad in ("tock", None)],
]
PLAN_FAULTS = [
    *[("value", bad) for bad in (HUGE, -1, "0", None, 0.5)],
    *[(name, bad) for name in ("out_tick", "release_tick", "in_tick") for bad in (HUGE, -2, "0", None, 0.5)],
    *[("offset", bad) for bad in (-4096, "0", None, 0.5)],
    ("surprise", 1),
]


@pytest.mark.parametrize(("table", "column", "bad"), TRACE_FAULTS)
def test_a_trace_that_points_nowhere_is_refused(
    plan: outgrow.Plan, tmp_path: Path, table: str, column: str, bad: object
) -> None:
    document = plan.problem.trace.to_document()
    document[table][column][0] = bad
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    with pytest.raises(TraceMismatch):
        outgrow.Trace.load(path)


@pytest.mark.parametrize("table", ["ops", "values", "saved", "ticks"])
def test_a_trace_that_lacks_something_is_refused(plan: outgrow.Plan, tmp_path: Path, table: str) -> None:
    def refuses(document: dict[str, Any]) -> None:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(document))
        with pytest.raises(TraceMismatch):
            outgrow.Trace.load(path)

    whole = plan.problem.trace.to_document()
    refuses({name: item for name, item in whole.items() if name != table})
    for column in whole[table]:
        refuses({**whole, table: {name: item for name, item in whole[table].items() if name != column}})
        refuses({**whole, table: {**whole[table], column: whole[table][column][:-1]}})
        refuses({**whole, table: {**whole[table], column: 3}})


@pytest.mark.parametrize(("field", "bad"), PLAN_FAULTS)
def test_a_plan_that_its_trace_does_not_allow_is_refused(
    plan: outgrow.Plan, tmp_path: Path, field: str, bad: object
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    document = json.loads(path.read_text())
    document["offloads"][0][field] = bad
    path.write_text(json.dumps(document))
    with pytest.raises(TraceMismatch):
        outgrow.Plan.load(path)


@pytest.mark.parametrize("bad", ["fast", None, -1.0, 0, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["memory_bytes", "flops_per_second", "memory_bandwidth", "copy_out_bandwidth"])
def test_a_plan_for_hardware_that_cannot_be_is_refused(
    plan: outgrow.Plan, tmp_path: Path, field: str, bad: object
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    document = json.loads(path.read_text())
    document["hardware"][field] = bad
    path.write_text(json.dumps(document))
    with pytest.raises(TraceMismatch):
        outgrow.Plan.load(path)


@KINDS
def test_what_was_saved_is_read_back_the_same(plan: outgrow.Plan, tmp_path: Path, kind: Any) -> None:
    path, again = tmp_path / "file.json", tmp_path / "again.json"
    saved_as(kind, plan, path)
    loaded = kind.load(path)
    loaded.save(again)
    assert again.read_bytes() == path.read_bytes()
    assert loaded == (plan if kind is outgrow.Plan else plan.problem.trace)


# --- what is no model, no optimizer, no step ---


def test_what_is_no_model_or_no_optimizer_is_refused(training: Training) -> None:
    with pytest.raises(SessionError, match="model is function"):
        outgrow.Session(lambda x: x, budget="1GiB")  # type: ignore[arg-type]
    with pytest.raises(SessionError, match="model is NoneType"):
        outgrow.Session(None, budget="1GiB")  # type: ignore[arg-type]
    with pytest.raises(SessionError, match="optimizer is Parameter"):
        outgrow.Session(training.model, training.model.parameters(), budget="1GiB")  # type: ignore[arg-type]
    with pytest.raises(SessionError, match="lazy"):
        outgrow.Session(nn.LazyLinear(3), budget="1GiB")
    for nonsense in (0, "4k"):
        with pytest.raises(SessionError, match="least_moved_bytes"):
            training.session(least_moved_bytes=nonsense)
    with pytest.raises(SpillError, match="spill_dir is 7: give the name of a folder"):
        training.session(spill_dir=7)


@pytest.mark.parametrize("double", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_session_has_no_double(training: Training, double: Callable[[object], object]) -> None:
    with training.session() as session, pytest.raises(SessionError, match="cannot be copied or pickled"):
        double(session)


def test_a_step_ends_on_the_thread_that_it_began_on(training: Training) -> None:
    with training.session() as session, ThreadPoolExecutor(1) as elsewhere:
        step = session.step()
        step.__enter__()
        training.step(0)
        with pytest.raises(SessionError, match="on the thread that it began on"):
            elsewhere.submit(step.__exit__, None, None, None).result()
        step.__exit__(None, None, None)
        training.steps(session, range(1, 3))
        assert len(session.history) == 3


def test_a_step_without_anything_in_it_is_none_the_worse(training: Training) -> None:
    with training.session() as session:
        for _ in range(10):
            with session.step():
                pass


def test_a_step_that_cannot_begin_leaves_the_session_as_it_was(training: Training) -> None:
    with training.session() as session:
        with (
            torch.autograd.graph.disable_saved_tensors_hooks("not here"),
            pytest.raises(RuntimeError, match="not here"),
            session.step(),
        ):
            pass
        assert not any(module._forward_hooks for module in training.model.modules())
        training.steps(session, range(2))


def test_two_sessions_may_not_share_parameters(training: Training) -> None:
    with training.session(), pytest.raises(SessionError, match="another session"):
        outgrow.Session(nn.Sequential(training.model), budget="1GiB")


# --- policies of the program's own ---


def moving(**moments: Any) -> Callable[[Problem], Plan]:
    """A plan that moves the first value that may move, at odd moments."""

    def plan(problem: Problem) -> Plan:
        usual = Offload(problem.candidates[0].value, problem.candidates[0].first_pack, -1, -1, 0)
        return Plan("mine", problem, (replace(usual, **moments),), True, 0)

    return plan


NOT_PLANS: dict[str, tuple[Callable[[Problem], Any], str]] = {
    "nothing": (lambda problem: None, "gave NoneType for a plan"),
    "a value that is not there": (moving(value=10**6), "moves value 1000000"),
    "a value below all": (lambda problem: make_plan("mine", problem, (Offload(-1, 0, -1, -1, 0),)), "moves value -1"),
    "a tick that is not there": (moving(out_tick=10**6), "in a way that its trace does not allow"),
    "a moment in words": (moving(in_tick="now"), "in a way that its trace does not allow"),
    "what nothing makes": (lambda problem: make_plan("mine", problem, (), (Recompute(0, 0),)), "drops value 0"),
    "a parameter that is made anew": (
        lambda problem: make_plan("mine", problem, (), parks=(Park(0, 0, -1, 0, remade=True),)),
        "drops value 0, which its trace cannot make anew",
    ),
    "ops that are not there": (lambda problem: make_plan("mine", problem, (), reuses=(10**6,)), "names ops"),
    "another step's": (
        lambda problem: make_plan(
            "mine", replace(problem, trace=Trace.from_document(problem.trace.to_document())), ()
        ),
        "for another step",
    ),
}


@pytest.mark.parametrize(("plan", "said"), NOT_PLANS.values(), ids=NOT_PLANS)
def test_a_policy_that_makes_no_plan_is_an_error_and_the_step_was_plain_pytorchs(
    training: Training, plan: Callable[[Problem], Any], said: str
) -> None:
    mine = SimpleNamespace(name="mine", plan=plan)
    with training.session(policy=mine) as session, pytest.raises(InvalidPlan, match="'mine'") as caught:
        training.steps(session, range(1))
    assert said in str(caught.value)
    plain = Training()
    plain.step(0)
    assert all(map(torch.equal, training.parameters, plain.parameters))
    with pytest.raises(InvalidPlan, match="'mine'"):
        outgrow.plan(traced_on_fakes(), budget="1GiB", policy=mine)  # type: ignore[arg-type]


def traced_on_fakes() -> Trace:
    """A step of the same network, on fake tensors."""

    def make_step() -> outgrow.TrainingStep:
        training = Training()
        return outgrow.TrainingStep(training.model, training.optimizer, lambda: training.step(0))

    return outgrow.trace(make_step)
