"""Training under a budget equals plain PyTorch to the bit, whatever the model does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from outgrow import Session
from outgrow.planning.plan import Plan
from outgrow.planning.policies import Policy
from outgrow.planning.policies.vdnn import VdnnAll
from outgrow.planning.problem import Problem
from steps import (
    Make,
    RecomputeAll,
    Training,
    assert_equal_to_plain,
    budget_for,
    momentum,
    supervised,
    train_in_session,
    train_plain,
)

POLICIES = (
    "auto",
    "lru",
    "vdnn-all",
    "vdnn-conv",
    "vdnn-dyn",
    "superneurons",
    "layrub",
    "accudnn",
    "checkpoint",
    RecomputeAll(),
)


def conv_net(*, inplace: bool = False, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=inplace),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=inplace),
        nn.MaxPool2d(2),
        nn.Dropout(dropout),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_convolutional_network_trains_the_same_under_every_policy(policy: str | Policy, inplace: bool) -> None:
    assert_equal_to_plain(supervised(lambda: conv_net(inplace=inplace), optimize=momentum), policy=policy)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_dropout_draws_the_same_random_numbers(policy: str | Policy) -> None:
    assert_equal_to_plain(
        supervised(lambda: conv_net(dropout=0.3), optimize=partial(torch.optim.AdamW, lr=0.01)), policy=policy
    )


def test_keeping_everything_changes_nothing() -> None:
    make = supervised(lambda: conv_net(dropout=0.3, inplace=True), optimize=momentum)
    ours, summaries = train_in_session(make, 5, budget="1GiB")
    assert ours == train_plain(make, 5)
    assert summaries[-1].offloaded_bytes == 0


def test_bfloat16_autocast() -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    assert_equal_to_plain(supervised(conv_net, forward))


def test_a_type_for_which_no_library_has_convolutions_holds_the_budget_from_the_first_step() -> None:
    """PyTorch multiplies all patches then, which take many times what they are made of."""

    def build() -> nn.Module:
        return conv_net().double()

    assert_equal_to_plain(supervised(build, lambda model, x, k: model(x.double())))


def test_windows_larger_than_the_maps_hold_the_budget_from_the_first_step() -> None:
    """Some CPUs then sum up gradients of weights in many times the memory that the weights take."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(16),
            nn.Conv2d(32, 160, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(160, 160, 3, padding=1),
            nn.Flatten(),
            nn.Linear(640, 10),
        )

    assert_equal_to_plain(supervised(build), share=0.2)


def test_windows_of_one_channel_each_hold_the_budget_from_the_first_step() -> None:
    """Where channels come last the gradient of such a weight is summed up in up to 256 times its own bytes."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.MaxPool2d(4),
            *[nn.Conv2d(64, 64, 7, padding=3, groups=64) for _ in range(4)],
            nn.Flatten(),
            nn.Linear(1024, 10),
        ).to(memory_format=torch.channels_last)

    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        return model(x.contiguous(memory_format=torch.channels_last))

    assert_equal_to_plain(supervised(build, forward, shape=(16, 3, 16, 16)), share=0.7)


def test_channels_last() -> None:
    def build() -> nn.Module:
        return conv_net().to(memory_format=torch.channels_last)

    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        return model(x.to(memory_format=torch.channels_last))

    assert_equal_to_plain(supervised(build, forward), policy="vdnn-all")


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).add_(1.5).sigmoid_()
        g = self.b(h)
        g += h
        g[:, 3:7] = 2.0
        g.clamp_(-3, 3).tanh_()
        return self.c(g)


def test_in_place_operators() -> None:
    assert_equal_to_plain(supervised(InPlace, shape=(64, 64)), policy="vdnn-all")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.mix = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x[:, :, 0, 0].abs() * 49).long().clamp_(0, 49)
        h = self.mix(self.mix(self.embed(tokens)).tanh())
        return F.linear(h.mean(1), self.embed.weight)


def test_shared_weights() -> None:
    assert_equal_to_plain(supervised(Tied), policy="vdnn-all")


class Views(nn.Module):
    """Saves windows of all kinds: transposed, strided, overlapping, expanded, with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x.flatten(1)[:, :32])
        t = h.t() * h.t()[:, :1]
        windows = h.as_strided((h.shape[0], 60, 5), (64, 1, 1)) * h[:, 2:62].unsqueeze(-1)
        strided = h[:, ::2] * h[:, 1::2]
        wide = h[:1].expand_as(h) * h
        diagonal = torch.diagonal(h[:8, :8]) ** 2
        total = t.t() + wide + windows.sum(2).repeat(1, 2)[:, :64]
        return self.b(total) + strided.sum() + diagonal.mean()


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_transposed_and_overlapping_views(policy: str | Policy) -> None:
    assert_equal_to_plain(supervised(Views), policy=policy)


