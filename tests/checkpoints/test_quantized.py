"""Quantized checkpoints: packed here as their formats have it, one element after the other.

The model is read with the codes as they are. What it computes is held against the plain class with
the weights that the codes stand for, which are computed here from nothing but the formats' words.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

import attngraph as package
from attngraph.checkpoints.folder import Folder
from attngraph.checkpoints.stored import StoredLinear
from attngraph.cli import run
from attngraph.errors import LoadError, ParityError
from attngraph.frontend.files.load import load

WORD = 32
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
NF4_LIKE = torch.linspace(-1, 1, 16).pow(3)
"""A table of numbers that no multiples of a step are."""


@dataclass(frozen=True)
class Draw:
    """Codes (N, K) in groups of columns, with what they stand for."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor
    bits: int

    @property
    def weight(self) -> torch.Tensor:
        steps = self.codes.double() - self.zeros.double()[:, self.groups]
        return (steps * self.scales.double()[:, self.groups]).float()


@dataclass(frozen=True)
class Case:
    """A checkpoint: how its weights are drawn, packed and told of."""

    pack: Callable[[str, Draw, Case], dict[str, torch.Tensor]]
    settings: Mapping[str, Any]
    bits: int = 4
    group: int = 16
    symmetric: bool = False
    act_order: bool = False
    scale: torch.dtype = torch.float16
    model: torch.dtype = torch.float32
    head: bool = False
    widths: Mapping[str, int] = field(default_factory=dict)
    packed: bool = True
    told: str = ""


