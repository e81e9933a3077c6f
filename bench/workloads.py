"""What is measured, as factories for `--factory bench.workloads:NAME`: weights are random.

BENCH_LAYERS caps the layers of each stack, which changes what every engine does alike. BENCH_TINY
makes the models and inputs tiny, to see that everything works.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.export import Dim

Built = tuple[torch.nn.Module, tuple[torch.Tensor, ...], Any]
"""The module, its inputs, and its dynamic dims."""


@dataclass(frozen=True)
class Workload:
    """`name` is also that of its factory; `layers` are those of one stack before any cut.

    `padding` is the position of the input that is 0 where there is padding.
    """

    name: str
    title: str
    layers: int
    padding: int | None = None

    @property
    def factory(self) -> str:
        return f"bench.workloads:{self.name}"

    @property
    def measured_layers(self) -> int:
        return _layers(self.layers)


WORKLOADS = (
    Workload("bert_padded", "BERT-base B8 S128, half of the tokens padding", 12, padding=1),
    Workload("bert_long", "BERT-base B1 S2048, no padding", 12),
    Workload("gpt2_prefill", "GPT-2 without its head, prefill B1 S1024", 12),
    Workload("llama_prefill", "Llama-shaped (12 heads, 4 of keys), prefill B1 S1024", 12),
    Workload("llama_long", "Llama-shaped (12 heads, 4 of keys), prefill B1 S2048", 12),
    Workload("vit", "ViT-B/16 B4", 12),
    Workload("t5", "T5-small without its head, B4 S128, 64 decoded", 6),
    Workload("per_head", "12 heads written one by one, B4 S128", 4),
    Workload("mixtral", "Mixtral-shaped (2 of 8 experts), prefill B1 S1024", 12),
    Workload("qwen3_moe", "Qwen3-MoE-shaped (8 of 64 experts), prefill B1 S1024", 12),
    Workload("qwen3_next", "Qwen3-Next-shaped (3 gated delta nets to an attention), B1 S1024", 12),
    Workload("mamba2", "Mamba-2-shaped (24 heads of 64, states of 128), prefill B1 S1024", 12),
)
BY_NAME = {workload.name: workload for workload in WORKLOADS}


@contextmanager
def cut_to(layers: int) -> Iterator[None]:
    """Models that are made inside have so many layers."""
    with patch.dict(os.environ, {"BENCH_LAYERS": str(layers)}):
        yield


def _layers(full: int) -> int:
    return min(full, int(os.environ.get("BENCH_LAYERS", "0")) or full)


def _size(full: int, tiny: int) -> int:
    return tiny if os.environ.get("BENCH_TINY") else full


def _width() -> dict[str, Any]:
    """BERT-base's."""
    heads = _size(12, 3)
    return {
        "hidden_size": 64 * heads,
        "num_attention_heads": heads,
        "num_hidden_layers": _layers(12),
        "intermediate_size": 256 * heads,
        "vocab_size": _size(30522, 100),
    }


def _ids(vocabulary: int, batch: int, seq: int) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, seq), generator=torch.Generator().manual_seed(0))


def _lengths(batch: int, seq: int) -> torch.Tensor:
    """(B, S) int64, 1 where there is a token: right padding, half of all on average."""
    lengths = torch.linspace(seq / 8, seq * 7 / 8, batch).round()
    return (torch.arange(seq) < lengths[:, None]).long()


def _dims(longest: int, *, batch: bool = True) -> dict[int, Dim]:
    """Not `batch` where the sample has one row: torch.export takes a size of 1 for a constant."""
    return {**({0: Dim("batch", max=1024)} if batch else {}), 1: Dim("seq", max=longest)}