def test_gradient_accumulation_over_two_forward_passes() -> None:
    def make() -> Training:
        model = conv_net(inplace=True)
        opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def run(k: int) -> torch.Tensor:
            total = torch.zeros(())
            for part in range(2):
                generator = torch.Generator().manual_seed(2 * k + part)
                x = torch.randn(8, 3, 32, 32, generator=generator)
                y = torch.randint(0, 10, (8,), generator=generator)
                loss = F.cross_entropy(model(x), y) / 2
                loss.backward()
                total += loss.detach()
            opt.step()
            opt.zero_grad()
            return total

        return Training([model], [opt], run)

    assert_equal_to_plain(make)


def test_two_forward_passes_before_one_backward() -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        return (model(x) - model(x.flip(3))).pow(2).mean() + model(x).pow(2).mean()

    assert_equal_to_plain(supervised(lambda: conv_net(inplace=True), forward), policy="vdnn-all")


def test_a_last_smaller_batch() -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        x = x[:3] if k % 3 == 2 else x
        return model(x).pow(2).mean()

    assert_equal_to_plain(supervised(lambda: conv_net(inplace=True), forward), steps=9)


def test_a_larger_batch_than_any_before_stays_inside_the_budget() -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        return model(x[:3] if k < 4 else x).pow(2).mean()

    make = supervised(lambda: conv_net(inplace=True), forward)
    largest = budget_for(supervised(lambda: conv_net(inplace=True), lambda m, x, k: m(x).pow(2).mean()), 0.8)
    ours, summaries = train_in_session(make, 9, budget=largest)
    assert ours == train_plain(make, 9)
    assert all(summary.measured_peak_bytes <= largest for summary in summaries)


@pytest.mark.parametrize("policy", ["auto", "lru", RecomputeAll()], ids=str)
@pytest.mark.parametrize("by_mask", [False, True], ids=["nonzero", "mask"])
def test_saved_sizes_that_depend_on_the_data(policy: str | Policy, by_mask: bool) -> None:
    sizes: list[int] = []

    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        maps = model[0](x * (1 + k % 3) - 0.3 * k)
        if by_mask:
            picked = maps[maps > 0.2]
        else:
            picked = maps.flatten()[(maps.flatten() > 0.2).nonzero().squeeze(1)]
        sizes.append(picked.numel())
        return (torch.sigmoid(picked * 2) * picked.exp()).mean() + model(maps[:, :3].tanh()).pow(2).mean()

    make = supervised(lambda: conv_net(inplace=True), forward)
    largest = max(budget_for(make_from(make, k), 0.7) for k in range(7))
    plain = train_plain(make, 7)
    ours, summaries = train_in_session(make, 7, budget=largest, policy=policy)
    assert ours == plain
    assert len(set(sizes[-7:])) == 7
    assert all(summary.measured_peak_bytes <= largest for summary in summaries)


def make_from(make: Make, first: int) -> Make:
    """The same training, which begins with step number `first`."""

    def later() -> Training:
        training = make()
        return Training(training.models, training.optimizers, lambda k: training.run(k + first))

    return later


@pytest.mark.parametrize("policy", ["auto", "lru", RecomputeAll()], ids=str)
def test_a_profiler_of_the_users_in_the_first_step(policy: str | Policy) -> None:
    make = supervised(lambda: conv_net(inplace=True, dropout=0.2), optimize=momentum)

    def profiled_at_first() -> Training:
        training = make()

        def run(k: int) -> torch.Tensor:
            if k > 0:
                return training.run(k)
            with torch.profiler.profile(profile_memory=True) as profiler:
                loss = training.run(k)
            assert any("convolution_backward" in event.key for event in profiler.key_averages())
            return loss

        return Training(training.models, training.optimizers, run)

    budget = budget_for(make, 0.6)
    ours, summaries = train_in_session(profiled_at_first, 6, budget=budget, policy=policy)
    assert ours == train_plain(make, 6)
    assert all(summary.measured_peak_bytes <= budget for summary in summaries[1:])
    # What ops need was hidden in the first step, and is known now: the plan's peak is what was measured.
    assert summaries[-1].predicted_peak_bytes is not None
    assert abs(summaries[-1].measured_peak_bytes / summaries[-1].predicted_peak_bytes - 1) < 0.05


