"""Large weights stay out of memory, and keep their numbers whatever is released."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from attngraph import mapped
from attngraph.analysis.values.intervals import _range_of
from attngraph.compiling import compiler
from attngraph.mapped import Reader, Spill, release

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
MEBIBYTE = 1 << 20
_MOST, _LITTLE = 12 << 10, 4 << 10  # KiB of 16 MiB: the kernel counts by batches of pages


def _mapped_kib() -> int:
    found = re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def _in_a_file(data: torch.Tensor) -> bool:
    return mapped._is_mapped(data.data_ptr())


@pytest.fixture
def weight(tmp_path: Path) -> torch.Tensor:
    """16 MiB of a private mapping, as safetensors and torch.load make them."""
    path = tmp_path / "weight"
    torch.arange(2 * MEBIBYTE).numpy().tofile(path)
    return torch.from_file(str(path), shared=False, size=2 * MEBIBYTE, dtype=torch.int64)


def test_what_is_released_leaves_memory_and_reads_the_same(weight: torch.Tensor) -> None:
    total = int(weight.sum())
    before = _mapped_kib()
    release([weight[1:], torch.ones(3), torch.ones(3, device="meta")])
    assert before - _mapped_kib() > _MOST
    assert int(weight.sum()) == total


def test_what_was_written_to_a_private_mapping_is_not_lost(weight: torch.Tensor) -> None:
    weight[7] = -1
    release([weight])
    assert int(weight[7]) == -1


def test_memory_that_no_file_backs_keeps_its_numbers(weight: torch.Tensor) -> None:
    """Also beside one that a file backs, and behind what is too much for one look."""
    own = torch.arange(MEBIBYTE)
    release([own, own.view(1024, 1024).t()[3:], weight, torch.ones(0), torch.tensor(1)])
    assert torch.equal(own, torch.arange(MEBIBYTE))


def test_a_page_is_found_in_each_look(
    weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "_LOOK", MEBIBYTE)
    weight[-1] = -1
    release([weight])
    assert int(weight[-1]) == -1


def test_a_weight_alone_leaves_memory_and_not_its_neighbours(weight: torch.Tensor) -> None:
    before = _mapped_kib()
    weight.sum()
    release([weight[:MEBIBYTE]])  # a half of it
    assert _LITTLE < _mapped_kib() - before < _MOST


def test_a_reader_releases_by_turns(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, before = Reader(), _mapped_kib()
    weight.sum()
    reader.read(weight)
    assert _mapped_kib() - before > _MOST
    monkeypatch.setattr(mapped, "_PATIENCE", weight.nbytes)
    reader.read(weight[:1])
    assert _mapped_kib() - before < _LITTLE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.bool])
def test_a_computed_weight_goes_to_an_unnamed_file(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    data = torch.randint(0, 2, (2048, 1024)).to(dtype).t()
    stored = Spill([])(data)
    assert _in_a_file(stored)
    assert stored.dtype is dtype
    assert torch.equal(stored, data)
    assert not list(tmp_path.iterdir())
    assert Spill([])(stored.t()).data_ptr() == stored.data_ptr()


def test_small_ones_and_views_of_weights_stay() -> None:
    weight, small = torch.ones(1024, 1024), torch.ones(8)
    keep = Spill([weight])
    for data in (small, weight.t(), weight[1:], torch.ones(1024, 1024, device="meta")):
        assert keep(data) is data


def test_without_room_for_a_file_it_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    data = torch.ones(1024, 1024)
    assert Spill([])(data) is data


def test_passes_put_the_weights_of_a_large_model_into_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(32, 64)
            self.up = nn.Linear(32, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(self.gate(x)) * self.up(x)

    torch.manual_seed(0)
    module, x = Gated(), torch.randn(2, 32)
    monkeypatch.setattr(mapped, "_SPILLED", 1024)
    monkeypatch.setattr(mapped, "LARGE", 0)
    optimized = compiler.optimize(module, (x,))
    (merged,) = (
        value.data for value in optimized.graph.constants.values() if len(value.shape) == 2
    )
    assert merged is not None
    assert merged.shape == (128, 32)
    assert _in_a_file(merged)
    assert optimized.graph.keep is None
    torch.testing.assert_close(optimized(x), module(x))


def test_a_weight_that_was_looked_through_is_out_of_memory_again(weight: torch.Tensor) -> None:
    """Else the range of each weight keeps all of a model there."""
    before = _mapped_kib()
    assert _range_of(weight.view(64, -1)) == (0, 2 * MEBIBYTE - 1)
    assert _mapped_kib() - before < _LITTLE
