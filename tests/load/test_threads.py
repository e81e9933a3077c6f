"""Threads that share a decoder, a model or a session get what one thread gets, bit for bit; runs
and compiles that go on for long hold their memory.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.decoding.decoder import Decoder
from attngraph.optimized import Optimized
from attngraph.options import CacheKind

THREADS = 8
_PAGE = os.sysconf("SC_PAGE_SIZE")
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc"
)


def attention() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 24, batch_first=True).eval()


def _sizes(seed: int, calls: int) -> list[tuple[int, int]]:
    seeded = torch.Generator().manual_seed(seed)
    drawn = torch.randint(1, 12, (calls, 2), generator=seeded)
    return [(int(b), int(s)) for b, s in drawn]


@functools.cache
def _encoder() -> Optimized:
    dims = ({0: Dim("batch", max=64), 1: Dim("seq", max=64)},)
    return attngraph.optimize(attention(), (torch.randn(2, 5, 16),), dynamic_shapes=dims)


@functools.cache
def _decoder(cache: CacheKind) -> Decoder:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    length = 32 if cache == "static" else None
    return attngraph.optimize_decoder(model, cache=cache, max_length=length, verify="off")


def encoded(seed: int, calls: int = 1000) -> list[Tensor]:
    seeded = torch.Generator().manual_seed(seed)
    model = _encoder()
    return [model(torch.randn(b, s, 16, generator=seeded)) for b, s in _sizes(seed, calls)]


def decoded(cache: CacheKind, seed: int, calls: int = 12) -> list[Tensor]:
    """Whole generations, and steps of a caller's own between them."""
    seeded = torch.Generator().manual_seed(seed)
    decoder, found = _decoder(cache), []
    for b, s in _sizes(seed, calls):
        ids = torch.randint(97, (b, s), generator=seeded)
        found.append(decoder.generate(ids, max_new_tokens=1 + seed % 5))
        logits, state = decoder(ids)
        more, _ = decoder(ids[:, :1], None, state)
        found += [logits, more]
    return found


@pytest.mark.machine
@pytest.mark.parametrize(
    "work",
    [
        pytest.param(encoded, id="model"),
        pytest.param(functools.partial(decoded, "growing"), id="growing-cache"),
        pytest.param(functools.partial(decoded, "static"), id="static-cache"),
    ],
)
def test_threads_get_what_one_thread_gets(work: Callable[[int], list[Tensor]]) -> None:
    """At changing sizes; no token of one thread's cache comes into another's."""
    alone = [work(seed) for seed in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        together = list(pool.map(work, range(THREADS)))
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def _grown(work: Callable[[int], object], warm: int, seconds: float) -> float:
    """The share by which resident memory grows from the warm state to the end of a soak."""
    for turn in range(warm):
        work(turn)
    before, end, turn = resident(), time.monotonic() + seconds, warm
    while time.monotonic() < end:
        work(turn)
        turn += 1
    return resident() / before - 1


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("cache", ["growing", "static"])
def test_a_soak_holds_its_memory(cache: CacheKind) -> None:
    """ATTNGRAPH_SOAK seconds of generations and calls; of 1,800 no more is allowed than of 20."""
    seconds = float(os.environ.get("ATTNGRAPH_SOAK", "20"))

    def work(seed: int) -> None:
        decoded(cache, seed % 5, calls=3)
        encoded(seed % 5, calls=20)

    assert _grown(work, 40, seconds) <= 0.01


@pytest.mark.slow
@needs_proc
def test_compiles_in_one_process_hold_its_memory() -> None:
    """ATTNGRAPH_COMPILES of them: what is kept from one to the next is bounded."""
    dims = ({0: Dim("batch", max=64), 1: Dim("seq", max=64)},)

    def work(turn: int) -> None:
        sample = (torch.randn(2, 5 + turn % 3, 16),)
        attngraph.optimize(attention(), sample, dynamic_shapes=dims)

    compiles = int(os.environ.get("ATTNGRAPH_COMPILES", "60"))
    for turn in range(compiles // 3):
        work(turn)
    before = resident()
    for turn in range(compiles - compiles // 3):
        work(turn)
    assert resident() <= before * 1.05
