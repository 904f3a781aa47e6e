"""Every network of the list trains the same, to the bit, under every family of policies at 60% of its plain peak."""

from __future__ import annotations

import pytest
import torch

from outgrow.networks import find
from outgrow.planning.policies import Policy
from steps import Make, RecomputeAll, Training, budget_for, train_in_session, train_plain

# Name, input size, batch: small inputs, and small depths for the deepest. Every builder of the list is here.
CASES = (
    ("alexnet", 64, 2),
    ("overfeat", 32, 1),
    ("vgg-16", 32, 2),
    ("vgg-116", 32, 1),
    ("googlenet", 64, 2),
    ("inception-v4", 48, 2),
    ("resnet-18", 32, 2),
    ("resnet-50", 64, 2),
    ("resnet-152", 32, 2),
    ("wrn-28-10", 8, 2),
    ("densenet-121", 32, 2),
    ("unet", 32, 1),
    ("vit-b16", 16, 2),
    ("gpt-2x64", 64, 2),
)
# Of each family one; the networks take turns with its members.
FAMILIES: tuple[tuple[str | Policy, ...], ...] = (
    ("auto", "lru"),
    ("vdnn-all", "vdnn-conv", "vdnn-dyn"),
    ("checkpoint", RecomputeAll()),
    ("superneurons",),
    ("layrub",),
    ("accudnn",),
)
STEPS = 4


def training_of(name: str, size: int, batch: int) -> Make:
    network = find(name)
    classes = network.classes if network.kind == "text" else 10

    def make() -> Training:
        model = network.build(size, classes)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        def run(k: int) -> torch.Tensor:
            x, y = network.sample(batch, size, classes, torch.Generator().manual_seed(k))
            loss = network.loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Training([model], [optimizer], run)

    return make


@pytest.mark.parametrize(("name", "size", "batch"), CASES, ids=[case[0] for case in CASES])
def test_a_network_trains_the_same_under_every_family_of_policies(name: str, size: int, batch: int) -> None:
    make = training_of(name, size, batch)
    plain = train_plain(make, STEPS)
    budget = budget_for(make, 0.6, least_moved_bytes=4096)
    turn = [case[0] for case in CASES].index(name)
    for family in FAMILIES:
        policy = family[turn % len(family)]
        ours, summaries = train_in_session(make, STEPS, budget=budget, policy=policy, least_moved_bytes=4096)
        assert ours == plain, policy
        assert all(summary.measured_peak_bytes <= budget for summary in summaries), policy
