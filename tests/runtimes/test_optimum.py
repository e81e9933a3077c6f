"""optimum-onnx, with the transformers that it pins, opens our files beside a model's config."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

import attngraph
from attngraph.export.parity.budget import compare
from attngraph.export.parity.reference import Reference
from tests.models import present
from tests.parity.test_decode import prompts
from tests.runtimes.conftest import Record, optimum_python
from tests.runtimes.encoders import MODELS
from tests.runtimes.families import DECODERS, decoder
from tests.runtimes.seq2seq import FAMILIES as SEQ2SEQ
from tests.runtimes.seq2seq import NEW as STEPS
from tests.runtimes.seq2seq import written

NEW = 12
SCRIPT = Path(__file__).with_name("run_optimum.py")
RUNTIME = "optimum-onnx 0.1.0"
OF_OTHER_SIZES = {"Phi-3", "Qwen3"}
"""It makes the empty cache of these with as many heads, or as wide ones, as their queries have,
unless it is told otherwise."""


def ran(kind: str, folder: Path, **feeds: Tensor) -> Tensor:
    """What optimum's class makes of the inputs, in a process of its own."""
    python = optimum_python()
    assert python is not None
    given, found = folder / "given.npz", folder / "found.npz"
    numpy.savez(given, **{name: tensor.numpy() for name, tensor in feeds.items()})
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-W", "ignore", SCRIPT, kind, folder, given, found]
    subprocess.run(command, env=environment, check=True)
    with numpy.load(found) as file:
        return torch.from_numpy(file["result"])


@pytest.mark.parametrize("family", sorted(DECODERS))
def test_a_decoder_generates_the_tokens_of_transformers(
    family: str, tmp_path: Path, record: Record
) -> None:
    module = decoder(family)
    module.save_pretrained(tmp_path)
    made = attngraph.optimize_decoder(module, all_logits=True, verify="off")
    made.save(tmp_path / "model.onnx")
    ids, mask = prompts(3)
    past = made.layout.pasts[0]
    _, heads, _, width = made.session.input_shape(past)
    sizes = {"sizes": torch.tensor([heads, width])} if family in OF_OTHER_SIZES else {}
    given = {"input_ids": ids, "attention_mask": mask, "new": torch.tensor(NEW), **sizes}
    found = ran("ORTModelForCausalLM", tmp_path, **given)
    expected = module.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(found, expected)
    record(RUNTIME, family, "growing cache, rows padded on the left")


def test_a_classifier(tmp_path: Path, record: Record) -> None:
    torch.manual_seed(0)
    module, args, shapes = MODELS["BERT"]()
    module.eval().save_pretrained(tmp_path)
    made = attngraph.optimize(module, args, dynamic_shapes=shapes, verify="off")
    made.save(tmp_path / "model.onnx")
    feeds = dict(zip(made.session.input_names, args, strict=True))
    found = ran("ORTModelForSequenceClassification", tmp_path, **feeds)
    parity = compare(Reference(module, precision="fp32")(args), (found,), "fp32")
    assert parity.passed, str(parity)
    record(RUNTIME, "BERT", "sequence classification")


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_an_encoder_decoders_folder(family: str, tmp_path: Path, record: Record) -> None:
    """By default it takes the merged file, for the first step and all others."""
    out, source, expected = written(family, tmp_path)
    title, kind = SEQ2SEQ[family]
    found = ran(f"ORTModelFor{kind}", out, **source, new=torch.tensor(STEPS))
    assert torch.equal(found, expected)
    record(RUNTIME, title, "growing cache, merged")


