"""Names of networks: what is listed, and how a name that a person typed becomes a Network."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from functools import partial

from outgrow.errors import UnknownNetwork
from outgrow.networks.alexnet import AlexNet
from outgrow.networks.densenet import DenseNet
from outgrow.networks.googlenet import GoogLeNet
from outgrow.networks.gpt import GPT, default_heads
from outgrow.networks.inception import InceptionV4
from outgrow.networks.network import Network
from outgrow.networks.overfeat import OverFeat
from outgrow.networks.resnet import ResNet, block_counts
from outgrow.networks.unet import UNet
from outgrow.networks.vgg import VGG, extra_convolutions
from outgrow.networks.vit import ViT
from outgrow.networks.wide_resnet import WideResNet


def _vgg(depth: int) -> Network:
    extra_convolutions(depth)  # raises for a depth that does not exist
    paper = "Simonyan and Zisserman 2014, arXiv 1409.1556"
    if depth > 16:
        paper += "; deepened as in vDNN, Rhu et al. 2016, arXiv 1602.08124"
    return Network(f"vgg-{depth}", "image", 224, 1000, partial(VGG, depth), paper)


def _resnet(depth: int) -> Network:
    block_counts(depth)  # raises for a depth that does not exist
    paper = "He et al. 2015, arXiv 1512.03385"
    if depth == 1517:
        paper += "; blocks as in Layrub, Liu et al. 2018"
    elif depth > 152:
        paper += "; blocks as in SuperNeurons, Wang et al. 2018, arXiv 1801.04380"
    return Network(f"resnet-{depth}", "image", 224, 1000, partial(ResNet, depth), paper)


_GPT_2 = "Radford et al. 2019, Language Models are Unsupervised Multitask Learners"


def _gpt(layers: int, width: int) -> Network:
    if layers < 1 or width < 1:
        raise ValueError("a GPT needs at least one layer and a width of at least 1")
    default_heads(width)  # raises for a width that does not divide
    build = partial(GPT, layers=layers, width=width)
    return Network(f"gpt-{layers}x{width}", "text", 1024, 256, build, f"{_GPT_2}; over bytes")


_LISTED: tuple[Network, ...] = (
    Network("alexnet", "image", 224, 1000, AlexNet, "Krizhevsky 2014, arXiv 1404.5997"),
    Network("overfeat", "image", 231, 1000, OverFeat, "Sermanet et al. 2013, arXiv 1312.6229"),
    *(_vgg(depth) for depth in (16, 116, 216, 316, 416)),
    Network("googlenet", "image", 224, 1000, GoogLeNet, "Szegedy et al. 2014, arXiv 1409.4842"),
    Network("inception-v4", "image", 299, 1000, InceptionV4, "Szegedy et al. 2016, arXiv 1602.07261"),
    *(_resnet(depth) for depth in (18, 34, 50, 101, 152, 1001, 1517, 1920, 2504)),
    Network("wrn-28-10", "image", 32, 10, WideResNet, "Zagoruyko and Komodakis 2016, arXiv 1605.07146"),
    Network("densenet-121", "image", 224, 1000, DenseNet, "Huang et al. 2016, arXiv 1608.06993"),
    Network("unet", "segmentation", 572, 2, UNet, "Ronneberger et al. 2015, arXiv 1505.04597"),
    Network("vit-b16", "image", 224, 1000, ViT, "Dosovitskiy et al. 2020, arXiv 2010.11929"),
    Network("gpt", "text", 1024, 50257, GPT, _GPT_2),
)

_ALIASES: tuple[tuple[str, str], ...] = (
    ("vit", "vit-b16"),
    ("wideresnet-28-10", "wrn-28-10"),
    ("gpt-2", "gpt"),
)

# What else can be asked for: a pattern of the squeezed name, and what makes a Network of its numbers.
_FAMILIES: tuple[tuple[str, Callable[..., Network]], ...] = (
    (r"vgg([0-9]{1,5})", _vgg),
    (r"resnet([0-9]{1,5})", _resnet),
    (r"gpt([0-9]{1,5})x([0-9]{1,6})", _gpt),
)


def names() -> tuple[str, ...]:
    """The canonical names of the listed networks. :func:`find` knows more: any depth, any GPT."""
    return tuple(network.name for network in _LISTED)


def find(name: str) -> Network:
    """The network of that name, whatever its case, hyphens and underscores: ``"ResNet50"``, ``"vgg_416"``.

    Besides :func:`names` there are ``resnet-<depth>`` for every depth that exists (see
    :func:`outgrow.networks.resnet.block_counts`; 1920 is SuperNeurons' label and builds 1922 layers),
    ``vgg-<16 + 100k>``, and ``gpt-<layers>x<width>``, over bytes, with max(1, width // 64) heads.
    ``gpt`` alone is GPT-2 small with its own vocabulary.

    Raises :class:`outgrow.errors.UnknownNetwork` (a ValueError), with close matches or the nearest
    depths, if there is no such network.
    """
    squeezed = _squeeze(name)
    by_key = _by_key()
    if squeezed in by_key:
        return by_key[squeezed]
    for pattern, make in _FAMILIES:
        if match := re.fullmatch(pattern, squeezed):
            try:
                return make(*map(int, match.groups()))
            except ValueError as error:
                raise UnknownNetwork(f"unknown network {name!r}: {error}") from error
    close = difflib.get_close_matches(squeezed, by_key, n=3, cutoff=0.5)
    # An alias and its network may both be close: name the network once.
    canonical = dict.fromkeys(by_key[key].name for key in close)
    if canonical:
        raise UnknownNetwork(f"unknown network {name!r}; did you mean {', '.join(canonical)}?")
    raise UnknownNetwork(f"unknown network {name!r}; the listed ones: {', '.join(names())}")


def _squeeze(name: str) -> str:
    return re.sub(r"[-_\s/]", "", name.lower())


def _by_key() -> dict[str, Network]:
    by_key = {_squeeze(network.name): network for network in _LISTED}
    by_key |= {_squeeze(alias): by_key[_squeeze(name)] for alias, name in _ALIASES}
    return by_key
