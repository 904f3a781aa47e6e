"""Ctrl-C in a step: nobody is interrupted halfway, and who trains on trains the same."""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outgrow
from outgrow.errors import SessionError
from outgrow.planning.plan import Plan
from outgrow.planning.policies import find
from outgrow.planning.problem import Problem
from outgrow.runtime.tiers.disk import SpillFile
from steps import rise_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Stop(BaseException):
    """What the program's own handler raises."""


def stop(number: int, frame: FrameType | None) -> None:
    raise Stop


@pytest.fixture
def dropped() -> Iterator[list[object]]:
    """What Python dropped, since it was raised where nobody can catch it. Ctrl-C raises `Stop`."""
    found: list[object] = []
    before, hook = signal.signal(signal.SIGINT, stop), sys.unraisablehook
    sys.unraisablehook = lambda what: found.append(what.exc_type)
    yield found
    sys.unraisablehook = hook
    signal.signal(signal.SIGINT, before)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [item for _ in range(8) for item in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())]
    model = nn.Sequential(nn.Linear(64, 256), *layers, nn.Linear(256, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    x, y = torch.randn(1024, 64, generator=generator), torch.randint(0, 10, (1024,), generator=generator)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def are_same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(mine, yours) for mine, yours in pairs)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("policy", ["auto", "vdnn-all"])
def test_a_copy_back_that_somebody_did_not_wait_for_spoils_nothing(
    policy: str, dropped: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hiccups, the user presses Ctrl-C, takes the state back to a snapshot and goes on."""
    read, hiccups = SpillFile.read, [False]

    def slow_read(file: SpillFile, slot: object, address: int) -> None:
        if hiccups[0]:
            hiccups[0] = False
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        read(file, slot, address)  # type: ignore[arg-type]

    monkeypatch.setattr(SpillFile, "read", slow_read)
    (plain, its), (model, optimizer) = make(), make()
    interruptions = 0
    with outgrow.Session(model, optimizer, budget="14MiB", policy=policy) as session:
        for k in range(8):
            snapshot = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            hiccups[0] = k > 2
            try:
                with session.step():
                    train(model, optimizer, k)
            except Stop:
                interruptions += 1
                model.load_state_dict(snapshot[0])
                optimizer.load_state_dict(snapshot[1])
                optimizer.zero_grad()
                with session.step():
                    train(model, optimizer, k)
            train(plain, its, k)
            assert are_same(model, plain), f"step {k}"
    assert interruptions > 2
    assert dropped == []


@pytest.mark.parametrize("budget", ["1GiB", "20MiB"])
def test_no_signal_is_lost_and_the_books_stay_right(budget: str, dropped: list[object]) -> None:
    (plain, its), (model, optimizer) = make(), make()
    draw = random.Random(0)
    raised, tries = 0, 12
    with outgrow.Session(model, optimizer, budget=budget) as session:
        for k in range(4):
            with session.step():
                train(model, optimizer, k)
            train(plain, its, k)
        alive = session.live_bytes
        seconds = session.summary().step_seconds
        for _ in range(tries):
            snapshot = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            timer = threading.Timer(draw.random() * seconds, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                for k in range(4, 20):
                    with session.step():
                        train(model, optimizer, k)
            except Stop:
                raised += 1
            timer.join()
            model.load_state_dict(snapshot[0])
            optimizer.load_state_dict(snapshot[1])
            optimizer.zero_grad()
        for k in range(4, 8):
            with session.step():
                train(model, optimizer, k)
            train(plain, its, k)
        assert session.live_bytes == alive
    assert are_same(model, plain)
    assert (raised, dropped) == (tries, [])


def test_handlers_are_the_programs_own_outside_of_steps(dropped: list[object]) -> None:
    model, optimizer = make()
    with outgrow.Session(model, optimizer, budget="1GiB") as session:
        for k in range(3):
            with session.step():
                train(model, optimizer, k)
            assert signal.getsignal(signal.SIGINT) is stop
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

        def hear(number: int, frame: FrameType | None) -> None:
            raise AssertionError("nobody sent this")

        with session.step():
            train(model, optimizer, 3)
            signal.signal(signal.SIGINT, hear)
        assert signal.getsignal(signal.SIGINT) is hear


def test_a_handler_of_ours_that_a_program_puts_back_after_the_step_does_nothing_else(dropped: list[object]) -> None:
    """Libraries that guard something set a handler and put back what they found."""
    model, optimizer = make()
    with outgrow.Session(model, optimizer, budget="20MiB") as session:
        with session.step():
            found = signal.signal(signal.SIGINT, signal.SIG_IGN)
            train(model, optimizer, 0)
        signal.signal(signal.SIGINT, found)
        for k in (1, 2):
            with pytest.raises(Stop):
                interrupt()
            with session.step():
                train(model, optimizer, k)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.001)


def test_who_arrives_while_a_session_closes_is_let_in_then(
    dropped: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make()
    session = outgrow.Session(model, optimizer, budget="20MiB")
    with session.step():
        train(model, optimizer, 0)
    close, closed = session._pool.close, []

    def slow_close() -> None:
        interrupt()
        close()
        closed.append(True)

    monkeypatch.setattr(session._pool, "close", slow_close)
    with pytest.raises(Stop):
        session.close()
    assert closed
    assert signal.getsignal(signal.SIGINT) is stop


def test_who_arrives_in_a_step_that_fails_at_its_end_is_let_in_then(
    dropped: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make()
    with outgrow.Session(model, optimizer, budget="20MiB") as session:
        end = session._executor.end

        def failing() -> object:
            interrupt()
            end()
            raise ValueError("too late")

        with monkeypatch.context() as patch:
            patch.setattr(session._executor, "end", failing)
            with pytest.raises(Stop) as caught, session.step():
                train(model, optimizer, 0)
        assert isinstance(caught.value.__context__, ValueError)
        with session.step():
            train(model, optimizer, 1)


def test_planning_is_interrupted_at_once(dropped: list[object]) -> None:
    """It may take seconds."""
    reached = []

    class Pondering:
        name = "pondering"
        is_at_work = True

        def plan(self, problem: Problem) -> Plan:
            if self.is_at_work:
                interrupt()
                reached.append(problem)
            return find("lru").plan(problem)

    (plain, its), (model, optimizer), policy = make(), make(), Pondering()
    with outgrow.Session(model, optimizer, budget="20MiB", policy=policy) as session:
        with pytest.raises(Stop), session.step():
            train(model, optimizer, 0)
        assert not reached
        policy.is_at_work = False
        for k in (1, 2, 3):
            with session.step():
                train(model, optimizer, k)
    for k in range(4):
        train(plain, its, k)
    assert are_same(model, plain)


def test_a_compiler_at_work_is_interrupted_at_once(dropped: list[object]) -> None:
    reached = []

    def compiling(graph: torch.fx.GraphModule, inputs: object) -> Any:
        interrupt()
        reached.append(graph)
        return graph.forward

    class Wave(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    wave = Wave()
    wave.compile(backend=compiling)
    model, optimizer = make()
    model = nn.Sequential(model[0], wave, *model[1:])
    with outgrow.Session(model, optimizer, budget="20MiB") as session:
        if not session._executor._compiled:
            pytest.skip("needs a C++ compiler")
        with pytest.raises(Stop), session.step():
            train(model, optimizer, 0)
    assert not reached
    torch._dynamo.reset()


def test_code_of_the_programs_own_is_interrupted_at_once(dropped: list[object]) -> None:
    model, optimizer = make()
    reached = False
    with outgrow.Session(model, optimizer, budget="20MiB") as session:
        try:
            with session.step():
                interrupt()
                reached = True
        except Stop:
            assert not reached
        else:
            raise AssertionError("nobody was interrupted")
        with session.step():
            train(model, optimizer, 0)


def test_steps_on_other_threads_leave_signals_alone(dropped: list[object]) -> None:
    model, optimizer = make()
    handlers = []

    def run() -> None:
        with outgrow.Session(model, optimizer, budget="20MiB") as session:
            for k in range(3):
                with session.step():
                    handlers.append(signal.getsignal(signal.SIGINT))
                    train(model, optimizer, k)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [stop] * 3


def test_steps_of_two_sessions_do_not_nest() -> None:
    (one, its), (other, others) = make(), make()
    with (
        outgrow.Session(one, its, budget="20MiB") as outer,
        outgrow.Session(other, others, budget="20MiB") as inner,
    ):
        with outer.step():
            with pytest.raises(SessionError, match="share one session"), inner.step():
                pass
            train(one, its, 0)
        with inner.step():
            train(other, others, 0)
    assert are_same(one, other)


def test_a_session_that_nobody_holds_is_closed_by_who_opens_the_next() -> None:
    model, optimizer = make()
    session = outgrow.Session(model, optimizer, budget="20MiB")
    with session.step():
        train(model, optimizer, 0)
    with pytest.raises(SessionError, match="close it first"):
        outgrow.Session(model, optimizer, budget="20MiB")
    del session
    with outgrow.Session(model, optimizer, budget="20MiB") as session, session.step():
        train(model, optimizer, 1)


@pytest.mark.parametrize("late", [False, True], ids=["retain_graph", "backward after the step"])
@pytest.mark.parametrize(("policy", "budget"), [("auto", "17MiB"), ("vdnn-all", "17MiB"), ("auto", "40MiB")])
def test_a_graph_that_outlives_its_step_leaves_for_the_next(policy: str, late: bool, budget: str) -> None:
    """It is there where the budget has room, and leaves where it has not, also where a plan keeps everything."""

    def run(session: outgrow.Session | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses: list[float] = []
        loss: torch.Tensor | None = None

        def step(k: int) -> None:
            nonlocal loss
            with nullcontext() if session is None else session.step():
                loss = model(torch.randn(1024, 64, generator=torch.Generator().manual_seed(k))).square().mean()
                if not late:
                    loss.backward(retain_graph=True)
                    optimizer.step()
                    optimizer.zero_grad()

        for k in range(6):
            if session is None or k < 3:
                step(k)
            else:
                highest = session.live_bytes + rise_of(partial(step, k))
                assert k == 3 or highest <= session.budget_bytes, f"step {k}"
            assert loss is not None
            if late:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = run(None, *make())
    model, optimizer = make()
    with outgrow.Session(model, optimizer, budget=budget, policy=policy) as session:
        assert run(session, model, optimizer) == expected
