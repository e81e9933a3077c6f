"""The embeddings of our files are those of sentence-transformers, for the folders that it saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import sentence_transformers
import torch
import transformers
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tokenizers import Tokenizer, models

import attngraph
from tests.models import present
from tests.runtimes.conftest import Record

_WIDTH = 32
_TEXT: dict[str, Any] = {
    "hidden_size": _WIDTH,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 90,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
_T5 = {"d_model": _WIDTH, "d_kv": 16, "d_ff": 48, "num_heads": 2, "num_layers": 2, "vocab_size": 90}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertModel": ("BertConfig", _TEXT),
    "BertForMaskedLM": ("BertConfig", _TEXT),
    "Qwen3ForCausalLM": (
        "Qwen3Config",
        {**_TEXT, **_ENDS, "num_key_value_heads": 1, "head_dim": 16},
    ),
    "T5EncoderModel": ("T5Config", _T5),
}
_IDENTITY = torch.nn.Identity
_STAGES: dict[str, tuple[str, Callable[[], list[Any]]]] = {
    "every pooling": ("BertModel", lambda: [Pooling(_WIDTH, Pooling.POOLING_MODES)]),
    "dense, norm, residual": (
        "BertModel",
        lambda: [
            *(Pooling(_WIDTH, "mean"), Dense(_WIDTH, 16), LayerNorm(16)),
            *(Dense(16, 8, bias=False, use_residual=True), Normalize()),
        ],
    ),
    "tokens as well": (
        "BertModel",
        lambda: [
            Dense(_WIDTH, 16, activation_function=None, module_input_name="token_embeddings"),
            Normalize(module_input_name="token_embeddings"),
            Pooling(16, "cls"),
        ],
    ),
    "last token": ("Qwen3ForCausalLM", lambda: [Pooling(_WIDTH, "lasttoken"), Normalize()]),
    "an encoder of T5": ("T5EncoderModel", lambda: [Pooling(_WIDTH, "mean"), Dense(_WIDTH, 24)]),
    "words": ("BertForMaskedLM", lambda: [SpladePooling("max")]),
    "words, added up": ("BertForMaskedLM", lambda: [SpladePooling("sum", "log1p_relu")]),
}


def _base(folder: Path, name: str) -> str:
    torch.manual_seed(0)
    kind, options = _MODELS[name]
    getattr(transformers, name)(getattr(transformers, kind)(**options)).eval().save_pretrained(
        folder
    )
    words = Tokenizer(models.WordLevel({f"t{at}": at for at in range(90)}, unk_token="t1"))
    fast: Any = transformers.PreTrainedTokenizerFast
    fast(tokenizer_object=words, pad_token="t0", unk_token="t1").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", _STAGES)
def test_a_files_embeddings_are_those_of_sentence_transformers(
    name: str, tmp_path: Path, record: Record
) -> None:
    base, stages = _STAGES[name]
    is_sparse = base == "BertForMaskedLM"
    task: Any = "fill-mask" if is_sparse else "feature-extraction"
    kind: Any = (
        sentence_transformers.SparseEncoder
        if is_sparse
        else sentence_transformers.SentenceTransformer
    )
    first = Transformer(_base(tmp_path / "base", base), transformer_task=task)
    model = kind(modules=[first, *stages()]).eval()
    model.save(str(tmp_path / "in"))
    attngraph.optimize_checkpoint(tmp_path / "in").save(tmp_path / "out")

    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    for rows, length in ((3, 9), (1, 1), (5, 17)):
        ids = torch.randint(2, 90, (rows, length))
        mask = present(rows, length).long()
        features = {"input_ids": ids, "attention_mask": mask}
        feeds = {each.name: torch.zeros_like(ids) for each in session.get_inputs()} | features
        found = session.run(["sentence_embedding"], {n: t.numpy() for n, t in feeds.items()})
        with torch.no_grad():
            expected = model({n: each.clone() for n, each in features.items()})
        torch.testing.assert_close(
            torch.from_numpy(found[0]), expected["sentence_embedding"], rtol=1e-5, atol=1e-5
        )
    record("sentence-transformers", base, name)
