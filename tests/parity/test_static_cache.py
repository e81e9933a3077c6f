"""Decoders with a static cache: eager's tokens, in buffers that no step copies."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph import Decoder
from attngraph.compiling.compiler import Model
from attngraph.decoding.caches import StaticCache
from attngraph.errors import UsageError
from attngraph.export.lowering.emission.buffers import CAPACITY
from attngraph.export.runtime.session import Session
from attngraph.export.target import Target
from attngraph.verification.verify import verify_file
from examples import cached_gpt
from tests.models.kit import HEADS, LAYERS, VOCABULARY, peaked
from tests.parity.test_decode import (
    MODELS,
    PROMPT,
    STEPS,
    Stacked,
    assert_greedy_tokens_are_those_of_eager,
    common,
    prompts,
)

pytestmark = pytest.mark.wide

ROOM = PROMPT + STEPS
IN_PLACE = {"gpt2": True, "llama": True, "mistral": True, "gpt-neox": False}
"""Eager gpt-neox averages all values in rows without a key, which no operator in place does."""


@functools.cache
def compiled(name: str) -> tuple[nn.Module, Decoder]:
    module = peaked(MODELS[name]())
    return module, attngraph.optimize_decoder(module, cache="static", max_length=ROOM)


@pytest.mark.parametrize("name", MODELS)
def test_32_greedy_tokens_are_those_of_eager(name: str) -> None:
    assert_greedy_tokens_are_those_of_eager(*compiled(name))


@pytest.mark.parametrize("name", MODELS)
def test_the_operator_writes_the_cache_where_there_is_one_that_does(name: str) -> None:
    decoder = compiled(name)[1]
    assert decoder.optimized is not None
    graph = decoder.optimized.model.graph
    grouped = [node for node in graph if node.op_type == "GroupQueryAttention"]
    assert len(grouped) == (LAYERS if IN_PLACE[name] else 0)
    for node in grouped:
        pasts = [value.name for value in node.inputs[3:5] if value is not None]
        presents = [value.name for value in node.outputs[1:3]]
        paired = dict(zip(decoder.layout.pasts, decoder.layout.presents, strict=True))
        assert [paired[name] for name in pasts] == presents


@functools.cache
def unpadded(name: str) -> tuple[nn.Module, Decoder]:
    module = peaked(MODELS[name]())
    static = functools.partial(attngraph.optimize_decoder, cache="static", max_length=ROOM)
    return module, static(module, padding=False)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_without_padding_no_mask_is_left_to_the_operator(name: str) -> None:
    """In halves on CUDA a step has XQA then; a mask, even one that hides nothing, takes it away."""
    module, decoder = unpadded(name)
    assert (decoder.layout.mask, decoder.layout.length) == (None, "past_length")
    assert decoder.optimized is not None
    graph = decoder.optimized.model.graph
    grouped = [node for node in graph if node.op_type == "GroupQueryAttention"]
    assert len(grouped) == LAYERS
    assert not any(value is not None for node in grouped for value in node.inputs[10:11])
    for batch in (1, 3):
        ids, mask = prompts(batch)
        expected = module.generate(
            ids, attention_mask=torch.ones_like(mask), max_new_tokens=STEPS, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert torch.equal(decoder.generate(ids, STEPS), expected)
    ids, mask = prompts(3)
    with pytest.raises(UsageError, match="no row can be padded"):
        decoder(ids, mask)


def test_its_file_is_verified_as_what_it_is(tmp_path: Path) -> None:
    module, decoder = unpadded("llama")
    path = tmp_path / "llama.onnx"
    decoder.save(path)
    with Session.open(path, Target("cpu")) as session:
        found = verify_file(Model(module, None, (), {}, None, "llama"), path, session)
    assert found.parity.passed, str(found.parity)


def test_a_cache_beside_sinks_may_be_static() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **common(num_key_value_heads=HEADS // 2, sliding_window=5, head_dim=16),
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    config._attn_implementation = "eager"
    module = peaked(GptOssForCausalLM(config))
    decoder = attngraph.optimize_decoder(module, cache="static", max_length=ROOM, verify="off")
    assert_greedy_tokens_are_those_of_eager(module, decoder)


def test_the_buffers_stay_where_they_are() -> None:
    decoder = compiled("llama")[1]
    ids, mask = prompts(3)
    _, cache = decoder(ids, mask)
    assert isinstance(cache, StaticCache)
    before = {name: tensor.clone() for name, tensor in cache.slots.buffers.items()}
    places = [tensor.data_ptr() for tensor in cache.slots.buffers.values()]
    mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
    _, grown = decoder(ids[:, :1], mask, cache)
    assert isinstance(grown, StaticCache)
    assert [tensor.data_ptr() for tensor in grown.slots.buffers.values()] == places
    for name, tensor in grown.slots.buffers.items():
        assert tensor.shape[2] == ROOM
        assert torch.equal(tensor[:, :, :PROMPT], before[name][:, :, :PROMPT])
        assert bool(tensor[:, :, PROMPT].any())
        assert not tensor[:, :, PROMPT + 1 :].any()


@pytest.mark.parametrize("name", ["llama", "gpt-neox"])
def test_a_prompt_in_parts_gives_what_it_gives_at_once(name: str) -> None:
    """Several rows behind a past, which the operator takes one by one."""
    decoder = compiled(name)[1]
    ids, mask = prompts(3)
    at_once, _ = decoder(ids, mask)
    _, cache = decoder(ids[:, :2], mask[:, :2])
    _, cache = decoder(ids[:, 2:4], mask[:, :4], cache)
    found, cache = decoder(ids[:, 4:], mask, cache)
    # the same sums, of other lengths: a few roundings of the largest logit
    atol = 32 * torch.finfo(torch.float32).eps * float(at_once.abs().max())
    torch.testing.assert_close(found, at_once, rtol=0, atol=atol)
    assert cache.length == PROMPT


def test_a_cache_may_be_taken_up_again_and_then_what_came_behind_it_is_refused() -> None:
    decoder = compiled("llama")[1]
    ids, _ = prompts(1)
    _, early = decoder(ids[:, :4])
    first, late = decoder(ids[:, 4:5], None, early)
    decoder(ids[:, 5:6], None, late)
    again, other = decoder(ids[:, 4:5], None, early)
    assert torch.equal(first, again)
    with pytest.raises(UsageError, match="cache of 5 tokens was overwritten"):
        decoder(ids[:, 5:6], None, late)
    decoder(ids[:, 5:6], None, other)


def test_what_has_no_room_is_refused_before_the_step() -> None:
    decoder = compiled("llama")[1]
    ids, mask = prompts(3)
    with pytest.raises(UsageError, match=f"room for {ROOM} tokens, and {ROOM + 1} would be"):
        decoder.generate(ids, STEPS + 2, mask)
    assert decoder.generate(ids, STEPS + 1, mask).shape == (3, ROOM + 1)  # the last is not fed
    cache = None
    for _ in range(ROOM // PROMPT):
        _, cache = decoder(ids, None, cache)
    assert cache is not None
    held = cache.length
    with pytest.raises(UsageError, match="larger max_length"):
        decoder(ids, None, cache)
    _, cache = decoder(ids[:, : ROOM - held], None, cache)
    assert cache.length == ROOM


def test_caches_of_one_kind_are_not_for_the_other() -> None:
    static = compiled("gpt2")[1]
    growing = attngraph.optimize_decoder(peaked(MODELS["gpt2"]()), verify="off")
    ids, _ = prompts(1)
    for one, other in ((static, growing), (growing, static)):
        with pytest.raises(UsageError, match="of another decoder"):
            other(ids, None, one(ids)[1])


def test_a_saved_decoder_knows_its_cache(tmp_path: Path) -> None:
    module, decoder = compiled("llama")
    path = tmp_path / "llama.onnx"
    decoder.save(path)
    loaded = Decoder.load(path)
    ids, mask = prompts(3)
    assert loaded.layout == decoder.layout
    assert loaded.layout.max_length == ROOM
    assert torch.equal(loaded.generate(ids, 8, mask), decoder.generate(ids, 8, mask))
    with Session.open(path, Target("cpu")) as session:
        found = verify_file(Model(module, None, (), {}, None, "llama"), path, session)
    assert found.parity.passed, str(found.parity)


def test_a_plain_module_with_its_own_past() -> None:
    module, args, shapes = cached_gpt.build()
    peaked(module)
    decoder = attngraph.optimize_decoder(
        module, args, dynamic_shapes=shapes, cache="static", max_length=ROOM
    )
    ids, _ = prompts(3)
    assert torch.equal(decoder.generate(ids, STEPS), cached_gpt.generate(module, ids, STEPS))


class Windowed(cached_gpt.CachedSelfAttention):
    """Sees itself and the `window` − 1 tokens before; with slopes, what is further away less."""

    def __init__(self, config: cached_gpt.Config, window: int, slopes: Tensor | None) -> None:
        super().__init__(config)
        self.window, self.slopes = window, slopes

    def forward(self, x: Tensor, past: cached_gpt.Layer) -> tuple[Tensor, cached_gpt.Layer]:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        before = past[0].shape[2]
        places = torch.arange(before, before + length)[:, None]
        keys = torch.arange(key.shape[2])
        scores = query @ key.transpose(2, 3) / (width // self.heads) ** 0.5
        if self.slopes is not None:
            scores = scores + self.slopes[:, None, None] * (keys - places)
        visible = (keys <= places) & (keys > places - self.window)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        merged = self.output((weights @ value).transpose(1, 2).reshape(batch, length, width))
        return merged, (key, value)


@pytest.mark.parametrize("biased", [False, True])
def test_a_window_is_the_operators_own_unless_there_is_a_mask_anyway(biased: bool) -> None:
    """4 tokens of it, so that from the first step on the past reaches beyond."""
    window, slopes = 4, torch.tensor([0.1, 0.2, 0.3, 0.4]) if biased else None
    config = cached_gpt.Config()
    module, args, shapes = cached_gpt.build(config)
    for block in module.blocks:
        block.attention = Windowed(config, window, slopes)
    peaked(module.eval())
    assert window < PROMPT
    decoder = attngraph.optimize_decoder(
        module, args, dynamic_shapes=shapes, cache="static", max_length=ROOM
    )
    assert decoder.optimized is not None
    assert decoder.report.parity is not None
    assert decoder.report.parity.passed
    nodes = list(decoder.optimized.model.graph)
    grouped = [node for node in nodes if node.op_type == "GroupQueryAttention"]
    assert len(grouped) == config.layers
    for node in grouped:
        attribute = node.attributes.get("local_window_size")
        bias = node.inputs[10]
        found = (attribute and attribute.as_int(), bias is not None)
        assert found == ((None, True) if biased else (window, False))
    ids, _ = prompts(3)
    assert torch.equal(decoder.generate(ids, STEPS), cached_gpt.generate(module, ids, STEPS))
    parts, cache = [], None
    for start, end in ((0, 2), (2, PROMPT - 1), (PROMPT - 1, PROMPT)):
        logits, cache = decoder(ids[:, start:end], None, cache)
        parts.append(logits)
    with torch.no_grad():
        past = [(k.double(), v.double()) for k, v in cached_gpt.empty(config, 3)]
        exact, _ = module.double()(ids, past)
    found, scale = torch.cat(parts, 1), float(exact.abs().max())
    # a few dozen roundings of sums that reach the largest logit
    atol = 64 * torch.finfo(torch.float32).eps * scale
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=atol)


def test_a_cache_that_is_cut_up_can_not_be_static() -> None:
    module = Stacked()
    args, shapes = module.sample()
    with pytest.raises(UsageError, match=r"kept is not just the past .* growing cache"):
        attngraph.optimize_decoder(
            module, args, dynamic_shapes=shapes, cache="static", max_length=ROOM
        )


def test_quantized_weights_and_buffers() -> None:
    module = peaked(MODELS["llama"]())
    options = {"weights": "int8", "verify": "final"}
    static = attngraph.optimize_decoder(module, cache="static", max_length=ROOM, **options)
    growing = attngraph.optimize_decoder(module, **options)
    ids, mask = prompts(3)
    assert torch.equal(static.generate(ids, STEPS, mask), growing.generate(ids, STEPS, mask))


class Routed(cached_gpt.Block):
    """Each token's best two of three experts: first the rows whose best it is, then the others."""

    def __init__(self, config: cached_gpt.Config) -> None:
        super().__init__(config)
        self.router = nn.Linear(config.width, 3)
        self.experts = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(3))

    def forward(self, x: Tensor, past: cached_gpt.Layer) -> tuple[Tensor, cached_gpt.Layer]:
        x, present = super().forward(x, past)
        flat = x.flatten(0, 1)
        chosen, found = self.router(flat).topk(2).indices, torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            _, rows = torch.where((chosen == number).mT)
            found = found.index_add(0, rows, expert(flat[rows]))
        return x + found.view_as(x), present


