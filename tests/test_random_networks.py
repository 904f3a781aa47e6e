"""Random networks under random plans: gradients equal plain PyTorch's to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import outgrow
import outgrow.session.recorded
from outgrow.planning.floor import needed_curve
from outgrow.planning.problem import Problem
from outgrow.tracing.liveness import plain_profile
from random_networks import INPUT_CHANNELS, build, descriptions
from steps import RandomDecisions

pytestmark = pytest.mark.usefixtures("one_thread", "known_machine")

HARDWARE = outgrow.Hardware("any", 1 << 40, 1e11, 1e10, 1e9, 1e9)
# Recorded, planned with every recipe proved, planned anew and proved; the last trusts the proofs and lets ops pass.
STEPS = 4


@pytest.fixture(scope="module")
def known_machine() -> Iterator[None]:
    """The plans are random: sessions need not measure the machine for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outgrow.session.recorded, "this_machine", lambda _: HARDWARE)
        yield


def run(model: nn.Module, k: int, batch: int) -> None:
    x = torch.randn(batch, INPUT_CHANNELS, 8, 8, generator=torch.Generator().manual_seed(k))
    model(x).pow(2).mean().backward()


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    found = [None if item.grad is None else item.grad.clone() for item in model.parameters()]
    model.zero_grad()
    return found


def same(left: list[torch.Tensor | None], right: list[torch.Tensor | None]) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.equal(a.nan_to_num(7), b.nan_to_num(7)))
        for a, b in zip(left, right, strict=True)
    )


_CONV = ("chain", ("conv",), ("activation", "gelu"), ("norm", "batch"), ("norm", "batch"), ("linear",))
_CHAIN = ("chain", ("linear",), ("activation", "gelu"), ("lambda", 14), ("lambda", 0), ("linear",))
# One `linear` is a product of several ops, in the middle of which one value leaves and another comes back.
_MOVES_IN_AN_OP = (
    "concatenation",
    ("residual", ("chain", _CONV, _CONV, _CHAIN)),
    ("chain", ("conv",), ("activation", "gelu"), ("linear",), ("norm", "batch"), ("linear",)),
)


# 50 by default; of these `make fuzz` tries five times as many.
EXAMPLES = settings().max_examples // 2


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=EXAMPLES)
@given(description=descriptions, seed=st.integers(0, 2**32 - 1), tightness=st.floats(0, 1))
@example(description=_MOVES_IN_AN_OP, seed=191034717, tightness=0.0003)
def test_gradients_equal_plain_pytorch_to_the_bit(description: tuple, seed: int, tightness: float) -> None:
    assert_equal(description, seed, tightness, [2] * STEPS)


# Twice as many steps for each, and as many traces.
@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=EXAMPLES // 3)
@given(
    description=descriptions,
    seed=st.integers(0, 2**32 - 1),
    tightness=st.floats(0, 1),
    batches=st.lists(st.integers(1, 6), min_size=6, max_size=12),
)
def test_whatever_kind_of_step_comes_next(
    description: tuple, seed: int, tightness: float, batches: list[int]
) -> None:
    """Sizes come in any order, foretold or not: each is a kind of its own, or goes by the plan of a larger one."""
    assert_equal(description, seed, tightness, batches)


def assert_equal(description: tuple, seed: int, tightness: float, batches: list[int]) -> None:
    """Train on batches of these sizes: gradients must be plain PyTorch's, and peaks inside the budget."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(INPUT_CHANNELS, INPUT_CHANNELS, 1), build(description))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(seed)
    plain = []
    for k, batch in enumerate(batches):
        run(model, k, batch)
        plain.append(gradients(model))

    model.load_state_dict(before)
    largest = max(batches)
    trace = outgrow.trace(lambda: outgrow.TrainingStep(model, None, lambda: run(model, 0, largest)), fake=False)
    model.zero_grad()
    problem = Problem(trace, HARDWARE, 1, least_moved_bytes=1)
    least, most = max(needed_curve(problem)) * 1.1 + 8192, plain_profile(trace).peak_bytes
    budget = int(least + max(0, most - least) * tightness)

    model.load_state_dict(before)
    torch.manual_seed(seed)
    with outgrow.Session(model, budget=budget, policy=RandomDecisions(seed), least_moved_bytes=1) as session:
        for k, batch in enumerate(batches):
            with session.step():
                run(model, k, batch)
            assert same(gradients(model), plain[k])
            # The first step of a kind guesses what ops need.
            assert session.summary().measured_peak_bytes <= budget or batch not in batches[:k]
