"""Relations between runs and compiles of every example, which need no oracle.

What eager follows on a sample, a file follows: a batch in another order, one of its elements alone,
more padding. Another compile gives the same bytes, and with `--exact`, with other names of inputs
or for CUDA, run by kernels for the CPU, the same numbers up to rounding.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngraph
from attngraph.export.parity.eager_loops import plain_loops
from examples.zoo import ENTRIES, Entry
from tests.fuzz.oracle import RUNS, Forward, Oracle, Rounding, over
from tests.fuzz.relations import broken
from tests.fuzz.trial import renamed, session_of

_LETTERS = {"batch": "b", "seq": "s", "source": "s"}
_FREE = {"b": (1, 9), "s": (1, 64)}
EVERY = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


@functools.cache
def _built(name: str) -> tuple[Any, tuple[Tensor, ...], Any]:
    module, args, shapes = next(entry for entry in ENTRIES if entry.name == name).build()
    return module.requires_grad_(False), args, shapes


def _saved(path: Path, entry: Entry, module: Any = None, **options: Any) -> Forward:
    own, args, shapes = _built(entry.name)
    module = own if module is None else module
    attngraph.optimize(module, args, dynamic_shapes=shapes, **options).save(path)
    return session_of(path)[0]


def _inputs(args: tuple[Tensor, ...], shapes: Any) -> dict[str, str]:
    """Shapes in letters, as the fuzz writes them; a mask of tokens is one of the kinds it knows."""
    found = {}
    for place, (tensor, dims) in enumerate(zip(args, shapes, strict=True)):
        names = {axis: getattr(dim, "__name__", str(dim)) for axis, dim in dims.items()}
        axes = [_LETTERS.get(names.get(a, ""), str(size)) for a, size in enumerate(tensor.shape)]
        kind = ":padding" if tensor.dtype == torch.bool and axes == ["b", "s"] else ""
        found[f"input {place}"] = " ".join(axes) + kind
    return found


@pytest.mark.wide
@EVERY
def test_a_file_follows_what_eager_follows(entry: Entry, tmp_path: Path) -> None:
    module, args, shapes = _built(entry.name)
    run, inputs = _saved(tmp_path / "model.onnx", entry), _inputs(args, shapes)
    oracle = Oracle(module, module, Rounding())
    with plain_loops():
        assert [*broken(run, oracle, inputs, args, _FREE)] == []


@pytest.mark.slow
@EVERY
def test_other_compiles_give_the_same(entry: Entry, tmp_path: Path) -> None:
    module, args, _ = _built(entry.name)
    run = _saved(tmp_path / "model.onnx", entry)
    _saved(tmp_path / "again.onnx", entry)
    one, two = (tmp_path / f"{name}.onnx" for name in ("model", "again"))
    assert one.read_bytes() == two.read_bytes()
    others = {"exact": _saved(tmp_path / "exact.onnx", entry, exact=True)}
    names = [f"x{place}" for place in range(len(args))]
    others["renamed"] = _saved(tmp_path / "renamed.onnx", entry, renamed(module, names))
    try:
        others["cuda"] = _saved(tmp_path / "cuda.onnx", entry, target="cuda", verify="off")
    except Exception as error:
        if "NOT_IMPLEMENTED" not in str(error):  # a kernel of CUDA alone
            raise
    oracle = Oracle(module, module, Rounding())
    for name, other in others.items():
        with plain_loops():
            assert not _apart(run, other, oracle, args), name


def _apart(run: Forward, other: Forward, oracle: Oracle, args: tuple[Tensor, ...]) -> str:
    """How two files give other numbers than two runs of eager on rounded weights do."""
    found, eager = list(run(*args)), oracle(*args)
    nudged = [oracle.nudged(args, seed) for seed in range(RUNS)]
    told = []
    for place, (one, two) in enumerate(zip(found, other(*args), strict=True)):
        noise = [one + (each[place] - eager[place]) for each in nudged]
        told.append(over(two, one.double(), [one, *noise]) if one.is_floating_point() else "")
        if not one.is_floating_point() and not torch.equal(one, two):
            told[-1] = "other integers"
    return "; ".join(filter(None, told))


def test_files_that_are_apart_are_told() -> None:
    module = torch.nn.Linear(4, 4).requires_grad_(False)
    oracle, x = Oracle(module, module, Rounding()), torch.randn(3, 4)
    assert not _apart(oracle, lambda t: [module(t) + 1e-7], oracle, (x,))
    assert _apart(oracle, lambda t: [module(t) + 1e-3], oracle, (x,))
