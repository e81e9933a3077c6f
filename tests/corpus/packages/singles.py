"""Packages that publish one architecture each."""

from __future__ import annotations

from typing import Any

import torch

from tests.corpus.packages.kit import CLASSES, images, row
from tests.corpus.packages.text import VOCABULARY, ids, padding


def _masked(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(batch, length, 32), "mask": ~padding(batch, length)}


@row("soft-moe-pytorch fixed slots")
def _soft_moe() -> Any:
    from soft_moe_pytorch import SoftMoE

    return SoftMoE(dim=32, seq_len=16, num_experts=4), _masked


@row("soft-moe-pytorch dynamic slots")
def _slots() -> Any:
    from soft_moe_pytorch import DynamicSlotsSoftMoE

    return DynamicSlotsSoftMoE(dim=32, num_experts=4), lambda b, n: (torch.randn(b, n, 32),)


@row("egnn-pytorch network")
def _egnn() -> Any:
    from egnn_pytorch import EGNN_Network

    model = EGNN_Network(num_tokens=VOCABULARY, dim=16, depth=2, m_dim=8)
    return model, lambda b, n: {
        "feats": ids(b, n),
        "coors": torch.randn(b, n, 3),
        "mask": ~padding(b, n),
    }


@row("egnn-pytorch neighbours", others=(), batches=(3, 1))
def _neighbours() -> Any:
    from egnn_pytorch import EGNN

    model = EGNN(dim=16, m_dim=8, num_nearest_neighbors=4, norm_coors=True)
    return model, lambda b, n: (torch.randn(b, 12, 16), torch.randn(b, 12, 3))


@row("simple-hierarchical-transformer whole", length=16, others=(24, 9))
def _hierarchical() -> Any:
    from simple_hierarchical_transformer import HierarchicalTransformer

    model = HierarchicalTransformer(
        num_tokens=VOCABULARY,
        dim=32,
        depth=2,
        seq_len=64,
        heads=4,
        dim_head=8,
        hierarchies=(1, 2),
        window_sizes=(8, None),
    )
    return model, lambda b, n: (ids(b, n),)


@row("hourglass-transformer-pytorch language model", length=16, others=(24, 8))
def _hourglass() -> Any:
    from hourglass_transformer_pytorch import HourglassTransformerLM

    model = HourglassTransformerLM(
        num_tokens=VOCABULARY,
        dim=32,
        max_seq_len=64,
        heads=4,
        dim_head=8,
        shorten_factor=2,
        depth=(1, 2, 1),
    )
    return model, lambda b, n: (ids(b, n),)


@row("agent-attention-pytorch transformer")
def _agents() -> Any:
    from agent_attention_pytorch import AgentTransformer

    model = AgentTransformer(dim=32, depth=2, num_agent_tokens=4, heads=4, dim_head=8)
    return model, _masked


@row("gated-state-spaces-pytorch GSS")
def _gss() -> Any:
    from gated_state_spaces_pytorch import GatedStateSpacesLM

    model = GatedStateSpacesLM(
        num_tokens=VOCABULARY, dim=32, depth=2, dss_kernel_N=16, dss_kernel_H=8
    )
    return model, lambda b, n: (ids(b, n),)


@row("gated-state-spaces-pytorch exponential smoothing", others=(40, 8))
def _smoothing() -> Any:
    from gated_state_spaces_pytorch import GatedExponentialSmoothingLM

    model = GatedExponentialSmoothingLM(
        num_tokens=VOCABULARY, dim=32, depth=2, heads=4, dim_mhesa=16
    )
    return model, lambda b, n: (ids(b, n),)


@row("gated-state-spaces-pytorch depthwise")
def _depthwise() -> Any:
    from gated_state_spaces_pytorch import GatedDsConvLM

    model = GatedDsConvLM(
        num_tokens=VOCABULARY, dim=32, depth=2, heads=4, dim_dsconv=16, max_seq_len=64
    )
    return model, lambda b, n: (ids(b, n),)


@row("bottleneck-transformer-pytorch stack", others=())
def _bottleneck() -> Any:
    from bottleneck_transformer_pytorch import BottleStack

    model = BottleStack(
        dim=8, fmap_size=8, dim_out=32, num_layers=2, heads=2, dim_head=8, rel_pos_emb=True
    )
    return model, lambda b, n: (torch.randn(b, 8, 8, 8),)


