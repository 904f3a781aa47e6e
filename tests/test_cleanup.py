"""A session leaves nothing behind, whatever ended it; and what outlives a step or a session still works."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scipy.optimize  # noqa: F401 - it and the next change the filters of warnings when they are first loaded
import torch
import torch._dynamo
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as module_hooks

import outgrow
from conftest import RunChild, child_command, open_files
from outgrow import SessionError
from outgrow.runtime.copies.cpu import DiskLane
from outgrow.runtime.tiers.disk import Slot

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]

BUDGET = 3 << 20  # of some 6 MiB that are alive at the peak


class Oops(Exception):
    """What the user's own code raises."""


class Faulty(nn.Module):
    """A small network whose forward or backward pass can be told to raise."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU())
        repeated = [layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.GELU())]
        self.second = nn.Sequential(*repeated)
        self.last = nn.Sequential(nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
        self.raises: str = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        if self.raises == "forward":
            raise Oops
        if self.raises == "backward":
            x.register_hook(_raise)
        return self.last(x)


def _raise(gradient: torch.Tensor) -> torch.Tensor:
    raise Oops


class Training:
    """A network, its optimizer and one batch a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Faulty()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        torch.manual_seed(1)

    def session(self, **options: Any) -> outgrow.Session:
        return outgrow.Session(self.model, self.optimizer, **{"budget": BUDGET, "policy": "vdnn-all", **options})

    def forward(self, k: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(k)
        x = torch.randn(8, 3, 32, 32, generator=generator)
        return F.cross_entropy(self.model(x), torch.randint(0, 10, (8,), generator=generator))

    def step(self, k: int) -> None:
        self.optimizer.zero_grad()
        self.forward(k).backward()
        self.optimizer.step()

    def steps(self, session: outgrow.Session | None, wanted: range) -> None:
        for k in wanted:
            if session is None:
                self.step(k)
            else:
                with session.step():
                    self.step(k)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and the state of the random number generator."""
        return {**copy.deepcopy(self.model.state_dict()), "random": torch.get_rng_state()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def plainly_trained(steps: int) -> dict[str, torch.Tensor]:
    training = Training()
    training.steps(None, range(steps))
    return training.state


def surroundings(training: Training) -> dict[str, Any]:
    """All that a session could leave behind in its process."""
    hook_tables = [name for name in vars(module_hooks) if name.startswith("_global_") and name.endswith("hooks")]
    own_tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": open_files(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "global module hooks": {name: len(getattr(module_hooks, name)) for name in hook_tables},
        "module hooks": [len(getattr(item, name)) for item in training.model.modules() for name in own_tables],
        "optimizer hooks": len(training.optimizer._optimizer_step_pre_hooks),
        "profiler": torch.autograd._profiler_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "oneDNN": torch.backends.mkldnn.enabled,
        "stack size": threading.stack_size(),
        "switch interval": sys.getswitchinterval(),
        "hooks of the interpreter": (sys.excepthook, threading.excepthook, sys.gettrace(), sys.getprofile()),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "warnings": list(warnings.filters),
    }


@pytest.fixture
def training() -> Training:
    """Everything that plain PyTorch loads or opens by itself is there."""
    training = Training()
    training.step(0)
    assert open_files() == open_files()
    return Training()


# --- nothing is left ---


@pytest.mark.parametrize("policy", ["keep", "lru", "vdnn-all"])
def test_a_closed_session_leaves_nothing_behind(training: Training, policy: str) -> None:
    before = surroundings(training)
    with training.session(policy=policy, budget="1GiB" if policy == "keep" else BUDGET) as session:
        training.steps(session, range(4))
        assert policy == "keep" or session.summary().offloaded_bytes > 0
        assert surroundings(training) != before  # so that the comparison would see it
    assert surroundings(training) == before
    assert same(training.state, plainly_trained(4))


def test_between_steps_there_are_no_hooks_and_no_modes(training: Training) -> None:
    before = surroundings(training)
    with training.session() as session:
        for k in range(3):
            training.steps(session, range(k, k + 1))
            now = surroundings(training)
            assert {name for name in now if now[name] != before[name]} == {"threads", "files"}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("when", [0, 3], ids=["recorded step", "planned step"])
def test_a_step_that_raised_leaves_nothing_behind(training: Training, where: str, when: int) -> None:
    before = surroundings(training)
    with training.session() as session:
        training.steps(session, range(when))
        training.model.raises = where
        with pytest.raises(Oops):
            training.steps(session, range(when, when + 1))
    assert surroundings(training) == before


def test_an_interrupted_step_leaves_nothing_behind(training: Training) -> None:
    before = surroundings(training)
    training.model.second[2].register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background begin without it
    try:
        with training.session() as session, pytest.raises(KeyboardInterrupt):
            training.steps(session, range(1))
    finally:
        signal.signal(signal.SIGINT, usual)
    training.model.second[2]._forward_hooks.clear()
    assert surroundings(training) == before


@pytest.mark.usefixtures("no_collection")
def test_a_session_that_nobody_holds_any_more_leaves_nothing_behind(training: Training) -> None:
    before = surroundings(training)
    session = training.session()
    training.steps(session, range(3))
    del session
    assert surroundings(training) == before
    training.session().close()  # the model is free again


@pytest.mark.usefixtures("training", "no_collection")
@pytest.mark.parametrize("closes", [True, False])
def test_a_model_that_nobody_holds_any_more_is_gone_with_its_session(closes: bool) -> None:
    training = Training()
    session = training.session()
    training.steps(session, range(3))
    parts = [weakref.ref(part) for part in (session, training.model, *training.model.parameters())]
    if closes:
        session.close()
    del session, training
    assert [part() for part in parts] == [None] * len(parts)


@pytest.mark.usefixtures("training", "no_collection")
def test_a_session_that_is_closed_and_asked_for_figures_holds_no_model(tmp_path: Path) -> None:
    training = Training()
    session = training.session()
    training.steps(session, range(3))
    session.close()
    parts = [weakref.ref(part) for part in (training.model, *training.model.parameters())]
    del training
    assert [part() for part in parts] == [None] * len(parts)
    assert session.summary().step_seconds > 0
    session.report(tmp_path / "report.html")


def test_a_session_that_could_not_be_opened_leaves_nothing_behind(training: Training) -> None:
    before = surroundings(training)
    for options in ({"budget": 1000}, {"budget": "lots"}, {"policy": "best"}, {"spill_dir": "/nowhere"}):
        with pytest.raises(outgrow.OutgrowError):
            training.session(**options)
    gc.collect()
    assert surroundings(training) == before
    training.session().close()


left_open: Any  # what a program still has when it ends
left_alive: Any


def train_and_just_end() -> str:
    """A program that never closes its session, and still holds a graph."""
    global left_open, left_alive
    training = Training()
    left_open = training.session()
    training.steps(left_open, range(3))
    with left_open.step():
        left_alive = training.forward(3)
    return "done"


def test_a_program_that_never_closes_its_session_ends_by_itself() -> None:
    start = time.monotonic()
    done = subprocess.run(child_command(train_and_just_end), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, '"done"\n', "")
    assert time.monotonic() - start < 50


def end_while_a_copy_is_under_way() -> str:
    global left_open
    left_open = DiskLane("slow", _copy_slowly, lambda values: None)  # what a session is left with that an error ends
    left_open.submit(Slot(0, 1, planned=False), 0)
    return "done"


def _copy_slowly(slot: Slot, address: int) -> None:
    time.sleep(0.5)
    print("copied", flush=True)


def test_a_program_does_not_end_under_a_copy() -> None:
    done = subprocess.run(child_command(end_while_a_copy_is_under_way), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, '"done"\ncopied\n')


# --- after a step that failed ---


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("when", [0, 1, 3])
def test_after_a_step_that_raised_training_goes_on_as_plain_pytorch_would(where: str, when: int) -> None:
    def train(session: outgrow.Session | None, training: Training) -> dict[str, torch.Tensor]:
        for k in range(6):
            training.model.raises = where if k == when else ""
            try:
                training.steps(session, range(k, k + 1))
            except Oops:
                assert k == when
        return training.state

    plain = train(None, Training())
    training = Training()
    with training.session() as session:
        ours = train(session, training)
        assert session.summary().offloaded_bytes > 0
    assert same(ours, plain)


@pytest.mark.usefixtures("no_collection")
def test_the_memory_of_a_step_that_raised_is_free_at_once(training: Training) -> None:
    def fail() -> None:
        with pytest.raises(Oops):
            training.steps(session, range(2, 3))

    with training.session() as session:
        training.steps(session, range(2))
        training.optimizer.zero_grad()
        live = session.live_bytes
        for where in ("forward", "backward"):
            training.model.raises = where
            fail()
            training.optimizer.zero_grad()
            # A copy that was under way may still hold its value.
            assert session.live_bytes <= live + (1 << 20)


# --- models can be copied ---


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_a_model_can_be_copied_during_and_after_a_session(
    training: Training, duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    x = torch.randn(2, 3, 32, 32)

    def is_like_the_model(other: nn.Module) -> bool:
        hooks = sum(len(item._forward_hooks) + len(item._forward_pre_hooks) for item in other.modules())
        return hooks == 0 and torch.equal(other.eval()(x), copy.deepcopy(training.model).eval()(x))

    with training.session() as session:
        assert is_like_the_model(duplicate(training.model))
        for k in range(3):  # the first are recorded
            with session.step():
                training.step(k)
                other = duplicate(training.model)
            assert is_like_the_model(other)
    assert is_like_the_model(duplicate(training.model))


# --- what outlives a step or a session ---


def test_a_graph_that_outlives_its_session_gives_the_right_gradient() -> None:
    plain = Training()
    plain.steps(None, range(3))
    plain.optimizer.zero_grad()
    plain.forward(3).backward()
    training = Training()
    with training.session() as session:
        training.steps(session, range(3))
        training.optimizer.zero_grad()
        with session.step():
            loss = training.forward(3)
        away = [entry for entry in session._pool.entries() if entry.storage is None]
        assert away
    loss.backward()
    assert same(gradients(training.model), gradients(plain.model))


def test_a_graph_keeps_the_session_that_its_values_need(training: Training) -> None:
    before = surroundings(training)
    plain = Training()
    plain.forward(0).backward()
    training = Training()
    session = training.session()
    with session.step():
        loss = training.forward(0)
    del session
    gc.collect()
    loss.backward()
    assert same(gradients(training.model), gradients(plain.model))
    del loss
    gc.collect()
    assert surroundings(training) == before


def test_closing_under_a_budget_too_small_for_all_values_brings_them_back_all_the_same() -> None:
    plain = Training()
    losses = [plain.forward(k) for k in range(4)]
    sum(losses).backward()
    training = Training()
    with training.session() as session:
        losses = []
        for k in range(4):
            with session.step():
                losses.append(training.forward(k))
    sum(losses).backward()
    assert same(gradients(training.model), gradients(plain.model))


@pytest.mark.parametrize("policy", ["lru", "vdnn-all"])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_graph_may_be_used_again_in_later_steps(policy: str, first: int) -> None:
    """The plan of a later step must not write over what lies on the disk for an earlier one."""

    offloaded = []

    def train(session: outgrow.Session | None, training: Training) -> dict[str, torch.Tensor]:
        training.steps(session, range(first))
        kept = []
        for k in range(first, first + 3):
            with session.step() if session is not None else torch.enable_grad():
                kept.append(training.forward(k))
                kept[-1].backward(retain_graph=True)
            offloaded.append(0 if session is None else session.summary().offloaded_bytes)
        training.optimizer.zero_grad()
        with session.step() if session is not None else torch.enable_grad():
            for loss in kept:
                loss.backward()
        return gradients(training.model)

    plain = train(None, Training())
    training = Training()
    with training.session(policy=policy) as session:
        ours = train(session, training)
    assert all(offloaded[3:])
    assert same(ours, plain)


def forked_in_a_step() -> int:
    """How a child ended that went on with the step in which it was made."""
    training = Training()
    with training.session(policy="lru") as session:
        training.steps(session, range(2))
        with session.step():
            loss = training.forward(2)
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                try:
                    loss.backward()
                except BaseException as error:
                    os._exit(3 if isinstance(error, outgrow.SessionError) else 4)
                os._exit(5)
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_that_is_forked_in_a_step_says_that_it_cannot_train(run_child: RunChild) -> None:
    """It has no threads that copy, and the spill file is not its own.

    In a process of its own: where autograd has threads, of other tests, PyTorch refuses all of a child's passes.
    """
    assert run_child(forked_in_a_step) == 3


def test_a_graph_that_is_dropped_in_a_later_step_does_not_disturb_it() -> None:
    training = Training()
    with training.session() as session:
        for k in range(5):
            with session.step():
                training.optimizer.zero_grad()
                unused = training.forward(k)
                training.forward(k).backward()
                training.optimizer.step()
        del unused
        ours = training.state
    plain = Training()
    for k in range(5):
        plain.optimizer.zero_grad()
        plain.forward(k)
        plain.forward(k).backward()
        plain.optimizer.step()
    assert same(ours, plain.state)


def test_a_session_may_be_used_on_another_thread_than_it_was_made_on() -> None:
    training = Training()
    with training.session() as session:
        worker = threading.Thread(target=training.steps, args=(session, range(4)))
        worker.start()
        worker.join()
        assert session.summary().offloaded_bytes > 0
        assert session.peak_bytes <= BUDGET
    assert same(training.state, plainly_trained(4))


def test_a_closed_session_can_be_asked_for_its_figures_but_not_for_steps(training: Training) -> None:
    with training.session() as session:
        training.steps(session, range(2))
    assert session.summary().step_seconds > 0
    with pytest.raises(SessionError, match="closed"):
        training.steps(session, range(2, 3))