def drawn(case: Case, rows: int, width: int, seed: int) -> Draw:
    make = torch.Generator().manual_seed(seed)
    top = 1 << case.bits
    codes = torch.randint(0, top, (rows, width), generator=make)
    each = width if case.group < 0 else case.group
    groups = torch.arange(width) // each
    if case.act_order:
        groups = groups[torch.randperm(width, generator=make)]
    count = -(-width // each)
    scales = (torch.rand(rows, count, generator=make) * 0.02 + 0.001).to(case.scale)
    zeros = torch.randint(1, top, (rows, count), generator=make)
    if case.symmetric:
        zeros = torch.full_like(zeros, top // 2)
    return Draw(codes, scales, zeros, groups, case.bits)


def words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Along the last axis, `32 / bits` codes to an integer, the first in the lowest bits."""
    each = WORD // bits
    rows = []
    for row in codes.tolist():
        row = row + [0] * (-len(row) % each)
        made = []
        for at in range(0, len(row), each):
            part = [row[at + i] for i in (order or range(each))]
            value = sum(code << bits * i for i, code in enumerate(part))
            made.append(value - (1 << WORD) if value >> WORD - 1 else value)
        rows.append(made)
    return torch.tensor(rows, dtype=torch.int32)


def gptq(name: str, draw: Draw, case: Case) -> dict[str, torch.Tensor]:
    less = 0 if case.settings.get("checkpoint_format") == "gptq_v2" else 1
    found = {
        "qweight": words(draw.codes, draw.bits).T,
        "qzeros": words(draw.zeros.T - less, draw.bits),
        "scales": draw.scales.T,
        "g_idx": draw.groups.int(),
    }
    return {f"{name}.{part}": data.contiguous() for part, data in found.items()}


def gptq_without_order(name: str, draw: Draw, case: Case) -> dict[str, torch.Tensor]:
    found = gptq(name, draw, case)
    del found[f"{name}.g_idx"]
    return found


def awq(name: str, draw: Draw, case: Case) -> dict[str, torch.Tensor]:
    found = {
        "qweight": words(draw.codes.T, 4, AWQ),
        "qzeros": words(draw.zeros.T, 4, AWQ),
        "scales": draw.scales.T.contiguous(),
    }
    return {f"{name}.{part}": data for part, data in found.items()}


def compressed(name: str, draw: Draw, case: Case) -> dict[str, torch.Tensor]:
    found = {
        "weight_packed": words(draw.codes, draw.bits),
        "weight_scale": draw.scales,
        "weight_shape": torch.tensor(draw.codes.shape),
    }
    if not case.symmetric:
        found["weight_zero_point"] = words(draw.zeros.T, draw.bits).T.contiguous()
    if case.act_order:
        found["weight_g_idx"] = draw.groups.int()
    return {f"{name}.{part}": data for part, data in found.items()}


def int8(name: str, draw: Draw, case: Case) -> dict[str, torch.Tensor]:
    largest = draw.scales[:, 0].float() * 127
    return {
        f"{name}.weight": (draw.codes - 128).to(torch.int8),
        f"{name}.SCB": largest,
        f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def nf4(name: str, draw: Draw, case: Case) -> dict[str, torch.Tensor]:
    """One scale for 64 elements of the flattened matrix, itself a place in a table of 256."""
    flat = draw.codes.flatten()
    packed = (flat[::2] << 4 | flat[1::2]).to(torch.uint8)
    blocks = -(-len(flat) // 64)
    state = {"quant_type": "nf4", "blocksize": 64, "shape": list(draw.codes.shape)}
    state |= {"nested_blocksize": 256, "nested_offset": 0.25, "dtype": "float32"}
    name = f"{name}.weight"
    return {
        name: packed.unsqueeze(1),
        f"{name}.absmax": (torch.arange(blocks) % 256).to(torch.uint8),
        f"{name}.quant_map": NF4_LIKE.clone(),
        f"{name}.nested_absmax": torch.full((-(-blocks // 256),), 0.5),
        f"{name}.nested_quant_map": torch.linspace(0, 1, 256),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


def nf4_weight(draw: Draw) -> torch.Tensor:
    flat = NF4_LIKE[draw.codes.flatten()]
    scales = torch.linspace(0, 1, 256)[torch.arange(-(-len(flat) // 64)) % 256] * 0.5 + 0.25
    return (flat * scales.repeat_interleave(64)[: len(flat)]).view(draw.codes.shape)


def groups_of(**weights: Any) -> dict[str, Any]:
    held = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": held, "targets": ["Linear"]}},
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}
V2 = {**GPTQ, "checkpoint_format": "gptq_v2"}
PLAIN = Case(gptq, GPTQ)
CASES = {
    "gptq": PLAIN,
    "gptq, act order, 8 bits": Case(
        gptq, {**GPTQ, "bits": 8, "desc_act": True}, bits=8, act_order=True
    ),
    "gptq v2, a head in codes": Case(gptq, V2, act_order=True, head=True),
    "gptq, one group": Case(gptq, {**GPTQ, "group_size": -1}, group=-1, symmetric=True),
    "gptq without an order": Case(gptq_without_order, {**GPTQ, "group_size": 32}, group=32),
    "gptq, groups of 8": Case(
        gptq, {**GPTQ, "group_size": 8}, group=8, packed=False, told="no kernel has blocks"
    ),
    "gptq in halves": Case(gptq, GPTQ, model=torch.float16),
    "awq": Case(awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}),
    "compressed": Case(compressed, groups_of(symmetric=False), scale=torch.bfloat16),
    "compressed, 8 bits, a channel": Case(
        compressed,
        groups_of(num_bits=8, strategy="channel", group_size=None, symmetric=True),
        bits=8,
        group=-1,
        symmetric=True,
        widths={"hidden_size": 36, "intermediate_size": 50},
    ),
    "compressed, act order": Case(
        compressed, groups_of(symmetric=True, actorder="group"), symmetric=True, act_order=True
    ),
    "int8": Case(
        int8, {"load_in_8bit": True}, bits=8, group=-1, symmetric=True, scale=torch.float32
    ),
    "nf4": Case(nf4, {"load_in_4bit": True}, packed=False, told="looks numbers up in a table"),
}
CASES["gptq"] = replace(PLAIN, widths={"intermediate_size": 56})  # no multiple of a group


def folder(path: Path, case: Case) -> Any:
    """Writes the checkpoint; the plain model whose weights are what it stands for."""
    from transformers import LlamaConfig, LlamaForCausalLM

    case = replace(case, group=-1) if case.pack is nf4 else case
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, **case.widths}
    config = LlamaConfig(
        **sizes,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        vocab_size=64,
        max_position_embeddings=40,
        tie_word_embeddings=True,
        dtype=case.model,
    )
    model = LlamaForCausalLM(config).eval().to(case.model)
    model.save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    for at, (name, part) in enumerate(list(model.named_modules())):
        if type(part) is not torch.nn.Linear or (name == "lm_head" and not case.head):
            continue
        draw = drawn(case, *part.weight.shape, seed=at)
        weights.pop(f"{name}.weight", None)
        weights |= case.pack(name, draw, case)
        exact = nf4_weight(draw) if case.pack is nf4 else draw.weight
        part.weight = torch.nn.Parameter(exact.to(case.model))
    save_file(weights, path / "model.safetensors")
    saved = json.loads((path / "config.json").read_text())
    saved["quantization_config"] = dict(case.settings)
    (path / "config.json").write_text(json.dumps(saved))
    return model


@pytest.mark.parametrize("how", CASES)
def test_the_numbers_are_those_that_the_codes_stand_for(tmp_path: Path, how: str) -> None:
    case = CASES[how]
    model = folder(tmp_path, case)
    found = load(tmp_path, samples=False)
    assert found.module is not None
    linears = {n: p for n, p in found.module.named_modules() if isinstance(p, StoredLinear)}
    assert len(linears) == (7 + case.head if case.packed else 0)
    wanted = {n: p.weight for n, p in model.named_modules() if isinstance(p, torch.nn.Linear)}
    own = {n: p.weight for n, p in found.module.named_modules() if n in wanted}
    assert own.keys() == wanted.keys()
    for name, weight in wanted.items():
        limit = 2e-7 if case.pack is int8 else 0.0  # of one factor that is divided by 127
        torch.testing.assert_close(own[name], weight, rtol=limit, atol=0.0)
    assert case.told in " ".join(found.notes)
    ids = torch.randint(0, 64, (2, 7))
    with torch.no_grad():
        logits, expected = found.module(ids).logits, model(ids).logits
    assert float((logits - expected).abs().max()) <= 64 * torch.finfo(case.model).eps * float(
        expected.abs().max()
    )


_OTHERS: dict[str, tuple[str, dict[str, Any], tuple[str, ...], int]] = {
    # a GPT-2 keeps its linears as (K, N), two of them square
    "GPT2LMHeadModel": (
        "GPT2",
        {"n_embd": 32, "n_head": 2, "n_layer": 1, "n_positions": 40},
        (),
        4,
    ),
    # experts that the class has as one tensor
    "MixtralForCausalLM": (
        "Mixtral",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": 1,
            "num_local_experts": 2,
        },
        ("gate.",),
        4,
    ),
}


@pytest.mark.parametrize("name", _OTHERS)
def test_weights_that_the_class_has_otherwise(tmp_path: Path, name: str) -> None:
    """Held against the class's own reading of a plain folder with the numbers."""
    import transformers

    kind, sizes, left, kept = _OTHERS[name]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, bos_token_id=1, eos_token_id=2, **sizes
    )
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    plain = dict(weights)
    for at, (key, data) in enumerate(plain.items()):
        skipped = ("embed", "wte", "wpe", "lm_head", *left)
        if data.dim() != 2 or any(part in key for part in skipped):
            continue
        stem, turned = key.removesuffix(".weight"), kind == "GPT2"
        draw = drawn(PLAIN, *(data.T if turned else data).shape, seed=at)
        del weights[key]
        weights |= gptq(stem, draw, PLAIN)
        plain[key] = (draw.weight.T if turned else draw.weight).contiguous()
    save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    expected = load(tmp_path, samples=False).module
    save_file(weights, tmp_path / "model.safetensors")
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**saved, "quantization_config": GPTQ}))
    found = load(tmp_path, samples=False)
    assert found.module is not None
    assert expected is not None
    assert sum(isinstance(part, StoredLinear) for part in found.module.modules()) == kept
    ids = torch.randint(0, 64, (2, 7))
    with torch.no_grad():
        assert torch.equal(found.module(ids).logits, expected(ids).logits)


