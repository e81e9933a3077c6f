"""Decoders whose tables change with the length: right across each change, or refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph import Decoder
from attngraph.decoding.caches import StaticCache
from attngraph.decoding.checking import generated_parity
from attngraph.decoding.lengths import Lengths, lengths_of
from attngraph.errors import ParityError, UsageError
from attngraph.export.runtime.session import Session
from attngraph.export.target import Target
from attngraph.frontend.families.cache import METADATA_KEY, find_layout
from attngraph.frontend.families.causal_lm import UnpaddedCausalLM
from attngraph.frontend.model import Model, trace
from attngraph.verification.verify import verify_file
from tests.models.kit import VOCABULARY, peaked
from tests.parity.test_decode import MODELS, common, compiled, prompts

pytestmark = pytest.mark.wide

SHORT = 16
"""Up to so many tokens, LongRoPE turns keys by the short factors."""


def phi() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0],
        "original_max_position_embeddings": SHORT,
    }
    sizes = common(num_key_value_heads=2, num_hidden_layers=1, pad_token_id=0)
    config = Phi3Config(**sizes, rope_parameters=rope, original_max_position_embeddings=SHORT)
    return peaked(Phi3ForCausalLM(config))


@functools.cache
def phi_decoder(**options: Any) -> tuple[nn.Module, Decoder]:
    module = phi()
    return module, attngraph.optimize_decoder(module, **options)


@pytest.fixture(params=["growing", "static"])
def long(request: pytest.FixtureRequest) -> tuple[nn.Module, Decoder]:
    return (
        phi_decoder() if request.param == "growing" else phi_decoder(cache="static", max_length=40)
    )


def uncached(module: nn.Module, ids: Tensor, mask: Tensor, count: int) -> Tensor:
    """The likeliest tokens of a model that sees all of them anew at each step."""
    for _ in range(count):
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        with torch.no_grad():
            result = module(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
            )
        ids = torch.cat([ids, result.logits[:, -1:].argmax(-1)], 1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return ids


def test_longrope_is_eager_across_its_length(long: tuple[nn.Module, Decoder]) -> None:
    module, decoder = long
    assert decoder.layout.switches == (SHORT,)
    ids, mask = prompts(3)
    expected = module.generate(
        ids, attention_mask=mask, max_new_tokens=24, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    found = decoder.generate(ids, 24, mask)
    assert torch.equal(found, expected)
    assert torch.equal(found, uncached(module, ids, mask, 24))
    # A cache that is kept gives others, so the switch is in what is compared.
    kept = Decoder(decoder.session, Lengths().told(decoder.layout))
    assert not torch.equal(kept.generate(ids, 24, mask), expected)


def test_positions_count_and_not_padding(long: tuple[nn.Module, Decoder]) -> None:
    """Every row is padded, so the length that the model sees is shorter than the tensor."""
    module, decoder = long
    ids, mask = prompts(2)
    mask[:, :3] = 0
    assert torch.equal(decoder.generate(ids, 24, mask), uncached(module, ids, mask, 24))


def test_parts_that_cross_and_parts_that_stop_before(long: tuple[nn.Module, Decoder]) -> None:
    _, decoder = long
    ids = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
    for ends in (
        (24,),
        (SHORT, 24),
        (SHORT + 1, 24),
        (5, SHORT - 1, SHORT, SHORT + 1, 24),
        (9, 24),
    ):
        start, cache = 0, None
        for end in ends:
            logits, cache = decoder(ids[:, start:end], None, cache)
            expected, _ = decoder(ids[:, :end])
            atol = 64 * torch.finfo(torch.float32).eps * float(expected.abs().max())
            torch.testing.assert_close(logits, expected, rtol=0, atol=atol)
            start = end
        assert cache is not None
        assert cache.length == 24


def test_a_static_cache_is_filled_anew_and_the_caches_before_are_refused() -> None:
    decoder = phi_decoder(cache="static", max_length=40)[1]
    ids, _ = prompts(1)
    _, early = decoder(ids)
    _, late = decoder(torch.cat([ids, ids], 1), None, early)
    assert isinstance(late, StaticCache)
    assert isinstance(early, StaticCache)
    assert late.slots is early.slots
    assert late.length == 3 * ids.shape[1]
    for stale in (early, early):
        with pytest.raises(UsageError, match="was overwritten"):
            decoder(torch.cat([ids, ids], 1), None, stale)
    decoder(ids, None, late)


def _tampered(path: Path, change: Callable[[onnx.ModelProto], int]) -> None:
    model = onnx.load(path)
    assert change(model) == 1
    onnx.save(model, path)


def _other_factors(model: onnx.ModelProto) -> int:
    changed = 0
    for tensor in model.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        if values.ndim and values.size == 8 and values.max() == 0.25:  # 1 / the first long factor
            tensor.CopyFrom(onnx.numpy_helper.from_array(values * 1.5, tensor.name))
            changed += 1
    return changed


def _no_switch(model: onnx.ModelProto) -> int:
    (entry,) = (entry for entry in model.metadata_props if entry.key == METADATA_KEY)
    layout = json.loads(entry.value)
    layout["switches"] = []
    entry.value = json.dumps(layout)
    return 1


@pytest.mark.parametrize("change", [None, _other_factors, _no_switch])
def test_what_is_wrong_behind_the_length_alone_is_found(
    change: Callable[[onnx.ModelProto], int] | None, tmp_path: Path
) -> None:
    module, decoder = phi_decoder()
    path = tmp_path / "phi.onnx"
    decoder.save(path)
    if change is not None:
        _tampered(path, change)
    model = Model(module, None, (), {}, None, "phi")
    with Session.open(path, Target("cpu")) as session:
        if change is _no_switch:
            with pytest.raises(ParityError, match=r"switches=\(\), .* switches=\(16,\)"):
                verify_file(model, path, session)
            return
        found = verify_file(model, path, session)
    assert found.parity.passed is (change is None)


Rule = Callable[[Tensor], Tensor]


class Scaled(nn.Module):
    """One head, whose keys are scaled by what a rule makes of the places of the new tokens."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule
        self.tokens, self.project = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 48)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, before = self.tokens(ids), keys.shape[2]
        total = before + ids.shape[1]
        places = torch.arange(before, total)
        query, key, value = self.project(x)[:, None].chunk(3, -1)
        keys = torch.cat([keys, key * self.rule(places)], 2)
        values = torch.cat([values, value], 2)
        visible = torch.arange(total) <= places[:, None]
        scores = (query @ keys.mT / 4).masked_fill(~visible, -torch.inf)
        return self.head(x + (scores.softmax(-1) @ values)[:, 0]), keys, values

    def model(self, most: int = 400) -> Model:
        batch, seq, past = Dim("batch", max=64), Dim("seq", max=most), Dim("past", max=most)
        kept, rows = torch.randn(2, 1, 5, 16), {0: batch, 2: past}
        args = (torch.randint(3, 100, (2, 3)), kept, kept + 1)
        return Model(self, None, args, {}, ({0: batch, 1: seq}, rows, rows), "scaled")


