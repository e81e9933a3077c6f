"""onnxruntime-web and transformers.js, in node: our files, and the folders that we write."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import attngraph
from attngraph.decoding.decoder import Decoder
from attngraph.export.files import save as save_module
from attngraph.export.files.save import EXTERNAL_ABOVE, save
from attngraph.export.parity.budget import compare
from attngraph.export.parity.reference import Reference, ReferenceOutputs
from attngraph.optimized import Optimized
from attngraph.options import CacheKind
from tests.models.kit import HEADS, HIDDEN
from tests.parity import multimodal
from tests.parity.test_decode import PROMPT, prompts
from tests.runtimes.conftest import Record, node_packages
from tests.runtimes.encoders import MODELS
from tests.runtimes.families import decoder
from tests.runtimes.seq2seq import FAMILIES as SEQ2SEQ
from tests.runtimes.seq2seq import NEW as STEPS
from tests.runtimes.seq2seq import written

SCRIPT = Path(__file__).parent / "javascript" / "run.mjs"
NEW = 12
NEWER, OLDER = "onnxruntime-web", "onnxruntime-web-1.20.1"
STATIC = "Llama, static cache"
SEES = {
    "llava": "LLaVA",
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "smolvlm": "SmolVLM",
    "idefics3": "Idefics3",
}
_BEGINS = 11  # a token of no other meaning
FAMILIES = ("BERT", "Llama, growing cache", STATIC)
TAKEN = [
    (package, opset, family, portable)
    for package, opset in ((NEWER, 24), (NEWER, 21), (OLDER, 21))
    for family in FAMILIES
    for portable in (False, True)
    if (package, family, portable) != (OLDER, STATIC, False)
]


def results_of(name: str, folder: Path, **feeds: Tensor) -> dict[str, Tensor]:
    """What a package, or a class of transformers.js, makes of these. Raises RuntimeError with its
    own words."""
    packages, given, found = node_packages(), folder / "given.json", folder / "found.json"
    assert packages is not None
    said = {
        key: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "dims": list(tensor.shape),
            "data": base64.b64encode(tensor.numpy().tobytes()).decode(),
        }
        for key, tensor in feeds.items()
    }
    given.write_text(json.dumps(said))
    command = ["node", SCRIPT, packages, name, folder, given, found]
    subprocess.run(command, check=True, timeout=300)
    outcome: dict[str, Any] = json.loads(found.read_text())
    if "error" in outcome:
        raise RuntimeError(outcome["error"])
    return {
        key: torch.from_numpy(
            numpy.frombuffer(base64.b64decode(each["data"]), each["dtype"]).copy()
        ).reshape(each["dims"])
        for key, each in outcome.items()
    }


def version_of(package: str) -> str:
    packages = node_packages()
    assert packages is not None
    told = json.loads((packages / "node_modules" / package / "package.json").read_text())
    return f"{package.partition('-1.')[0]} {told['version']}"


def _bert(folder: Path, **options: Any) -> tuple[Optimized, dict[str, Tensor]]:
    """Its weights in a file beside it."""
    torch.manual_seed(0)
    module, args, shapes = MODELS["BERT"]()
    made = attngraph.optimize(module.eval(), args, dynamic_shapes=shapes, verify="off", **options)
    save(made.model, folder / "model.onnx", external_above=0)
    assert (folder / "model.onnx_data").exists()
    return made, dict(zip(made.session.input_names, args, strict=True))


def _llama(folder: Path, cache: CacheKind, **options: Any) -> tuple[Decoder, dict[str, Tensor]]:
    """A step of one token behind a past, whose buffers have room behind it."""
    room = 2 * PROMPT if cache == "static" else None
    made = attngraph.optimize_decoder(
        decoder("Llama"), cache=cache, max_length=room, verify="off", **options
    )
    made.save(folder / "model.onnx")
    ids, mask = prompts(3)
    shape = (3, HEADS // 2, room or PROMPT - 1, HIDDEN // HEADS)
    random = torch.Generator().manual_seed(0)
    pasts = {name: torch.randn(shape, generator=random) for name in made.layout.pasts}
    return made, {"input_ids": ids[:, -1:], "attention_mask": mask, **pasts}


@pytest.mark.parametrize(("package", "opset", "family", "portable"), TAKEN)
def test_a_file_in_webassembly(
    package: str, opset: int, family: str, portable: bool, tmp_path: Path, record: Record
) -> None:
    how: dict[str, Any] = {"opset": opset, "portable": portable}
    made: Optimized | Decoder
    if family == "BERT":
        made, feeds = _bert(tmp_path, **how)
    else:
        made, feeds = _llama(tmp_path, "static" if "static" in family else "growing", **how)
    found = results_of(package, tmp_path, **feeds)
    names = made.session.output_names
    ours = ReferenceOutputs(names, tuple(made.session.run(feeds)), (None,) * len(names))
    parity = compare(ours, tuple(found[name] for name in names), "fp32")
    assert parity.passed, str(parity)
    record(version_of(package), family, f"opset {opset}{' (portable)' * portable}")


def test_an_older_webassembly_takes_no_newer_opset_and_no_newer_operator(tmp_path: Path) -> None:
    """What `--opset` and `--portable` are for: its GroupQueryAttention has no sinks yet."""
    _, feeds = _bert(tmp_path, opset=22)
    with pytest.raises(RuntimeError):
        results_of(OLDER, tmp_path, **feeds)
    _, feeds = _llama(tmp_path, "static", opset=21)
    with pytest.raises(RuntimeError):
        results_of(OLDER, tmp_path, **feeds)


@pytest.mark.parametrize("above", [0, EXTERNAL_ABOVE], ids=["weights beside it", "one file"])
def test_a_folder_in_transformers_js(
    above: int, tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_module, "EXTERNAL_ABOVE", above)
    torch.manual_seed(0)
    module, args, _ = MODELS["BERT"]()
    module.eval().save_pretrained(tmp_path / "bert")
    out = tmp_path / "out"
    attngraph.optimize_checkpoint(tmp_path / "bert", verify="off").save(out)
    assert (out / "model.onnx_data").exists() == (above == 0)
    feeds = dict(zip(("input_ids", "attention_mask"), args, strict=True))
    feeds["token_type_ids"] = torch.zeros_like(args[0])
    found = results_of("AutoModelForSequenceClassification", out, **feeds)
    parity = compare(Reference(module, precision="fp32")(args), (found["logits"],), "fp32")
    assert parity.passed, str(parity)
    record(version_of("@huggingface/transformers"), "BERT", "sequence classification")


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "Qwen2"])
def test_a_decoders_folder_in_transformers_js(family: str, tmp_path: Path, record: Record) -> None:
    """Rows padded on the left; an empty cache is made of the names of its dims."""
    module, out = decoder(family), tmp_path / "out"
    module.save_pretrained(tmp_path / "in")
    attngraph.optimize_checkpoint(tmp_path / "in", verify="off").save(out)
    ids, mask = prompts(3)
    found = results_of(
        "AutoModelForCausalLM", out, input_ids=ids, attention_mask=mask, new=torch.tensor([NEW])
    )
    expected = module.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(found["tokens"], expected)
    record(
        version_of("@huggingface/transformers"), family, "growing cache, rows padded on the left"
    )


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_an_encoder_decoders_folder_in_transformers_js(
    family: str, tmp_path: Path, record: Record
) -> None:
    """It begins without a cache, and goes on in the same file. Its Whisper takes one row."""
    out, source, expected = written(family, tmp_path, 1 if family == "whisper" else 2)
    title, kind = SEQ2SEQ[family]
    found = results_of(f"AutoModelFor{kind}", out, **source, new=torch.tensor([STEPS]))
    length = expected.shape[1]  # Whisper's own generate cuts the start off
    assert torch.equal(found["tokens"][:, -length:], expected)
    record(version_of("@huggingface/transformers"), title, "growing cache, merged")


@pytest.mark.parametrize("family", SEES)
def test_a_folder_that_reads_images_in_transformers_js(
    family: str, tmp_path: Path, record: Record
) -> None:
    """An image in each of two rows: its own code joins them to the text.

    It forgets from the second token on which ones were padding. Where images lie on grids it looks
    for the token that begins them, as the processor writes it.
    """
    model: Any = multimodal.eager(family)
    (ids, mask), given = multimodal.prompt(family, 1, 1), multimodal.images(family, 2)
    if hasattr(model.config, "vision_start_token_id"):
        model.config.vision_start_token_id = _BEGINS
        first = (ids == multimodal.TOKEN).int().argmax(1)
        ids = ids.scatter(1, first[:, None] - 1, _BEGINS)
    model.save_pretrained(tmp_path / "in")
    out = tmp_path / "out"
    attngraph.optimize_checkpoint(tmp_path / "in", verify="off").save(out)
    mask = torch.ones_like(mask)
    feeds = {"input_ids": ids, "attention_mask": mask, **given}
    steps = torch.tensor([multimodal.STEPS])
    found = results_of("AutoModelForImageTextToText", out, **feeds, new=steps)
    assert torch.equal(found["tokens"], multimodal.expected(family, ids, mask, given))
    record(version_of("@huggingface/transformers"), SEES[family], "text with images")
