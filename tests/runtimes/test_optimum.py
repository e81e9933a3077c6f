"""optimum-onnx, with the transformers that it pins, opens our files beside a model's config."""

from __future__ import annotations

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
from tests.parity.test_decode import prompts
from tests.runtimes.conftest import Record, optimum_python
from tests.runtimes.encoders import MODELS
from tests.runtimes.families import decoder

NEW = 12
SCRIPT = Path(__file__).with_name("run_optimum.py")
RUNTIME = "optimum-onnx 0.1.0"


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


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "Qwen2"])
def test_a_decoder_generates_the_tokens_of_transformers(
    family: str, tmp_path: Path, record: Record
) -> None:
    module = decoder(family)
    module.save_pretrained(tmp_path)
    made = attngraph.optimize_decoder(module, all_logits=True, verify="off")
    made.save(tmp_path / "model.onnx")
    ids, mask = prompts(3)
    found = ran(
        "ORTModelForCausalLM", tmp_path, input_ids=ids, attention_mask=mask, new=torch.tensor(NEW)
    )
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