def test_an_adapter_is_added_to_the_numbers(tmp_path: Path) -> None:
    model = folder(tmp_path / "base", PLAIN)
    name = "model.layers.0.self_attn.q_proj"
    down, up = torch.randn(3, 32), torch.randn(32, 3)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 3}
    settings["base_model_name_or_path"] = str(tmp_path / "base")
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    factors = {"lora_A.weight": down, "lora_B.weight": up}
    save_file(
        {f"base_model.model.{name}.{part}": data for part, data in factors.items()},
        adapter / "adapter_model.safetensors",
    )
    found = load(adapter, samples=False)
    assert found.module is not None
    expected = model.get_submodule(name).weight + up @ down
    torch.testing.assert_close(found.module.get_submodule(name).weight, expected)
    assert "7 weights that gptq stored are floats here: the adapter is added" in str(found.notes)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint in codes, the folder that it compiles to, and the plain model."""
    source, out = (tmp_path_factory.mktemp(name) for name in ("source", "out"))
    model = folder(source, CASES["gptq v2, a head in codes"])
    made = package.optimize_checkpoint(source, verify="off")
    made.save(out)
    return source, out, model, made


def test_the_file_has_the_codes_and_gives_the_models_tokens(compiled: Any) -> None:
    _, out, model, made = compiled
    ids = torch.randint(1, 64, (2, 5), generator=torch.Generator().manual_seed(0))
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(package.Decoder.load(out / "model.onnx").generate(ids, 6), expected)
    assert "8 weights of linears are stored in 4 bits as gptq has them" in str(made.report.notes)
    proto = onnx.load(out / "model.onnx")
    assert Counter(node.op_type for node in proto.graph.node)["MatMulNBits"] == 8
    floats = [each for each in proto.graph.initializer if each.data_type == onnx.TensorProto.FLOAT]
    assert max(math.prod(each.dims) for each in floats) == 64 * 32, "the embedding's alone"


@pytest.mark.slow
def test_verify_finds_a_code_that_was_changed(compiled: Any, tmp_path: Path) -> None:
    source, out, *_ = compiled
    file = tmp_path / "model.onnx"
    proto = onnx.load(out / "model.onnx")
    onnx.save(proto, file)
    assert run(["verify", str(source), str(file)]) == 0
    codes = next(t for t in proto.graph.initializer if t.data_type == onnx.TensorProto.UINT8)
    codes.raw_data = bytes([codes.raw_data[0] ^ 1]) + codes.raw_data[1:]
    onnx.save(proto, file)
    assert run(["verify", str(source), str(file)]) == ParityError.exit_code


def test_zero_points_that_readers_disagree_on_are_refused(tmp_path: Path) -> None:
    folder(tmp_path, PLAIN)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.qzeros"][0, 0] = -1
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"up_proj can't be read .*whether that is 0 or 16"):
        load(tmp_path, samples=False)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({**GPTQ, "bits": 3}, "by gptq.* as its bits are 3 and not 4 or 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "as its checkpoint_format is marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "its version is gemv and not gemm"),
        (groups_of(num_bits=3), "as its weights are 3 bits of int"),
        ({**groups_of(), "kv_cache_scheme": {"num_bits": 8}}, "as it has kv_cache_scheme"),
        ({**groups_of(), "format": "float-quantized"}, "as its format is float-quantized and not"),
    ],
)
def test_a_form_that_is_not_understood_is_refused(
    tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(LoadError, match=why):
        Folder.read(tmp_path)