def test_rows_that_run_one_by_one_are_checked_one_by_one() -> None:
    """What lies before a decoder's outputs has rows along any axis, or as an expert is given."""
    module, args, shapes = cached_gpt.build()
    module.blocks = nn.ModuleList(Routed(module.config) for _ in module.blocks)
    torch.manual_seed(0)
    decoder = attngraph.optimize_decoder(
        peaked(module), args, dynamic_shapes=shapes, cache="static", max_length=ROOM,
        weights="int8", activations="int8",
    )  # fmt: skip
    assert decoder.report.parity is not None
    assert decoder.report.parity.passed
    cases = {output.case for output in decoder.report.parity.outputs}
    assert any(case.endswith(", row 1") for case in cases)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "rolling"}, "it can be growing, static"),
        ({"cache": "static"}, "needs max_length"),
        ({"max_length": 8}, "max_length is for a static cache"),
        ({"cache": "static", "max_length": 1}, "2 or more"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        attngraph.optimize_decoder(nn.Linear(2, 2), **options)


def test_the_smallest_cache() -> None:
    module = peaked(MODELS["gpt2"]())
    decoder = attngraph.optimize_decoder(module, cache="static", max_length=2)
    ids = torch.randint(VOCABULARY, (2, 2), generator=torch.Generator().manual_seed(0))
    assert decoder.generate(ids, 1).shape == (2, 3)
    sizes = {decoder.layout.batch: 1, CAPACITY: 1 << 50}
    with pytest.raises(UsageError, match=r"no memory for .* \([\d,]+\.0 GiB\): compile with a sm"):
        decoder.session.zeros(decoder.layout.pasts[0], sizes)