def test_evaluation_under_no_grad_between_and_inside_steps() -> None:
    def make() -> Training:
        model = conv_net(inplace=True, dropout=0.2)
        opt = torch.optim.SGD(model.parameters(), lr=0.01)

        def run(k: int) -> torch.Tensor:
            x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(k))
            loss = model(x).pow(2).mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            model.eval()
            with torch.no_grad():
                score = model(x).sum()
            model.train()
            return loss.detach() + score

        return Training([model], [opt], run)

    assert_equal_to_plain(make)


def test_retain_graph_runs_backward_twice() -> None:
    def make() -> Training:
        model = conv_net(inplace=True)
        opt = torch.optim.SGD(model.parameters(), lr=0.01)

        def run(k: int) -> torch.Tensor:
            x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(k))
            loss = model(x).pow(2).mean()
            loss.backward(retain_graph=True)
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        return Training([model], [opt], run)

    for policy in ("lru", "vdnn-all", RecomputeAll()):
        assert_equal_to_plain(make, policy=policy)


def test_create_graph_gradient_penalty() -> None:
    def make() -> Training:
        model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Softplus(), nn.Linear(128, 1))
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)

        def run(k: int) -> torch.Tensor:
            x = torch.randn(64, 32, generator=torch.Generator().manual_seed(k), requires_grad=True)
            out = model(x).sum()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            loss = out.pow(2) * 1e-3 + (slope.norm(dim=1) - 1).pow(2).mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        return Training([model], [opt], run)

    for policy in ("lru", "vdnn-all", RecomputeAll()):
        assert_equal_to_plain(make, policy=policy)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * x
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        return grad * (y + 2 * x * x)


def test_a_custom_autograd_function() -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        return model(Cube.apply(x * 0.5))

    assert_equal_to_plain(supervised(conv_net, forward), policy="vdnn-all")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(32, 64, num_layers=2, dropout=0.1), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.rnn(x[:, 0].transpose(0, 1))
        return self.head(out[-1])


@pytest.mark.parametrize("policy", ["lru", "vdnn-all"])
def test_an_lstm(policy: str | Policy) -> None:
    assert_equal_to_plain(supervised(Recurrent), policy=policy)


def test_a_compiled_submodule() -> None:
    def build() -> nn.Module:
        model = conv_net()
        model[3] = torch.compile(model[3], backend="aot_eager")
        return model

    assert_equal_to_plain(supervised(build), policy="vdnn-all")


def test_the_compiler_never_looks_into_a_session_that_compiled_code_calls() -> None:
    module = torch.compile(nn.Sequential(nn.Linear(256, 256), nn.Tanh()), backend="aot_eager")
    model = nn.Sequential(nn.Linear(256, 256), module, nn.Linear(256, 256))
    counters.clear()
    with Session(model, budget=6 << 20, policy="vdnn-all") as session:
        for _ in range(3):
            with session.step():
                model(torch.randn(512, 256)).sum().backward()
    assert counters["frames"] == {"total": 1, "ok": 1}, "the module's own, once"


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra, self.head = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
        h = self.body(x).tanh()
        for _ in range(k % 3):
            h = self.extra(h).relu() + h
        return self.head(h)


@pytest.mark.parametrize("policy", ["auto", "vdnn-all"])
def test_a_branch_that_changes_from_step_to_step(policy: str | Policy) -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        return model(x, k)

    plain = train_plain(supervised(Branching, forward, shape=(64, 64)), 12)
    for share in (0.7, 0.9):
        full = supervised(Branching, lambda m, x, k: m(x, 2), shape=(64, 64))
        ours, _ = train_in_session(
            supervised(Branching, forward, shape=(64, 64)), 12, budget=budget_for(full, share), policy=policy
        )
        assert ours == plain