def llama_config(
    hidden: int, layers: int, heads: tuple[int, int], inner: int, vocabulary: int, **more: Any
) -> Any:
    """Of a Llama; `heads` are those of the queries and those of the keys."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        intermediate_size=inner,
        vocab_size=vocabulary,
        **more,
    )


def bert_padded() -> Built:
    from transformers import BertConfig, BertModel

    module: Any = BertModel(BertConfig(**_width()), add_pooling_layer=False)
    batch, seq = 8, _size(128, 16)
    ids = _ids(module.config.vocab_size, batch, seq)
    return module.eval(), (ids, _lengths(batch, seq)), (_dims(512), _dims(512))


def bert_long() -> Built:
    from transformers import BertConfig, BertModel

    config = BertConfig(max_position_embeddings=2048, **_width())
    module: Any = BertModel(config, add_pooling_layer=False)
    ids = _ids(config.vocab_size, 1, _size(2048, 32))
    return module.eval(), (ids,), (_dims(2048, batch=False),)


def gpt2_prefill() -> Built:
    from transformers import GPT2Config, GPT2Model

    heads = _size(12, 3)
    config = GPT2Config(
        n_embd=64 * heads,
        n_head=heads,
        n_layer=_layers(12),
        vocab_size=_size(50257, 100),
        use_cache=False,
    )
    module: Any = GPT2Model(config)
    ids = _ids(config.vocab_size, 1, _size(1024, 32))
    return module.eval(), (ids,), (_dims(1024, batch=False),)


def llama_prefill(length: int = 1024) -> Built:
    from transformers import LlamaModel

    groups, vocabulary = _size(4, 1), _size(32000, 100)
    sizes = 192 * groups, _layers(12), (3 * groups, groups), 512 * groups, vocabulary
    config = llama_config(*sizes, max_position_embeddings=4096, use_cache=False)
    module: Any = LlamaModel(config)
    ids = _ids(config.vocab_size, 1, _size(length, 32))
    return module.eval(), (ids,), (_dims(4096, batch=False),)


def llama_long() -> Built:
    return llama_prefill(2048)


def vit() -> Built:
    from transformers import ViTConfig, ViTModel

    width = _width()
    del width["vocab_size"]
    side = _size(224, 64)
    module: Any = ViTModel(ViTConfig(image_size=side, **width), add_pooling_layer=False)
    pixels = torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(0))
    return module.eval(), (pixels,), ({0: Dim("batch", max=1024)},)


def t5() -> Built:
    from transformers import T5Config, T5Model

    heads = _size(8, 2)
    config = T5Config(
        d_model=64 * heads,
        num_heads=heads,
        d_ff=256 * heads,
        num_layers=_layers(6),
        num_decoder_layers=_layers(6),
        vocab_size=_size(32128, 100),
        use_cache=False,
    )
    module: Any = T5Model(config)
    batch, seq, target = 4, _size(128, 16), _size(64, 8)
    ids, decoded = _ids(config.vocab_size, batch, seq), _ids(config.vocab_size, batch, target)
    dims = _dims(512)
    args = (ids, _lengths(batch, seq), decoded)
    return module.eval(), args, (dims, dims, {0: dims[0], 1: Dim("target", max=512)})


def per_head() -> Built:
    from examples.per_head import Encoder

    heads, seq = _size(12, 3), _size(128, 16)
    module = Encoder(64 * heads, heads, _layers(4), False).eval()
    mask = torch.ones(4, seq, dtype=torch.bool)
    mask[1:, -seq // 4 :] = False
    x = torch.randn(4, seq, 64 * heads, generator=torch.Generator().manual_seed(0))
    return module, (x, mask), (_dims(4096), _dims(4096))


def _stacked(name: str, **config: Any) -> Built:
    """A decoder of transformers without its head, that keeps no cache."""
    import transformers

    width = {"hidden_size": 64 * _size(12, 2), "num_hidden_layers": _layers(12)}
    made = getattr(transformers, f"{name}Config")(
        **{"vocab_size": _size(32000, 100), "use_cache": False, **width, **config}
    )
    module: Any = getattr(transformers, f"{name}Model")(made)
    ids = _ids(made.vocab_size, 1, _size(1024, 32))
    return module.eval(), (ids,), (_dims(4096, batch=False),)


def _grouped_heads() -> dict[str, Any]:
    groups = _size(4, 1)
    heads = {"num_attention_heads": _size(12, 2), "num_key_value_heads": groups, "head_dim": 64}
    return {**heads, "max_position_embeddings": 4096}


def mixtral() -> Built:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    return _stacked("Mixtral", intermediate_size=_size(2048, 64), **experts, **_grouped_heads())


def qwen3_moe() -> Built:
    experts = {"num_experts": _size(64, 16), "num_experts_per_tok": 8, "norm_topk_prob": True}
    width = {"moe_intermediate_size": _size(256, 32)}
    return _stacked("Qwen3Moe", **experts, **width, **_grouped_heads())


def qwen3_next() -> Built:
    """With few experts, so that most of the time is that of its layers."""
    heads = {"linear_num_key_heads": _size(6, 1), "linear_num_value_heads": _size(12, 2)}
    widths = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": _size(512, 32)}
    shared = {"shared_expert_intermediate_size": _size(512, 32)}
    return _stacked("Qwen3Next", **heads, **widths, **experts, **shared, **_grouped_heads())


def mamba2() -> Built:
    sizes = {"num_heads": _size(24, 4), "head_dim": 64, "state_size": _size(128, 16), "n_groups": 1}
    return _stacked("Mamba2", **sizes, chunk_size=_size(256, 16))
