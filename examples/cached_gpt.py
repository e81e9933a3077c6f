"""A decoder that takes the keys and values of earlier tokens as tensors and gives back longer ones.

    K = [K_past; x W_k],  V = [V_past; x W_v],  attention(x) = softmax(mask(Q Kᵀ / √d)) V

One forward serves the prompt, with a past of no tokens, and each step after it, with one new token:
query i of S stands at place P + i, and sees the keys up to there. Compile it with

    attngraph optimize --factory examples.cached_gpt:build --decode -o model.onnx
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

Layer = tuple[Tensor, Tensor]
Past = list[Layer]
"""For each layer the keys and the values of P tokens, (B, heads, P, width / heads)."""


@dataclass(frozen=True)
class Config:
    vocabulary: int = 128
    context: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 2


class CachedSelfAttention(nn.Module):
    """(B, S, C) and a past of P tokens to (B, S, C) and a past of P + S."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, past: Layer) -> tuple[Tensor, Layer]:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        before = past[0].shape[2]
        places = torch.arange(before, before + length, device=x.device)
        visible = torch.arange(key.shape[2], device=x.device) <= places[:, None]
        context = functional.scaled_dot_product_attention(query, key, value, visible)
        merged: Tensor = self.output(context.transpose(1, 2).reshape(batch, length, width))
        return merged, (key, value)


class Block(nn.Module):
    """Pre-norm attention and a four times wider MLP, each with a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = CachedSelfAttention(config)
        self.mlp = nn.Sequential(
            nn.LayerNorm(config.width),
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor, past: Layer) -> tuple[Tensor, Layer]:
        attended, present = self.attention(self.attention_norm(x), past)
        x = x + attended
        return x + self.mlp(x), present


class CachedGPT(nn.Module):
    """Token ids (B, S) and the past to logits (B, S, vocabulary) and the past with them in it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, input_ids: Tensor, past: Past) -> tuple[Tensor, Past]:
        before, length = past[0][0].shape[2], input_ids.shape[1]
        place = torch.arange(before, before + length, device=input_ids.device)
        x: Tensor = self.tokens(input_ids) + self.places(place)
        present = []
        for block, layer in zip(self.blocks, past, strict=True):
            x, grown = block(x, layer)
            present.append(grown)
        return self.head(self.norm(x)), present


def empty(config: Config, batch: int) -> Past:
    """The past before the first token."""
    return random_past(config, batch, 0)


def random_past(config: Config, batch: int, length: int) -> Past:
    shape = (batch, config.heads, length, config.width // config.heads)
    return [(torch.randn(shape), torch.randn(shape)) for _ in range(config.layers)]


Rows = dict[int, Dim]
Shapes = tuple[Rows, list[tuple[Rows, Rows]]]


def build(config: Config = Config()) -> tuple[CachedGPT, tuple[Tensor, Past], Shapes]:
    torch.manual_seed(0)
    module = CachedGPT(config).eval()
    input_ids = torch.randint(config.vocabulary, (2, 3))
    rows = Dim("batch", max=1024)
    length, before = (Dim(name, max=config.context) for name in ("seq", "past"))
    layer = ({0: rows, 2: before}, {0: rows, 2: before})
    shapes = ({0: rows, 1: length}, [layer] * config.layers)
    return module, (input_ids, random_past(config, 2, 5)), shapes


def generate(module: CachedGPT, ids: Tensor, steps: int) -> Tensor:
    """The likeliest continuation of ids (B, S), as (B, S + steps)."""
    new, past = ids, empty(module.config, ids.shape[0])
    with torch.no_grad():
        for _ in range(steps):
            logits, past = module(new, past)
            new = logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, new], dim=1)
    return ids


if __name__ == "__main__":
    model, inputs, _ = build()
    print(generate(model, inputs[0], 8).tolist())
