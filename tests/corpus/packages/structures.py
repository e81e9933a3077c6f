"""Sets, graphs and points: what has no order."""

from __future__ import annotations

from typing import Any

import torch

from tests.corpus.packages.kit import row


def present(batch: int, length: int) -> torch.Tensor:
    """True where an element is: before lengths that differ."""
    return torch.arange(length) < torch.randint(length // 2, length + 1, (batch, 1))


@row("isab-pytorch latents")
def _isab() -> Any:
    from isab_pytorch import ISAB

    model = ISAB(dim=32, heads=4, num_latents=6, latent_self_attend=True)
    return model, lambda b, n: {"x": torch.randn(b, n, 32), "mask": present(b, n)}


@row("isab-pytorch inverted")
def _inverted() -> Any:
    from isab_pytorch import ISAB

    model = ISAB(dim=32, heads=4, num_latents=6, inverted_attention=True)
    return model, lambda b, n: {"x": torch.randn(b, n, 32), "mask": present(b, n)}


@row("bidirectional-cross-attention transformer")
def _bidirectional() -> Any:
    from bidirectional_cross_attention import BidirectionalCrossAttentionTransformer

    model = BidirectionalCrossAttentionTransformer(
        dim=32, depth=2, context_dim=24, heads=4, dim_head=8
    )
    return model, lambda b, n: {
        "x": torch.randn(b, n, 32),
        "context": torch.randn(b, n + 3, 24),
        "mask": present(b, n),
        "context_mask": present(b, n + 3),
    }


@row("slot-attention multi-head")
def _slots() -> Any:
    from slot_attention import MultiHeadSlotAttention

    model = MultiHeadSlotAttention(num_slots=4, dim=32, heads=4, dim_head=8, iters=2)
    return model, lambda b, n: (torch.randn(b, n, 32),)


@row("invariant-point-attention block")
def _ipa() -> Any:
    from invariant_point_attention import IPABlock

    model = IPABlock(dim=32, heads=4, scalar_key_dim=8, scalar_value_dim=8)

    def inputs(batch: int, length: int) -> Any:
        rotations, _ = torch.linalg.qr(torch.randn(batch, length, 3, 3))
        return {
            "x": torch.randn(batch, length, 32),
            "pairwise_repr": torch.randn(batch, length, length, 32),
            "rotations": rotations,
            "translations": torch.randn(batch, length, 3),
            "mask": present(batch, length),
        }

    return model, inputs


@row("point-transformer-pytorch layer")
def _points() -> Any:
    from point_transformer_pytorch import PointTransformerLayer

    model = PointTransformerLayer(dim=32, pos_mlp_hidden_dim=16, num_neighbors=6)
    return model, lambda b, n: (torch.randn(b, n, 32), torch.randn(b, n, 3), present(b, n))


@row("graph-transformer-pytorch whole")
def _graph() -> Any:
    from graph_transformer_pytorch import GraphTransformer

    model = GraphTransformer(
        dim=32, depth=2, edge_dim=16, heads=4, dim_head=8, with_feedforwards=True, rel_pos_emb=True
    )
    return model, lambda b, n: {
        "nodes": torch.randn(b, n, 32),
        "edges": torch.randn(b, n, n, 16),
        "mask": present(b, n),
    }