def test_a_decoder_that_takes_positions(tmp_path: Path, record: Record) -> None:
    """From the mask it makes the same ones as are computed in a file without them."""
    module = decoder("GPT-2")
    module.save_pretrained(tmp_path)
    made = attngraph.optimize_decoder(module, all_logits=True, position_ids=True, verify="off")
    made.save(tmp_path / "model.onnx")
    ids, mask = prompts(3)
    feeds = {"input_ids": ids, "attention_mask": mask, "new": torch.tensor(NEW)}
    found = ran("ORTModelForCausalLM", tmp_path, **feeds)
    expected = module.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(found, expected)
    record(RUNTIME, "GPT-2", "growing cache, positions given")


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_a_decoders_folder(family: str, tmp_path: Path, record: Record) -> None:
    """As `optimize` writes it for one who names no runtime."""
    module = decoder(family)
    module.save_pretrained(tmp_path / "in")
    attngraph.optimize_checkpoint(tmp_path / "in", verify="off").save(tmp_path / "out")
    ids, mask = prompts(3)
    feeds = {"input_ids": ids, "attention_mask": mask, "new": torch.tensor(NEW)}
    found = ran("ORTModelForCausalLM", tmp_path / "out", **feeds)
    expected = module.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(found, expected)
    record(RUNTIME, family, "growing cache, a folder")


def test_features_and_a_pipeline(tmp_path: Path, record: Record) -> None:
    """The folder of a BERT without a head, by its class and by optimum's pipeline."""
    from transformers import BertTokenizerFast

    torch.manual_seed(0)
    module, args, _ = MODELS["BERT"]()
    module = module.eval().base_model
    module.save_pretrained(tmp_path / "in")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "in")
    attngraph.optimize_checkpoint(tmp_path / "in", verify="off").save(tmp_path / "out")
    feeds = dict(zip(("input_ids", "attention_mask"), args, strict=True))
    found = ran("ORTModelForFeatureExtraction", tmp_path / "out", **feeds)
    expected = Reference(module, precision="fp32")(args)
    assert expected.eager[0].shape == found.shape
    torch.testing.assert_close(found, expected.eager[0], rtol=0, atol=1e-5)
    ids = torch.tensor([[2, 5, 6, 7, 3]])
    piped = ran("feature-extraction", tmp_path / "out", text=torch.tensor(list(b"a b c")))
    with torch.no_grad():
        torch.testing.assert_close(piped, module(ids)[0], rtol=0, atol=1e-5)
    record(RUNTIME, "BERT", "feature extraction")
    record(RUNTIME, "BERT", "pipeline")


@pytest.mark.parametrize("inner", ["", "0_Transformer"])
def test_a_sentence_transformers_folder(inner: str, tmp_path: Path, record: Record) -> None:
    """As SentenceTransformer(OUT, backend="onnx"), which takes the model's tokens from the file."""
    from transformers import BertTokenizerFast

    torch.manual_seed(0)
    module, args, _ = MODELS["BERT"]()
    module = module.eval().base_model
    folder = tmp_path / "in" / inner
    module.save_pretrained(folder)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na")
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(folder)
    settings = folder / "tokenizer_config.json"  # by the name that transformers 4 has for the class
    named = json.loads(settings.read_text()) | {"tokenizer_class": "BertTokenizer"}
    settings.write_text(json.dumps(named))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    width = module.config.hidden_size
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    (tmp_path / "in" / "1_Pooling").mkdir()
    (tmp_path / "in" / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    kinds = {"Transformer": inner, "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    entries = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (kind, path) in enumerate(kinds.items())
    ]
    (tmp_path / "in" / "2_Normalize").mkdir()
    (tmp_path / "in" / "2_Normalize" / "config.json").write_text("{}")
    (tmp_path / "in" / "modules.json").write_text(json.dumps(entries))
    attngraph.optimize_checkpoint(tmp_path / "in", verify="off").save(tmp_path / "out")
    ids, mask = args[0], present(*args[0].shape).long()
    found = ran("SentenceTransformer", tmp_path / "out", input_ids=ids, attention_mask=mask)
    with torch.no_grad():
        tokens = module(input_ids=ids, attention_mask=mask)[0]
    mean = (tokens * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    expected = torch.nn.functional.normalize(mean, dim=-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    record(RUNTIME, "BERT", "sentence-transformers 5.1.2, a folder")
