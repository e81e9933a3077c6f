"""Traits: each op says what it is, in one place."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

from attngraph.errors import IRError
from attngraph.export import lowering
from attngraph.export.lowering.emission.registry import _LOWERINGS
from attngraph.export.lowering.fallback.pointwise_formulas import FORMULAS
from attngraph.ir.ops import op, op_def, registered_ops
from attngraph.ir.traits import (
    ADDITIVE,
    LAYOUT,
    MUTATING,
    NORM,
    OPAQUE,
    POINTWISE,
    RANDOM,
    RESHAPE,
    SOFTMAX,
    TRAITS,
    UNSET,
    Trait,
)


def _traits_of(op: str) -> tuple[Trait, ...]:
    return tuple(trait for trait in TRAITS.values() if op in trait)


def _unstated(ops: list[str]) -> list[str]:
    """The ops that no trait holds for: what they are is to be said in attngraph/ir/traits.py."""
    return [name for name in ops if not _traits_of(name)]


def test_every_op_of_the_dialect_says_what_it_is() -> None:
    assert registered_ops()
    assert not _unstated(sorted(registered_ops()))


def test_every_op_that_can_be_lowered_says_what_it_is() -> None:
    for module in pkgutil.walk_packages(lowering.__path__, f"{lowering.__name__}."):
        importlib.import_module(module.name)  # some register their operators when they are needed
    ops = sorted(name for name in {*_LOWERINGS, *FORMULAS} if name.startswith("aten."))
    assert len(ops) > 300
    assert not _unstated(ops)


def test_an_op_that_forgets_its_traits_is_found() -> None:
    with pytest.raises(TypeError, match="traits"):
        op("attn.forgetful")(torch.relu)  # type: ignore[call-arg]
    assert _unstated(["aten.add.Tensor", "aten.stft", "mylib.unknown"]) == [
        "aten.stft",
        "mylib.unknown",
    ]


@pytest.mark.parametrize("trait", TRAITS.values(), ids=repr)
def test_a_trait_lists_ops_that_exist(trait: Trait) -> None:
    for name in trait:
        assert op_def(name).name == name
        assert name in trait


@pytest.mark.parametrize("name", sorted(OPAQUE))
def test_an_opaque_op_has_no_trait_beside(name: str) -> None:
    assert _traits_of(name) == (OPAQUE,)


def test_torch_and_the_dialect_are_asked() -> None:
    assert "aten.erf" in POINTWISE  # by its tag
    assert "aten.erf" not in set(POINTWISE)
    assert "aten.randn" in RANDOM
    assert "aten.add_.Tensor" in MUTATING
    assert "aten.add.Tensor" not in MUTATING
    assert "aten.__and__.Tensor" in POINTWISE  # torch has no tag here
    assert "attn.quick_gelu" in POINTWISE
    assert "aten.empty_strided" in UNSET
    assert "aten.new_empty" in UNSET
    assert "aten.zeros" not in UNSET
    assert "attn.sink_softmax" in SOFTMAX
    assert "attn.rms_norm" in NORM


def test_either_of_two_traits() -> None:
    either = SOFTMAX | ADDITIVE
    assert {*either} == {*SOFTMAX, *ADDITIVE}
    assert "attn.sink_softmax" in either
    assert "aten.sub.Tensor" in either
    assert "aten.mul.Tensor" not in either
    assert RESHAPE | RESHAPE | ADDITIVE is RESHAPE | RESHAPE | ADDITIVE
    assert all(name in LAYOUT for name in RESHAPE)


def test_an_op_of_a_library_that_is_loaded_later_is_asked_again() -> None:
    name = "attngraphtest.late"
    with pytest.raises(IRError):
        op_def(name)
    assert name not in POINTWISE
    library = torch.library.Library("attngraphtest", "DEF")
    library.define("late(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
    assert name in POINTWISE
