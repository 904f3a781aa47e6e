"""The networks of the list train the same, to the bit, under families of policies at 60% of their plain peaks.

`benchmarks/equality.py` trains every network under every policy.
"""

from __future__ import annotations

import pytest

from cases import CASES, training_of
from outgrow.planning.policies import Policy
from steps import RecomputeAll, budget_for, train_in_session, train_plain

# Of each family one; the networks take turns with its members.
FAMILIES: tuple[tuple[str | Policy, ...], ...] = (
    ("auto", "lru"),
    ("vdnn-all", "vdnn-conv", "vdnn-dyn"),
    ("checkpoint", RecomputeAll()),
    ("superneurons",),
    ("layrub",),
    ("accudnn",),
)
# One of each kind meets all families, the others `auto`'s.
OF_EACH_KIND = ("resnet-18", "gpt-2x64")
# And these without momentum, the last step left out: to make and to update their tens of millions of parameters takes
# most of their time.
OF_MANY_PARAMETERS = ("alexnet", "resnet-50", "inception-v4")
# AlexNet stands for the first two, whose layers are its own, and whose parameters are many times as many, ResNet-50
# for the third, whose blocks are its own, and the GPT for the last, which is made of the same blocks.
LIKE_OTHERS = ("overfeat", "vgg-16", "resnet-152", "vit-b16")
NETWORKS = [case for case in CASES if case[0] not in LIKE_OTHERS]
STEPS = 4  # cold, recorded under its first plan, under the plan of the steady step, and one that lets ops pass


@pytest.mark.parametrize(("name", "size", "batch"), NETWORKS, ids=[case[0] for case in NETWORKS])
def test_a_network_trains_the_same_under_families_of_policies(name: str, size: int, batch: int) -> None:
    make = training_of(name, size, batch, momentum=0.0 if name in OF_MANY_PARAMETERS else 0.9)
    steps = STEPS - (name in OF_MANY_PARAMETERS)
    plain = train_plain(make, steps)
    budget = budget_for(make, 0.6, least_moved_bytes=4096)
    turn = [case[0] for case in CASES].index(name)
    for family in FAMILIES if name in OF_EACH_KIND else FAMILIES[:1]:
        policy = family[turn % len(family)]
        ours, summaries = train_in_session(make, steps, budget=budget, policy=policy, least_moved_bytes=4096)
        assert ours == plain, policy
        assert all(summary.measured_peak_bytes <= budget for summary in summaries), policy
