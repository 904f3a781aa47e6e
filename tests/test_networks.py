"""Outgrow's networks are those of the papers: their sizes, what goes in and comes out, and their names."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from outgrow.errors import OutgrowError, UnknownNetwork
from outgrow.networks import find, names
from outgrow.networks.alexnet import AlexNet
from outgrow.networks.googlenet import GoogLeNet, GoogLeNetOutput
from outgrow.networks.gpt import GPT
from outgrow.networks.inception import InceptionV4
from outgrow.networks.overfeat import OverFeat
from outgrow.networks.resnet import ResNet, block_counts
from outgrow.networks.unet import UNet
from outgrow.networks.vgg import VGG
from outgrow.networks.vit import ViT
from outgrow.networks.wide_resnet import WideResNet

IMAGE_NETWORKS = tuple(name for name in names() if find(name).kind != "text")
DEEP = (
    "vgg-116",
    "vgg-216",
    "vgg-316",
    "vgg-416",
    "resnet-1001",
    "resnet-1517",
    "resnet-1920",
    "resnet-2504",
)


def parameters(build: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def default(name: str) -> nn.Module:
    network = find(name)
    return network.build(network.image_size, network.classes)


# --- Sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("alexnet", 61_100_840),
        ("overfeat", 145_920_872),
        ("vgg-16", 138_357_544),
        ("googlenet", 13_004_888),
        ("inception-v4", 42_679_816),
        ("resnet-18", 11_689_512),
        ("resnet-34", 21_797_672),
        ("resnet-50", 25_557_032),
        ("resnet-101", 44_549_160),
        ("resnet-152", 60_192_808),
        ("wrn-28-10", 36_479_194),
        ("densenet-121", 7_978_856),
        ("unet", 31_037_698),
        ("vit-b16", 86_567_656),
        ("gpt", 124_439_808),
    ],
)
def test_a_network_has_its_published_number_of_parameters(name: str, published: int) -> None:
    assert parameters(lambda: default(name)) == published


def test_googlenet_without_its_auxiliary_heads_has_its_published_number_of_parameters() -> None:
    assert parameters(lambda: GoogLeNet(auxiliary_heads=False)) == 6_624_904


def test_overfeat_has_the_parameters_of_the_papers_table() -> None:
    convolutions = [(3, 96, 11), (96, 256, 5), (256, 512, 3), (512, 1024, 3), (1024, 1024, 3)]
    linears = [(1024 * 6 * 6, 3072), (3072, 4096), (4096, 1000)]
    from_table = sum(o * (i * k * k + 1) for i, o, k in convolutions) + sum(o * (i + 1) for i, o in linears)
    assert parameters(OverFeat) == from_table


def test_unet_has_the_parameters_of_its_widths() -> None:
    def double_conv(i: int, o: int) -> int:
        return 9 * i * o + 9 * o * o + 4 * o  # two convolutions without bias, two batch norms

    widths = [64, 128, 256, 512, 1024]
    down = sum(double_conv(i, o) for i, o in zip([3, *widths], widths, strict=False))
    up = sum(4 * 2 * w * w + w + double_conv(2 * w, w) for w in widths[:-1])
    assert parameters(UNet) == down + up + (64 + 1) * 2


@pytest.mark.parametrize("depth", [116, 216, 316, 416])
def test_a_deep_vgg_adds_twenty_convolutions_to_each_group_per_hundred(depth: int) -> None:
    extra = 20 * (depth - 16) // 100
    with torch.device("meta"):
        convolutions = [m.out_channels for m in VGG(depth).modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) + 3 == depth
    assert [convolutions.count(width) for width in (64, 128, 256)] == [2 + extra, 2 + extra, 3 + extra]
    assert convolutions.count(512) == 2 * (3 + extra)


@pytest.mark.parametrize(
    ("name", "layers"), [("resnet-14", 14), ("resnet-18", 18), ("resnet-152", 152), ("resnet-1920", 1922)]
)
def test_a_resnets_depth_counts_its_weight_layers_but_for_the_shortcuts(name: str, layers: int) -> None:
    with torch.device("meta"):
        modules = dict(default(name).named_modules())
    weights = [n for n, m in modules.items() if isinstance(m, (nn.Conv2d, nn.Linear)) and "shortcut" not in n]
    assert len(weights) == layers


# --- ResNet's depths -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "blocks"),
    [
        (14, (1, 1, 1, 1)),
        (50, (3, 4, 6, 3)),
        (101, (3, 4, 23, 3)),
        (137, (6, 32, 1, 6)),
        (152, (3, 8, 36, 3)),
        (1001, (6, 32, 289, 6)),
        (1517, (3, 83, 416, 3)),
        (1920, (6, 32, 596, 6)),
        (2504, (6, 32, 790, 6)),
    ],
)
def test_a_resnets_blocks_are_those_of_its_paper(depth: int, blocks: tuple[int, ...]) -> None:
    assert block_counts(depth) == blocks


def test_every_depth_of_3k_plus_2_from_14_has_its_blocks() -> None:
    for depth in range(14, 400, 3):
        blocks = block_counts(depth)
        assert 3 * sum(blocks) + 2 == depth
        assert min(blocks) >= 1


@pytest.mark.parametrize(
    ("depth", "nearest"),
    [(51, "50, 53"), (19, "18, 20"), (1918, "1916, 1919"), (1921, "1920, 1922"), (5, "14"), (-3, "14")],
)
def test_a_depth_that_does_not_exist_names_the_nearest(depth: int, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"no ResNet of depth {depth}; the nearest: {nearest}$"):
        ResNet(depth)


# --- What goes in and comes out --------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in IMAGE_NETWORKS if name not in DEEP])
def test_an_image_network_runs_on_small_images(name: str) -> None:
    network = find(name)
    # One image in evaluation mode: batch norm has no statistics over a single 1 x 1 map.
    model = network.build(32, 5).eval()
    x, target = network.sample(1, 32, 5)
    with torch.no_grad():
        output = model(x)
    assert output.shape == ((1, 5, 32, 32) if network.kind == "segmentation" else (1, 5))
    assert torch.isfinite(network.loss(output, target))


@pytest.mark.parametrize("size", [64, 250])
@pytest.mark.parametrize("name", [name for name in IMAGE_NETWORKS if name not in DEEP])
def test_an_image_network_runs_on_other_sizes(name: str, size: int) -> None:
    network = find(name)
    size -= size % 16 if name == "vit-b16" else 0
    with torch.device("meta"):
        model = network.build(size, 5).eval()
        x, _ = network.sample(2, size, 5)
        assert model(x).shape == ((2, 5, size, size) if network.kind == "segmentation" else (2, 5))


@pytest.mark.parametrize("name", [name for name in names() if name not in DEEP])
def test_a_network_trains_under_fake_tensors_at_its_default_size(name: str) -> None:
    network = find(name)
    with FakeTensorMode():
        model = network.build(network.image_size, network.classes)
        x, target = network.sample(2, network.image_size, network.classes)
        loss = network.loss(model(x), target)
        torch.autograd.backward(loss)
    assert loss.shape == ()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["vgg-416", "resnet-1517"])
def test_a_deep_network_runs_on_the_meta_device(name: str) -> None:
    network = find(name)
    with torch.device("meta"), torch.no_grad():
        model = network.build(32, 10).eval()
        x, _ = network.sample(2, 32, 10)
        assert model(x).shape == (2, 10)


@pytest.mark.parametrize(
    ("model", "least"),
    [
        (AlexNet, 7),
        (OverFeat, 11),
        (VGG, 32),
        (GoogLeNet, 15),
        (InceptionV4, 3),
        (ResNet, 1),
        (WideResNet, 1),
        (UNet, 16),
        (ViT, 16),
    ],
)
def test_the_least_image_works_and_a_smaller_one_is_refused(model: Callable[..., nn.Module], least: int) -> None:
    with torch.device("meta"):
        logits = model(image_size=least, classes=3).eval()(torch.empty(1, 3, least, least))
    assert logits.shape[:2] == (1, 3)
    with pytest.raises(ValueError, match=f"at least {least} x {least} pixels, not {least - 1}"):
        model(image_size=least - 1, classes=3)


def test_densenet_needs_29_pixels() -> None:
    build = find("densenet-121").build
    with torch.device("meta"):
        assert build(29, 3).eval()(torch.empty(1, 3, 29, 29)).shape == (1, 3)
    with pytest.raises(ValueError, match="at least 29 x 29"):
        build(28, 3)


def test_vit_needs_whole_patches() -> None:
    with pytest.raises(ValueError, match="multiple of 16 pixels as image size, not 40"):
        ViT(40)


def test_nothing_is_padded_at_the_papers_sizes() -> None:
    with torch.device("meta"):
        pools = [m for b in (AlexNet, OverFeat, InceptionV4) for m in b().modules()]
        overfeat = [m for m in OverFeat().modules() if isinstance(m, nn.Conv2d)]
    assert all(m.padding == 0 for m in pools if isinstance(m, nn.MaxPool2d))
    assert [m.padding for m in overfeat] == [(0, 0), (0, 0), (1, 1), (1, 1), (1, 1)]


def test_padding_leaves_the_layers_and_the_parameters_as_they_are() -> None:
    for name in ("alexnet", "overfeat", "inception-v4"):
        build, size = find(name).build, find(name).image_size
        with torch.device("meta"):
            assert build(32, 7).state_dict().keys() == build(size, 7).state_dict().keys()
        assert parameters(lambda: build(32, 7)) == parameters(lambda: build(size, 7))  # noqa: B023


# --- Training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet-14", "resnet-18", "googlenet", "densenet-121", "unet", "gpt-2x64"])
def test_every_parameter_gets_a_finite_gradient(name: str) -> None:
    network = find(name)
    torch.manual_seed(0)
    model = network.build(32, 4)
    x, target = network.sample(2, 32, 4)
    torch.autograd.backward(network.loss(model(x), target))
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()


def test_googlenet_counts_each_auxiliary_head_as_three_tenths() -> None:
    network = find("googlenet")
    logits = torch.randn(3, 2, 4)
    target = torch.tensor([0, 3])
    expected = [float(F.cross_entropy(each, target)) for each in logits]
    loss = network.loss(GoogLeNetOutput(*logits), target)
    assert float(loss) == pytest.approx(expected[0] + 0.3 * (expected[1] + expected[2]))


def test_googlenet_returns_logits_alone_in_evaluation_or_without_heads() -> None:
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert isinstance(GoogLeNet(32, 4)(x), GoogLeNetOutput)
        assert GoogLeNet(32, 4).eval()(x).shape == (2, 4)
        assert GoogLeNet(32, 4, auxiliary_heads=False)(x).shape == (2, 4)


def test_googlenets_weights_are_cut_at_two_standard_deviations() -> None:
    torch.manual_seed(0)
    weight = GoogLeNet(32, 4).inception5b.branch1.conv.weight.detach()
    assert float(weight.abs().max()) <= 0.02 + 1e-6
    assert float(weight.std()) == pytest.approx(0.0088, rel=0.02)  # 0.01 times 0.88, for the cut tails


def test_relus_work_in_place_and_resnet_adds_in_place() -> None:
    with torch.device("meta"):
        models = [default(name) for name in ("alexnet", "overfeat", "vgg-16", "resnet-50", "densenet-121")]
    relus = [m for model in models for m in model.modules() if isinstance(m, nn.ReLU)]
    assert relus
    assert all(m.inplace for m in relus)


def test_gpt_looks_only_backwards() -> None:
    model = GPT(16, 256, layers=2, width=64).eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_gpt_refuses_a_sequence_longer_than_its_context() -> None:
    with pytest.raises(ValueError, match="5 tokens is longer than the context of 4"):
        GPT(4, 256, layers=1, width=64)(torch.zeros(1, 5, dtype=torch.int64))


@pytest.mark.parametrize("width", [0, 200])
def test_gpt_refuses_a_width_without_heads(width: int) -> None:
    with pytest.raises(ValueError, match="width"):
        GPT(4, 256, layers=1, width=width)


def test_a_wide_resnet_has_6n_plus_4_layers() -> None:
    with pytest.raises(ValueError, match=r"6n \+ 4"):
        WideResNet(depth=30)


def test_a_wide_resnet_takes_the_papers_dropout() -> None:
    with torch.device("meta"):
        model = WideResNet(depth=10, widen=1, dropout=0.3)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.3] * 3


# --- Samples ---------------------------------------------------------------------------------------


def test_a_sample_of_images_has_a_label_an_image() -> None:
    x, target = find("resnet-50").sample(4, 16, 10)
    assert x.shape == (4, 3, 16, 16)
    assert (target.shape, target.dtype) == ((4,), torch.int64)
    assert 0 <= int(target.min()) <= int(target.max()) < 10


def test_a_sample_of_segmentation_has_a_label_a_pixel() -> None:
    x, target = find("unet").sample(2, 16, 3)
    assert x.shape == (2, 3, 16, 16)
    assert (target.shape, target.dtype) == ((2, 16, 16), torch.int64)


def test_a_sample_of_text_has_its_own_next_tokens_as_target() -> None:
    x, target = find("gpt").sample(1, 16, 256)
    assert x.shape == target.shape == (1, 16)
    assert torch.equal(x[:, 1:], target[:, :-1])
    assert x.untyped_storage().data_ptr() != target.untyped_storage().data_ptr()


def test_a_sample_repeats_with_its_generator() -> None:
    for name in ("resnet-50", "unet", "gpt"):
        first, again = (find(name).sample(2, 16, 9, torch.Generator().manual_seed(3)) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_sample_is_made_on_the_device_asked_for() -> None:
    assert all(tensor.is_meta for tensor in find("unet").sample(2, 16, 3, device="meta"))


# --- Names -----------------------------------------------------------------------------------------


def test_the_names_are_listed_in_order_and_found() -> None:
    assert names() == (
        *("alexnet", "overfeat", "vgg-16", "vgg-116", "vgg-216", "vgg-316", "vgg-416"),
        *("googlenet", "inception-v4", "resnet-18", "resnet-34", "resnet-50", "resnet-101", "resnet-152"),
        *("resnet-1001", "resnet-1517", "resnet-1920", "resnet-2504", "wrn-28-10", "densenet-121"),
        *("unet", "vit-b16", "gpt"),
    )
    assert tuple(find(name).name for name in names()) == names()


@pytest.mark.parametrize(
    ("typed", "canonical"),
    [
        ("ResNet50", "resnet-50"),
        ("RESNET-50", "resnet-50"),
        ("resnet_2504", "resnet-2504"),
        ("resnet-26", "resnet-26"),
        ("WRN_28_10", "wrn-28-10"),
        ("WideResNet-28-10", "wrn-28-10"),
        ("vgg16", "vgg-16"),
        ("VGG-416", "vgg-416"),
        ("densenet121", "densenet-121"),
        ("Inception_v4", "inception-v4"),
        ("GoogLeNet", "googlenet"),
        ("U-Net", "unet"),
        ("ViT", "vit-b16"),
        ("ViT-B/16", "vit-b16"),
        ("gpt", "gpt"),
        ("GPT-2", "gpt"),
        ("gpt-4x256", "gpt-4x256"),
        ("gpt4x256", "gpt-4x256"),
    ],
)
def test_a_name_is_found_however_it_is_spelt(typed: str, canonical: str) -> None:
    assert find(typed).name == canonical
    assert find(typed) == find(canonical)


def test_a_gpt_by_layers_and_width_is_over_bytes() -> None:
    network = find("gpt-4x256")
    assert (network.kind, network.classes) == ("text", 256)
    model = network.build(32, 256)
    blocks = [m for m in model.modules() if type(m).__name__ == "Block"]
    assert len(blocks) == 4
    x, target = network.sample(2, 32, 256)
    output = model(x)
    assert output.shape == (2, 32, 256)
    assert torch.equal(network.loss(output, target), F.cross_entropy(output.view(-1, 256), target.view(-1)))


def test_a_network_can_be_pickled_for_a_worker() -> None:
    for name in (*names(), "gpt-4x256"):
        assert pickle.loads(pickle.dumps(find(name))) == find(name)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("resnett-50", "did you mean resnet-50"),
        ("alexnt", "did you mean alexnet"),
        ("resnet-51", "the nearest: 50, 53"),
        ("vgg-17", "the nearest: 16, 116"),
        ("vgg-11", "the nearest: 16"),
        ("gpt-4x200", "a width of 200 does not divide into 3 heads"),
        ("gpt-0x64", "at least one layer"),
        ("!?", "the listed ones: alexnet, overfeat"),
        ("", "the listed ones"),
    ],
)
def test_an_unknown_name_says_what_is_close(typed: str, message: str) -> None:
    with pytest.raises(UnknownNetwork, match=message) as caught:
        find(typed)
    assert isinstance(caught.value, OutgrowError)
    assert isinstance(caught.value, ValueError)
    assert repr(typed) in str(caught.value)
