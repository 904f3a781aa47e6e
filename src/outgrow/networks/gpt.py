"""GPT: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outgrow.networks.transformer import Block


class GPT(nn.Module):
    """A causal transformer over tokens, (batch, tokens) int64 to logits (batch, tokens, vocabulary).

    Layer by layer as GPT-2: learned positions, pre-norm blocks, GELU in its tanh form, dropout 0.1, and
    a head tied to the token embedding. GPT-2 small, the default, has 124,439,808 parameters. ``heads``
    defaults to one for each 64 of the width. Raises ValueError if the width does not divide into the
    heads, or if a sequence is longer than ``context``.
    """

    def __init__(
        self,
        context: int = 1024,
        vocabulary: int = 50257,
        *,
        layers: int = 12,
        width: int = 768,
        heads: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if min(context, vocabulary, layers, width) < 1:
            raise ValueError(
                "GPT needs a context, a vocabulary, layers and a width of at least 1, "
                f"not {context}, {vocabulary}, {layers}, {width}"
            )
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(
                Block(
                    width,
                    default_heads(width) if heads is None else heads,
                    causal=True,
                    dropout=dropout,
                    hidden_dropout=0.0,
                    attention_dropout=dropout,
                    eps=1e-5,
                    gelu="tanh",
                )
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width, eps=1e-5)

        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        # GPT-2 scales the layers that write into the residual stream by the number of additions to it.
        for block in self.blocks:
            assert isinstance(block, Block)
            for writer in (block.attention.out, block.fc2):
                nn.init.normal_(writer.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"a sequence of {length} tokens is longer than the context of {self.context}")
        positions = torch.arange(length, device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        x = self.norm(self.blocks(x))
        # Tied by use rather than by assigning one Parameter to two modules: moving a model off the meta
        # device (to_empty) would quietly untie those.
        return F.linear(x, self.tokens.weight)


def default_heads(width: int) -> int:
    """One head for each 64 of the width, at least one. Raises ValueError if they do not divide it."""
    heads = max(1, width // 64)
    if width % heads:
        raise ValueError(f"a width of {width} does not divide into {heads} heads")
    return heads