@row("adjacent-attention-pytorch network")
def _adjacent() -> Any:
    from adjacent_attention_network import AdjacentAttentionNetwork

    model = AdjacentAttentionNetwork(dim=32, depth=2, heads=4, dim_head=8, num_neighbors_cutoff=4)
    return model, lambda b, n: {
        "x": torch.randn(b, n, 32),
        "adjacency_mat": torch.rand(b, n, n) > 0.6,
        "mask": ~padding(b, n),
    }


@row("perceiver-ar-pytorch language model", length=24, others=(30, 19))
def _perceiver_ar() -> Any:
    from perceiver_ar_pytorch import PerceiverAR

    model = PerceiverAR(
        num_tokens=VOCABULARY,
        dim=32,
        depth=2,
        heads=2,
        dim_head=64,
        max_seq_len=32,
        cross_attn_seq_len=16,
    )
    return model, lambda b, n: (ids(b, n),)


@row("compressive-transformer-pytorch segment", others=())
def _compressive() -> Any:
    from compressive_transformer_pytorch import CompressiveTransformer

    model = CompressiveTransformer(
        num_tokens=VOCABULARY, dim=32, seq_len=16, depth=2, mem_len=16, cmem_len=4, heads=4
    )
    return model, lambda b, n: (ids(b, 16),)


@row("taylor-series-linear-attention self")
def _taylor() -> Any:
    from taylor_series_linear_attention import TaylorSeriesLinearAttn

    return TaylorSeriesLinearAttn(dim=32, dim_head=8, heads=4, rotary_emb=True), _masked


@row("memformer encoder and decoder")
def _memformer() -> Any:
    from memformer import Memformer

    model = Memformer(
        dim=32,
        enc_num_tokens=VOCABULARY,
        enc_depth=1,
        enc_heads=4,
        enc_max_seq_len=32,
        dec_num_tokens=VOCABULARY,
        dec_depth=1,
        dec_heads=4,
        dec_max_seq_len=32,
        num_memory_slots=4,
    )
    return model, lambda b, n: {
        "src": ids(b, n),
        "tgt": ids(b, n),
        "src_mask": ~padding(b, n),
    }


@row("rin-pytorch denoiser", others=())
def _rin() -> Any:
    from rin_pytorch import RIN

    model = RIN(
        dim=32,
        image_size=16,
        patch_size=4,
        depth=1,
        num_latents=8,
        latent_self_attn_depth=1,
        heads=2,
        dim_head=8,
    )
    return model, lambda b, n: (torch.randn(b, 3, 16, 16), torch.rand(b))


@row("mlp-mixer-pytorch images", others=())
def _mixer() -> Any:
    from mlp_mixer_pytorch import MLPMixer

    model = MLPMixer(image_size=32, channels=3, patch_size=8, dim=32, depth=2, num_classes=CLASSES)
    return model, images(32)


@row("g-mlp-pytorch causal")
def _gmlp() -> Any:
    from g_mlp_pytorch import gMLP

    model = gMLP(
        num_tokens=VOCABULARY, dim=32, depth=2, seq_len=32, causal=True, attn_dim=8, heads=2
    )
    return model, lambda b, n: (ids(b, n),)


@row("g-mlp-pytorch circulant, shifted")
def _circulant() -> Any:
    from g_mlp_pytorch import gMLP

    model = gMLP(
        num_tokens=VOCABULARY,
        dim=32,
        depth=2,
        seq_len=32,
        causal=True,
        circulant_matrix=True,
        shift_tokens=1,
    )
    return model, lambda b, n: (ids(b, n),)


@row("res-mlp-pytorch images", others=())
def _resmlp() -> Any:
    from res_mlp_pytorch import ResMLP

    model = ResMLP(image_size=32, patch_size=8, dim=32, depth=2, num_classes=CLASSES)
    return model, images(32)


@row("mixture-of-attention experts", length=16, others=(24, 9))
def _mixture() -> Any:
    from mixture_of_attention.mixture_of_attention import MixtureOfAttention

    model = MixtureOfAttention(
        dim=32, dim_head=8, heads=2, num_experts=2, num_routed_queries=8,
        num_routed_key_values=8, use_triton=False,
    )  # fmt: skip
    return model, lambda b, n: {"x": torch.randn(b, n, 32), "mask": ~padding(b, n)}
