"""The pre-norm transformer block that ViT and GPT share."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F


class SelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani et al., arXiv 1706.03762) over (batch, tokens, width)."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ValueError(f"a width of {width} does not divide into {heads} heads")
        self.heads = heads
        self.causal = causal
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return out


class Block(nn.Module):
    """Attention and a two-layer perceptron of four times the width, each behind a layer norm, each added.

    ``dropout`` is on what each of the two adds, ``hidden_dropout`` on the perceptron's hidden layer (ViT
    has it, GPT-2 does not), ``attention_dropout`` on the attention weights (the other way round).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool,
        dropout: float,
        hidden_dropout: float,
        attention_dropout: float,
        eps: float,
        gelu: Literal["none", "tanh"],
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attention = SelfAttention(width, heads, causal=causal, dropout=attention_dropout)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.fc1 = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU(approximate=gelu)
        self.hidden_dropout = nn.Dropout(hidden_dropout) if hidden_dropout else None
        self.fc2 = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        hidden = self.gelu(self.fc1(self.norm2(x)))
        if self.hidden_dropout is not None:
            hidden = self.hidden_dropout(hidden)
        x = x + self.dropout(self.fc2(hidden))
        return x
