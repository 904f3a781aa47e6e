"""What users would pick instead of Outgrow, as functions that change a network of ours before it trains.

`pareto.py` has its workers call them (`Setup.prepare`). None of them edits a class: they put functions over the
`forward` of modules that they find by class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from outgrow.networks.densenet import DenseNet, _DenseBlock, _DenseLayer
from outgrow.networks.googlenet import _Inception
from outgrow.networks.gpt import GPT
from outgrow.networks.inception import _Parallel
from outgrow.networks.resnet import ResNet, _BasicBlock, _Bottleneck
from outgrow.networks.transformer import Block
from outgrow.networks.unet import UNet, _Up
from outgrow.networks.vgg import VGG
from outgrow.networks.vit import ViT
from outgrow.networks.wide_resnet import _WideBlock

_BLOCKS = (_BasicBlock, _Bottleneck, _WideBlock, _DenseLayer, _Inception, _Parallel, _Up, Block)
_STAGES = (_DenseBlock,)  # larger regions, where a network has blocks of blocks

_ATEN = torch.ops.aten
_SAVED_OPS = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN.convolution.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)


class DoesNotApply(Exception):
    """A peer that has nothing to do with this network; the message says why."""


@dataclass(frozen=True)
class Peer:
    """One way to train in less memory: its name, and what `Setup.prepare` says for it."""

    name: str
    prepare: tuple[str, ...]

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile rewrites its step, which then no dispatch mode can watch."""
        return self.prepare[1] == compiled.__name__


def peers(ratios: Sequence[float]) -> tuple[Peer, ...]:
    """All of them; `ratios` are the activation memory budgets of torch.compile."""
    return (
        Peer("checkpoint per block", (__name__, per_block.__name__)),
        Peer("checkpoint per stage", (__name__, per_stage.__name__)),
        Peer("checkpoint_sequential", (__name__, sequential.__name__)),
        Peer("selective checkpoint", (__name__, selective.__name__)),
        *(Peer(f"compile at {ratio:g}", (__name__, compiled.__name__, str(ratio))) for ratio in ratios),
    )


LEFT_OUT = {
    "save_on_cpu": "torch.autograd.graph.save_on_cpu copies to the memory of the CPU, which is the device here",
}


def per_block(model: nn.Module) -> None:
    """Checkpoint each block: keeps what goes in, and runs the block again in backward."""
    _wrap(_blocks(model), partial(checkpoint, use_reentrant=False))


def per_stage(model: nn.Module) -> None:
    """Checkpoint each block of blocks."""
    stages = [module for module in model.modules() if isinstance(module, _STAGES)]
    if not stages:
        raise DoesNotApply("it has no blocks of blocks")
    _wrap(stages, partial(checkpoint, use_reentrant=False))


def selective(model: nn.Module) -> None:
    """Checkpoint each block, but save the results of matrix products, convolutions and attention."""
    # VGG's ReLUs write to what its convolutions made, which is saved: to run them twice changes nothing.
    mutation = isinstance(model, VGG)
    contexts = partial(create_selective_checkpoint_contexts, _save_what_is_dear, allow_cache_entry_mutation=mutation)
    _wrap(_blocks(model), partial(checkpoint, use_reentrant=False, context_fn=contexts))


def sequential(model: nn.Module) -> None:
    """Cut a chain of modules into sqrt(n) segments, and checkpoint each (Chen et al. 2016)."""
    if isinstance(model, (GPT, ViT)):
        blocks = list(model.blocks)
        model.blocks.forward = partial(_in_segments, blocks)  # type: ignore[method-assign]
    else:
        model.forward = partial(_in_segments, list(_units(_chain(model))))


def compiled(model: nn.Module, ratio: str) -> None:
    """Compile the network; the partitioner saves about this share of what it would save by itself."""
    import torch._functorch.config as config

    config.activation_memory_budget = float(ratio)
    model.compile()


def _save_what_is_dear(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def _wrap(modules: Sequence[nn.Module], around: Callable[..., Any]) -> None:
    for module in modules:
        module.forward = partial(_around_copies, around, module.forward)


def _around_copies(around: Callable[..., Any], forward: Callable[..., Any], *inputs: Any) -> Any:
    """DenseNet appends to the list that it gave a layer, which must find it as it was when it runs again."""
    return around(forward, *(list(item) if isinstance(item, list) else item for item in inputs))


def _blocks(model: nn.Module) -> list[nn.Module]:
    blocks: list[nn.Module] = [module for module in model.modules() if isinstance(module, _BLOCKS)]
    if isinstance(model, UNet):
        blocks += list(model.down)
    if isinstance(model, VGG):  # the layers up to each pool
        model.features = nn.Sequential(*_up_to_each_pool(model.features))
        blocks += list(model.features)
    if not blocks:
        raise DoesNotApply("it has no blocks")
    return blocks


def _up_to_each_pool(layers: nn.Sequential) -> Iterator[nn.Sequential]:
    group: list[nn.Module] = []
    for layer in layers:
        group.append(layer)
        if isinstance(layer, nn.MaxPool2d):
            yield nn.Sequential(*group)
            group = []
    if group:
        yield nn.Sequential(*group)


def _chain(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a network that is a chain, in the order in which they run."""
    if isinstance(model, VGG):
        return chain(model.features, [model.avgpool, nn.Flatten()], model.classifier)
    if isinstance(model, ResNet):
        stem = [model.conv1, model.bn1, model.relu, model.maxpool]
        stages = (model.layer1, model.layer2, model.layer3, model.layer4)
        blocks = chain.from_iterable(stage.children() for stage in stages)
        return chain(stem, blocks, [model.avgpool, nn.Flatten(), model.fc])
    if isinstance(model, DenseNet):
        return chain(model.features, [nn.ReLU(inplace=True), model.avgpool, nn.Flatten(), model.classifier])
    raise DoesNotApply("it is no chain of modules")


def _units(layers: Iterator[nn.Module]) -> Iterator[nn.Module]:
    """The same chain with what writes to its input joined to the layer before.

    A segment that began with it would write to what it is to run again from.
    """
    unit: list[nn.Module] = []
    for layer in layers:
        if unit and not getattr(layer, "inplace", False):
            yield nn.Sequential(*unit)
            unit = []
        unit.append(layer)
    yield nn.Sequential(*unit)


def _in_segments(units: list[nn.Module], x: torch.Tensor) -> Any:
    segments = round(math.sqrt(len(units)))
    return checkpoint_sequential(units, segments, x, use_reentrant=False)  # type: ignore[no-untyped-call]
