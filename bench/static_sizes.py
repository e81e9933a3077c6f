"""CPU seconds of the passes, against those of capture, for models compiled with static sizes.

    python -m bench.static_sizes [--models MODEL …]

Rewrites of a model with static sizes are evaluated at smaller ones of the same structure, so the
passes cost no more than for dynamic sizes. Each model has a process of its own.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

from bench.harness import in_process, options_of
from bench.machine import write


def vit() -> tuple[Any, tuple[Any, ...]]:
    """ViT-B/16 at 224 × 224 pixels."""
    import torch
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig()), (torch.zeros(1, 3, 224, 224),)


def bert() -> tuple[Any, tuple[Any, ...]]:
    """BERT-base at 512 tokens, with a padding mask."""
    import torch
    from transformers import BertConfig, BertModel

    ids = torch.zeros(1, 512, dtype=torch.int64)
    return BertModel(BertConfig()), (ids, torch.ones_like(ids))


def llama() -> tuple[Any, tuple[Any, ...]]:
    """A Llama of 16 layers and hidden size 1024 at 2048 tokens, with a padding mask."""
    import torch
    from transformers import LlamaModel

    from bench.workloads import llama_config

    config = llama_config(1024, 16, (16, 4), 2816, 1000, use_cache=False)
    ids = torch.zeros(1, 2048, dtype=torch.int64)
    return LlamaModel(config), (ids, torch.ones_like(ids))


MODELS = {"ViT-B/16": vit, "BERT-base, 512 tokens": bert, "Llama, 2048 tokens": llama}


def measure(name: str) -> dict[str, Any]:
    """One measurement in this process."""
    warnings.simplefilter("ignore")
    from attngraph.compiling.pipeline import pipeline
    from attngraph.frontend.model import Model, trace
    from attngraph.passes import run

    module, args = MODELS[name]()
    start = time.process_time()
    graph = trace(Model(module.eval(), None, args, {}, None)).graph
    captured = time.process_time()
    run(graph, pipeline())
    ended = time.process_time()
    fused = sum(node.op == "attn.attention" for node in graph)
    return {
        "model": name,
        "capture_cpu_s": captured - start,
        "passes_cpu_s": ended - captured,
        "ratio": (ended - captured) / (captured - start),
        "fused": fused,
    }


def main() -> None:
    options = options_of(__doc__, models=list(MODELS))
    rows = []
    for name in options.models:
        rows.append(in_process(measure, name=name))
        print(f"{name}: {rows[-1]['ratio']:.2f} × capture", flush=True)
    print(write("static_sizes", {"rows": rows}))


if __name__ == "__main__":
    main()