def test_a_gan_with_two_models_and_two_optimizers() -> None:
    def make() -> Training:
        maker = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
        judge = nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
        opts = [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9) for net in (maker, judge)]

        def run(k: int) -> torch.Tensor:
            z = torch.randn(64, 16, generator=torch.Generator().manual_seed(k))
            fake = maker(z)
            judged = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(z.repeat(1, 2))).mean()
            judged.backward()
            opts[1].step()
            opts[1].zero_grad()
            made = F.softplus(-judge(fake)).mean()
            made.backward()
            opts[0].step()
            for opt in opts:
                opt.zero_grad()
            return judged.detach() + made.detach()

        return Training([maker, judge], opts, run)

    for policy in ("lru", "vdnn-all", RecomputeAll()):
        assert_equal_to_plain(make, policy=policy)


def test_gradients_that_are_zeroed_before_the_step() -> None:
    def make() -> Training:
        model = conv_net()
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)

        def run(k: int) -> torch.Tensor:
            opt.zero_grad()
            x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(k))
            loss = model(x).pow(2).mean()
            loss.backward()
            opt.step()
            return loss.detach()

        return Training([model], [opt], run)

    assert_equal_to_plain(make, steps=5)


def test_a_write_that_autograd_does_not_see_is_seen_by_the_backward_pass_as_in_plain_pytorch() -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        h = model[0](x)
        y = h * h
        h.data.mul_(1.5)
        return model[1](y).pow(2).mean()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 10))

    for policy in ("lru", "vdnn-all", RecomputeAll()):
        assert_equal_to_plain(supervised(build, forward, shape=(64, 64)), policy=policy)


def test_a_tensor_that_the_user_keeps_is_not_copied_back_to_another_place() -> None:
    kept: list[torch.Tensor] = []

    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        h = model[0](x)
        kept[:] = [h]
        return model[1](h.relu() * h).pow(2).mean()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 10))

    assert_equal_to_plain(supervised(build, forward, shape=(64, 64)), policy="vdnn-all")


def test_backward_after_the_step_context_and_after_close() -> None:
    def losses(session_budget: int | None) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        import outgrow

        model = conv_net()
        x = torch.randn(8, 3, 32, 32)
        if session_budget is None:
            model(x).pow(2).mean().backward()
        else:
            session = outgrow.Session(model, budget=session_budget, policy="vdnn-all", least_moved_bytes=1)
            with session.step():
                model(x).pow(2).mean().backward()
            model.zero_grad()
            with session.step():
                loss = model(x).pow(2).mean()
            session.close()
            loss.backward()
        return tuple(parameter.grad.clone() for parameter in model.parameters())

    plain = losses(None)
    assert all(torch.equal(a, b) for a, b in zip(plain, losses(4 << 20), strict=True))


# --- steps that are not what they were ---


class TailOfLarger(nn.Module):
    """Saves windows of one size on storages whose size may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        self.times = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        for layer in self.layers:
            larger = torch.cat([x.new_zeros((self.times - 1) * rows, 64), x])
            x = torch.tanh(layer(larger[-rows:]))
        return x


def test_windows_of_the_same_size_on_storages_that_grew() -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        assert isinstance(model, TailOfLarger)
        model.times = 1 if k < 3 else 3
        return model(x).pow(2).mean()

    make = supervised(TailOfLarger, forward, shape=(64, 64))
    ours, _ = train_in_session(make, 6, budget="1GiB", policy="vdnn-all")
    assert ours == train_plain(make, 6)


class OnTopOfEachOther:
    """A policy that puts all values into one place of the file."""

    name = "careless"

    def plan(self, problem: Problem) -> Plan:
        plan = VdnnAll().plan(problem)
        return replace(plan, offloads=tuple(replace(item, offset=0) for item in plan.offloads))


def test_places_in_the_file_are_not_taken_from_a_policy() -> None:
    make = supervised(conv_net)
    ours, summaries = train_in_session(make, 4, budget="1GiB", policy=OnTopOfEachOther())
    assert ours == train_plain(make, 4)
    assert summaries[-1].offloaded_bytes > 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_strided_nested_tensor_passes_through() -> None:
    def make() -> Training:
        model = nn.Linear(4, 4)

        def run(k: int) -> torch.Tensor:
            nested = torch.nested.as_nested_tensor([model(torch.ones(n, 4)) for n in (2, 3)])
            loss = nested.sin().to_padded_tensor(0.0).sum()
            loss.backward()
            return loss.detach()

        return Training([model], [], run)

    ours, _ = train_in_session(make, 3, budget="1GiB", policy="lru")
    assert ours == train_plain(make, 3)