def scaled(rule: Rule, most: int = 400) -> tuple[Scaled, Model]:
    module = peaked(Scaled(rule)).eval()
    return module, module.model(most)


def derived(model: Model) -> Lengths:
    captured = trace(model)
    return lengths_of(captured.graph, find_layout(captured.graph, None, model.source))


NONE = Lengths()
RULES: dict[str, tuple[Rule, Lengths]] = {
    "of each token": (lambda at: (1 + at / 100)[:, None], Lengths((100,))),
    "of a window": (lambda at: torch.where(at > 20, 2.0, 1.0)[:, None], Lengths((20, 21))),
    "of the last place": (
        lambda at: torch.where(at.max() * 2 + 5 > 71, 2.0, 1.0),
        Lengths((34, 71), (34,)),
    ),
    "of the count": (lambda at: torch.where(at[-1] >= 90, 2.0, 1.0), Lengths((90,), (90,))),
    "two of them": (
        lambda at: torch.where(at.max() > 29, 2.0, 1.0) + (at.max() > 69),
        Lengths((29, 30, 69, 70), (30, 70)),
    ),
    "that cancels": (lambda at: 1 + 0 * at.max(), NONE),
    "behind a length": (
        lambda at: (at.max() + 1).clamp_min(12).float().log(),
        Lengths((12,), (), 12),
    ),
    "in steps": (lambda at: 1 + at.max() // 10, Lengths((10,), (), 10)),
    "at each length": (lambda at: 1 + at.max() / 100, Lengths((100,), (), 1)),
}


@pytest.mark.parametrize("name", RULES)
def test_lengths_are_derived_from_the_graph(name: str) -> None:
    rule, expected = RULES[name]
    assert derived(scaled(rule)[1]) == expected


@pytest.mark.parametrize("static", [False, True])
def test_a_module_with_a_switch_of_its_own(static: bool) -> None:
    module, model = scaled(RULES["of the last place"][0])
    options: dict[str, Any] = {"cache": "static", "max_length": 60} if static else {}
    decoder = attngraph.optimize_decoder(
        module, model.args, dynamic_shapes=model.dynamic_shapes, **options
    )
    ids, _ = prompts(2)
    expected, empty = ids, torch.zeros(2, 1, 0, 16)
    for _ in range(40):
        with torch.no_grad():
            logits, *_ = module(expected, empty, empty)
        expected = torch.cat([expected, logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(decoder.generate(ids, 40), expected)
    _, cache = decoder(expected[:, :30])
    logits, cache = decoder(expected[:, 30:40], None, cache)
    assert logits.shape == (2, 10, VOCABULARY)
    whole, _ = decoder(expected[:, :40])
    assert torch.equal(logits, whole[:, 30:])


def test_no_cache_goes_on_where_each_length_changes_it() -> None:
    module, model = scaled(RULES["behind a length"][0])
    decoder = attngraph.optimize_decoder(module, model.args, dynamic_shapes=model.dynamic_shapes)
    ids, _ = prompts(1)
    assert decoder.generate(ids, 6).shape == (1, 13)  # of which the last is not fed
    with pytest.raises(UsageError, match=r"each length behind 12, .* go on to 13"):
        decoder.generate(ids, 7)
    _, cache = decoder(ids)
    with pytest.raises(UsageError, match="give all of them as one prompt"):
        decoder(ids, None, cache)
    whole = torch.cat([ids, ids], 1)
    empty = torch.zeros(1, 1, 0, 16)
    with torch.no_grad():
        exact = module.double()(whole, empty.double(), empty.double())[0]
    atol = 64 * torch.finfo(torch.float32).eps * float(exact.abs().max())
    torch.testing.assert_close(decoder(whole)[0].double(), exact, rtol=0, atol=atol)


def test_a_cache_that_each_token_changes_is_refused() -> None:
    module, model = scaled(RULES["at each length"][0])
    with pytest.raises(UsageError, match="Scaled can't be decoded with a cache: from 2"):
        attngraph.optimize_decoder(module, model.args, dynamic_shapes=model.dynamic_shapes)


def test_a_length_that_no_step_reaches_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    module, model = scaled(RULES["of the count"][0])
    compiling = functools.partial(
        attngraph.optimize_decoder, module, model.args, dynamic_shapes=model.dynamic_shapes
    )
    assert not any("not checked" in note for note in compiling().report.notes)
    monkeypatch.setattr("attngraph.decoding.lengths.room_for_past", lambda graph: 80 * 128)
    assert any("Steps at 90 tokens" in note for note in compiling().report.notes)


FAR = 700
"""A length at which all keys change, behind those that several rows are run at."""


def _behind_far(at: Tensor) -> Tensor:
    return torch.where(at.max() >= FAR, 2.0, 1.0)


@functools.cache
def far() -> tuple[Model, Decoder]:
    module, model = scaled(_behind_far, 2 * FAR)
    shapes = model.dynamic_shapes
    return model, attngraph.optimize_decoder(module, model.args, dynamic_shapes=shapes)


def test_generated_tokens_cross_a_far_length() -> None:
    model, decoder = far()
    assert decoder.layout.switches == (FAR,)
    captured, told = trace(model), derived(model)
    assert generated_parity(model, captured, decoder, "fp32", told).passed
    kept = Decoder(decoder.session, Lengths().told(decoder.layout))
    found = generated_parity(model, captured, kept, "fp32", told)
    wrong = [output.case for output in found.outputs if not output.passed]
    assert wrong == [f"at {FAR} tokens"]


def test_a_length_that_no_generated_token_crosses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model, decoder = far()
    assert not any("drawn cache" in note for note in decoder.report.notes)
    monkeypatch.setattr("attngraph.decoding.lengths._ONE_ROW", 1e6)
    graph, told = trace(model).graph, derived(model)
    (note,) = told.notes(graph, decoder.layout)
    assert (
        f"Steps at {FAR} tokens, where something changes or ends, are checked from a drawn" in note
    )
    assert not told.far(graph, decoder.layout)


def test_generated_tokens_reach_the_end_of_a_far_table() -> None:
    """The row of the last step is another one's in the file, which no step before it shows."""

    def table() -> Tensor:
        return torch.linspace(1, 2, FAR)[:, None].clone()

    rows, others = table(), table()
    others[-1] = 9.0
    model, wrong = (
        scaled(functools.partial(torch.embedding, each), 2 * FAR)[1] for each in (rows, others)
    )
    told = derived(model)
    assert told.most == FAR
    decoder = attngraph.optimize_decoder(
        wrong.module, wrong.args, dynamic_shapes=wrong.dynamic_shapes, verify="off"
    )
    found = generated_parity(model, trace(model), decoder, "fp32", told)
    assert [output.case for output in found.outputs if not output.passed] == [f"at {FAR} tokens"]


def test_tables_end_in_a_sentence() -> None:
    decoder = compiled("gpt2")[1]
    assert decoder.layout.most_positions == 64
    ids, mask = prompts(2)
    assert decoder.generate(ids, 58).shape == (2, 65)  # of which the last is not fed
    with pytest.raises(UsageError, match="rows for 64 positions, and there would be 65"):
        decoder.generate(ids, 59)
    with pytest.raises(UsageError, match="rows for 64 positions, and there would be 70"):
        decoder(ids.repeat(1, 10))
    mask[:, :2] = 0  # takes no position
    assert decoder.generate(ids, 60, mask).shape == (2, 67)


@pytest.mark.slow
def test_windows_and_chunks_are_crossed() -> None:
    """And what no sequence changes has no length that is singled out."""
    from transformers import BloomConfig, BloomForCausalLM, Llama4ForCausalLM, Llama4TextConfig

    def llama4() -> nn.Module:
        sizes = common(num_key_value_heads=2, intermediate_size_mlp=32, head_dim=16)
        return Llama4ForCausalLM(
            Llama4TextConfig(
                **sizes,
                num_local_experts=2,
                attention_chunk_size=6,
                attn_temperature_tuning=True,
                floor_scale=9,
                no_rope_layers=[1, 0],
                pad_token_id=0,
            )
        )

    def bloom() -> nn.Module:
        return BloomForCausalLM(BloomConfig(hidden_size=32, n_head=4, n_layer=1, vocab_size=80))

    for build, lengths in ((MODELS["mistral"], {5}), (llama4, {6, 9}), (bloom, set())):
        wrapper = UnpaddedCausalLM(build().eval())
        args, shapes = wrapper.sample()
        found = derived(Model(wrapper, None, args, {}, shapes, "model"))
        assert lengths <= {*found.singled_out}
        assert bool(lengths) is bool(found.singled_out)
        assert (found.switches, found.last) == ((), None)
