"""However a prompt is cut, a decoder gives the logits that the model gives of it at once."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph import Decoder
from attngraph.export.parity.budget import compare
from attngraph.export.parity.reference import Reference, ReferenceOutputs
from attngraph.frontend.families.causal_lm import CausalLM
from attngraph.options import CacheKind
from examples import cached_gpt
from tests.models.kit import peaked
from tests.parity.test_decode import MODELS

LENGTH, ROWS = 11, 3
CUTS = ((), (10,), (1,), (4, 5), (3, 7, 8), tuple(range(1, LENGTH)))
"""Where pieces end, beside the end of the prompt: at once, all but a token, one, each by itself."""
CACHES = pytest.mark.parametrize("cache", ["growing", "static"])
pytestmark = pytest.mark.wide


def _built(cache: CacheKind) -> dict[str, object]:
    return {"cache": cache, "max_length": 16 if cache == "static" else None}


@functools.cache
def _of_transformers(name: str, cache: CacheKind) -> tuple[nn.Module, Decoder]:
    module = peaked(MODELS[name]())
    return module, attngraph.optimize_decoder(module, all_logits=True, **_built(cache))


@functools.cache
def _plain(cache: CacheKind) -> tuple[nn.Module, Decoder]:
    module, args, shapes = cached_gpt.build()
    peaked(module)
    return module, attngraph.optimize_decoder(module, args, dynamic_shapes=shapes, **_built(cache))


def _ids(vocabulary: int) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randint(3, vocabulary, (ROWS, LENGTH), generator=random)


def _in_pieces(decoder: Decoder, ids: Tensor, mask: Tensor | None, cuts: tuple[int, ...]) -> Tensor:
    found, kept = [], None
    for start, end in zip((0, *cuts), (*cuts, LENGTH), strict=True):
        shown = None if mask is None else mask[:, :end]
        logits, kept = decoder(ids[:, start:end], shown, kept)
        found.append(logits.clone())
    return torch.cat(found, 1)


@CACHES
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_in_pieces_of_a_model_of_transformers(name: str, cache: CacheKind) -> None:
    """Whose rows are padded on the left, by none, two and four tokens."""
    module, decoder = _of_transformers(name, cache)
    ids = _ids(module.config.vocab_size)
    mask = (torch.arange(LENGTH) >= 2 * torch.arange(ROWS)[:, None]).long()
    full = CausalLM(module, all_logits=True)
    _, _, layers = full.sample(batch=ROWS, past=0)[0]
    outputs = Reference(full, precision="fp32")((ids, mask, layers))
    assert outputs.exact[0] is not None
    shown = mask.bool()
    eager, exact = outputs.eager[0][shown], outputs.exact[0][shown]
    for cuts in CUTS:
        found = _in_pieces(decoder, ids, mask, cuts)[shown]
        parity = compare(ReferenceOutputs(("logits",), (eager,), (exact,)), (found,), "fp32")
        assert parity.passed, f"{cuts}: {parity}"


@CACHES
def test_a_prompt_in_pieces_of_a_module_with_its_own_past(cache: CacheKind) -> None:
    module, decoder = _plain(cache)
    ids = _ids(module.config.vocabulary)
    given = (ids, cached_gpt.empty(module.config, ROWS))
    outputs = Reference(module, precision="fp32")(given)
    expected = ReferenceOutputs(("logits",), outputs.eager[:1], outputs.exact[:1])
    for cuts in CUTS:
        parity = compare(expected, (_in_pieces(decoder, ids, None, cuts),), "fp32")
        assert parity.passed, f"{cuts}: {parity}"
