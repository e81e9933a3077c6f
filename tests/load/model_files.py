"""Model files of every kind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from attngraph.frontend.files.load import Loaded
from attngraph.frontend.files.sniff import ModelKind

FACTORY = "load_fixture:tied"

SOURCE = '''
import torch
class Tied(torch.nn.Module):
    """An embedding whose weight is the output projection's."""
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, ids, mask=None):
        hidden = self.norm(self.embed(ids))
        return self.head(hidden if mask is None else hidden.masked_fill(mask[..., None], 0.0))
IDS = torch.arange(6).reshape(2, 3)
def tied(): return Tied()
def on_meta():
    with torch.device("meta"): return Tied()
def with_args(): return Tied(), (IDS,)
def with_kwargs(): return Tied(), {"ids": IDS}
def with_shapes(): return Tied(), (IDS,), {"ids": None}
def broken(): raise ValueError("no such size")
def exits(): raise SystemExit(0)
def wrong(): return "a module"
'''

IDS = torch.arange(6).reshape(2, 3)

Writer = Callable[[torch.nn.Module, Path], None]


def write_pt2(module: torch.nn.Module, path: Path) -> None:
    batch, seq = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("seq", min=2)
    shapes = {"ids": {0: batch, 1: seq}, "mask": {0: batch, 1: seq}}
    program = torch.export.export(
        module, (IDS,), {"mask": torch.zeros(2, 3, dtype=torch.bool)}, dynamic_shapes=shapes
    )
    with path.open("wb") as file:
        torch.export.save(program, file)


def trace(module: torch.nn.Module, *args: torch.Tensor) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(module, args)


def write_script(module: torch.nn.Module, path: Path) -> None:
    trace(module, IDS).save(str(path))


def write_safetensors(module: torch.nn.Module, path: Path) -> None:
    weights = module.state_dict()
    del weights["head.weight"]  # safetensors drops the second name of a tied weight
    save_file(weights, path)


WRITERS: dict[ModelKind, Writer] = {
    ModelKind.EXPORTED_PROGRAM: write_pt2,
    ModelKind.TORCHSCRIPT: write_script,
    ModelKind.TORCH_SAVE: lambda module, path: torch.save(module.state_dict(), path),
    ModelKind.LEGACY_PICKLE: lambda module, path: torch.save(
        module.state_dict(), path, _use_new_zipfile_serialization=False
    ),
    ModelKind.SAFETENSORS: write_safetensors,
}


def run(loaded: Loaded, ids: torch.Tensor) -> torch.Tensor:
    if loaded.program is not None:
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        result: torch.Tensor = loaded.program.module()(ids, mask=mask)
        return result
    assert loaded.module is not None
    output: torch.Tensor = loaded.module(ids)
    return output
