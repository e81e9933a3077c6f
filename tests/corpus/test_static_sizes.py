"""What rewrites are compared on doesn't grow with a model's static sizes; neither do the passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attngraph.compiling.pipeline import pipeline
from attngraph.frontend.capture import capture
from attngraph.passes import run
from attngraph.passes.rewriting.regions import Region

pytestmark = pytest.mark.wide

MOST = 1 << 20  # elements that a trial computes, and the passes' trials of a dynamic model too
ALL = 1 << 27  # elements of all trials of a model


def _vit() -> tuple[Any, tuple[torch.Tensor, ...], int]:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(num_hidden_layers=2)), (torch.zeros(1, 3, 224, 224),), 2


def _yolos() -> tuple[Any, tuple[torch.Tensor, ...], int]:
    from transformers import YolosConfig, YolosModel

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    config = YolosConfig(num_hidden_layers=2, image_size=[512, 512], **sizes)
    return YolosModel(config), (torch.zeros(1, 3, 512, 512),), 2


def _bert() -> tuple[Any, tuple[torch.Tensor, ...], int]:
    from transformers import BertConfig, BertModel

    ids = torch.zeros(1, 512, dtype=torch.long)
    return BertModel(BertConfig(num_hidden_layers=2)), (ids, torch.ones_like(ids)), 2


def _llama() -> tuple[Any, tuple[torch.Tensor, ...], int]:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=1024,
        vocab_size=1000,
        use_cache=False,
    )
    ids = torch.zeros(1, 2048, dtype=torch.long)
    return LlamaModel(config), (ids, torch.ones_like(ids)), 2


def _sew_d() -> tuple[Any, tuple[torch.Tensor, ...], int]:
    """Disentangled attention, whose positions are counted in buckets."""
    from transformers import SEWDConfig, SEWDModel

    config = SEWDConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=37,
        conv_dim=(32, 32, 32),
        conv_stride=(4, 4, 4),
        conv_kernel=(8, 8, 8),
        feature_layer_norm_eps=1e-5,
        squeeze_factor=1,
        max_position_embeddings=50,
        position_buckets=16,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=3,
        apply_spec_augment=False,
    )
    signal = torch.zeros(2, 1024)
    return SEWDModel(config), (signal, torch.ones(2, 1024, dtype=torch.long)), 2


@pytest.mark.parametrize("build", [_vit, _yolos, _bert, _llama, _sew_d])
def test_static_sizes_are_evaluated_small(
    build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module, args, sites = build()
    graph = capture(module.eval(), args).graph
    counts: list[int] = []
    trial = Region.run

    def counted(region: Region, sizes: Any, kind: str, fixed: Any, aims: Any = None) -> Any:
        counts.append(region.elements(sizes, fixed)[0])
        return trial(region, sizes, kind, fixed, aims)

    monkeypatch.setattr(Region, "run", counted)
    results = run(graph, pipeline())
    remarks = [remark for result in results for remark in result.remarks]
    assert sum(remark.status == "fused" for remark in remarks) == sites
    assert not [r for r in remarks if r.code in ("unequal", "not-evaluated")]
    assert not any(result.tally.left_out for result in results)
    assert max(counts) < MOST
    assert sum(counts) < ALL
