"""Language models with memories, windows, hierarchies and states."""

from __future__ import annotations

from typing import Any

import torch

from tests.corpus.packages.kit import row
from tests.corpus.packages.text import VOCABULARY, ids, padding


@row("recurrent-memory-transformer-pytorch segment")
def _recurrent() -> Any:
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer

    model = RecurrentMemoryTransformer(
        num_tokens=VOCABULARY,
        num_memory_tokens=3,
        dim=32,
        depth=2,
        seq_len=32,
        heads=4,
        dim_head=8,
        use_flash_attn=True,
    )
    return model, lambda b, n: {"x": ids(b, n), "read_memories": torch.randn(b, 3, 32)}


@row("block-recurrent-transformer-pytorch whole", others=())
def _block() -> Any:
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer

    model = BlockRecurrentTransformer(
        num_tokens=VOCABULARY,
        dim=32,
        depth=3,
        heads=4,
        dim_head=8,
        max_seq_len=16,
        block_width=8,
        num_state_vectors=6,
        recurrent_layers=(2,),
    )
    return model, lambda b, n: (ids(b, 16),)


@row("feedback-transformer-pytorch whole", others=())
def _feedback() -> Any:
    from feedback_transformer_pytorch import FeedbackTransformer

    model = FeedbackTransformer(
        num_tokens=VOCABULARY, dim=32, depth=2, seq_len=2, mem_len=4, heads=4, dim_head=8
    )
    return model, lambda b, n: (ids(b, 6),)


@row("memory-efficient-attention-pytorch attention")
def _efficient() -> Any:
    from memory_efficient_attention_pytorch import Attention

    model = Attention(dim=32, heads=4, dim_head=8, causal=True)
    return model, lambda b, n: {"x": torch.randn(b, n, 32), "mask": ~padding(b, n)}


@row("memory-efficient-attention-pytorch buckets", length=16, others=())
def _buckets() -> Any:
    from memory_efficient_attention_pytorch import Attention

    model = Attention(
        dim=32,
        heads=4,
        dim_head=8,
        memory_efficient=True,
        q_bucket_size=8,
        k_bucket_size=8,
        causal=True,
    )
    return model, lambda b, n: {"x": torch.randn(b, 16, 32), "mask": ~padding(b, 16)}


@row("mega-pytorch whole")
def _mega() -> Any:
    from mega_pytorch import Mega

    model = Mega(
        num_tokens=VOCABULARY,
        dim=32,
        depth=2,
        ema_heads=4,
        attn_dim_qk=16,
        attn_dim_value=48,
        laplacian_attn_fn=True,
    )
    return model, lambda b, n: (ids(b, n),)


@row("h-transformer-1d whole", others=())
def _hierarchy() -> Any:
    from h_transformer_1d import HTransformer1D

    model = HTransformer1D(
        num_tokens=VOCABULARY,
        dim=32,
        depth=2,
        max_seq_len=32,
        heads=4,
        dim_head=8,
        block_size=4,
    )
    return model, lambda b, n: {"x": ids(b, 24), "mask": ~padding(b, 24)}


@row("sinkhorn-transformer language model", length=16, others=(32, 8))
def _sinkhorn() -> Any:
    from sinkhorn_transformer import SinkhornTransformerLM

    model = SinkhornTransformerLM(
        num_tokens=VOCABULARY, dim=32, depth=2, heads=4, max_seq_len=64, bucket_size=8
    )
    return model, lambda b, n: (ids(b, n),)


@row("routing-transformer language model", others=())
def _routing() -> Any:
    from routing_transformer import RoutingTransformerLM

    model = RoutingTransformerLM(
        num_tokens=VOCABULARY, dim=32, depth=1, heads=4, dim_head=8, max_seq_len=32, window_size=8
    )
    return model, lambda b, n: (ids(b, 32),)


@row("mambapy Jamba", others=())
def _jamba() -> Any:
    from mambapy.jamba import AttentionSDPA, JambaLMConfig

    config = JambaLMConfig(
        d_model=32,
        n_layers=2,
        mlp_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    return AttentionSDPA(config), lambda b, n: (torch.randn(b, 12, 32),)


@row("mambapy Mamba")
def _mamba() -> Any:
    from mambapy.mamba import Mamba, MambaConfig

    model = Mamba(MambaConfig(d_model=32, n_layers=1, d_state=4, pscan=False))
    return model, lambda b, n: (torch.randn(b, n, 32),)


@row("titans-pytorch segmented attention", length=16, others=(24, 8))
def _titans() -> Any:
    from titans_pytorch import MemoryAsContextTransformer

    model = MemoryAsContextTransformer(
        num_tokens=VOCABULARY, dim=32, depth=1, segment_len=8, heads=4, dim_head=8,
        neural_memory_layers=(), num_longterm_mem_tokens=0, num_persist_mem_tokens=2,
    )  # fmt: skip
    return model, lambda b, n: (ids(b, n),)
