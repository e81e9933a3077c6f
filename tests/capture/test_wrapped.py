"""Weights that wrap other tensors, as torchao's do, are each the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import attngraph
from attngraph.errors import CaptureError
from attngraph.frontend.translation.wrapped import plain_weight
from attngraph.ir.storage import address_of, place_of

aten = torch.ops.aten


class Codes(Tensor):
    """int8 codes with a scale for each row. It has no memory of its own: its address is 0."""

    codes: Tensor
    scale: Tensor
    takes: tuple[Any, ...] | None = None

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Codes:
        made: Codes = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        return made

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: None, size: Any, stride: Any) -> Codes:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return cls(func(args[0].codes), func(args[0].scale))
        if cls.takes is not None and func not in cls.takes:
            raise NotImplementedError(f"{func} is not there")

        def plain(value: Any) -> Any:
            return value.codes * value.scale if isinstance(value, cls) else value

        args, kwargs = pytree.tree_map(plain, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


class Dequantises(Codes):
    """The same with a method that says its numbers, and no operators but those of a linear."""

    takes = (aten.linear.default, aten.addmm.default, aten.mm.default, aten.t.default)

    def dequantize(self) -> Tensor:
        return self.codes * self.scale


class OnlyLinear(Codes):
    takes = (aten.linear.default, aten.addmm.default, aten.mm.default, aten.t.default)


class Attends(nn.Module):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(16, 16, bias=False) for _ in range(3))
        for part in (self.query, self.key, self.value):
            scale = part.weight.detach().abs().amax(1, keepdim=True) / 127
            codes = (part.weight.detach() / scale).round().to(torch.int8)
            part.weight = nn.Parameter(wrap(codes, scale), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.query(x) @ self.key(x).mT).softmax(-1) @ self.value(x)


@pytest.mark.parametrize("kind", [Codes, Dequantises, OnlyLinear])
@pytest.mark.parametrize("verify", ["off", "final"])
def test_each_wrapped_weight_is_its_own(kind: type[Codes], verify: str) -> None:
    module, x = Attends(kind).eval(), torch.randn(2, 5, 16)
    optimized = attngraph.optimize(module, (x,), verify=verify)
    torch.testing.assert_close(optimized(x), module(x), rtol=1e-5, atol=1e-5)
    (note,) = (said for said in optimized.report.notes if kind.__name__ in said)
    assert note.startswith("query.weight and 2 more of type ")


def test_a_tied_wrapped_weight_stays_one() -> None:
    module = Attends(Codes).eval()
    module.key.weight = module.query.weight
    graph = attngraph.capture(module, (torch.randn(2, 5, 16),))
    assert len(graph.constants) == 2


def test_one_that_gives_no_numbers_is_refused_by_name() -> None:
    class Silent(Codes):
        takes = ()

    silent = Silent(torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1))
    with pytest.raises(CaptureError, match=r"query\.weight is a .*Silent, a tensor that wraps"):
        plain_weight("query.weight", silent)


def test_what_has_no_address_is_itself() -> None:
    weights = [torch.empty(0), torch.empty(0), torch.empty(3, device="meta")]
    weights += [Codes(torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1)) for _ in range(2)]
    assert {address_of(weight) for weight in weights} == {0}
    assert len({place_of(weight) for weight in weights}) == len(weights)
    whole = torch.arange(6.0).reshape(2, 3)
    assert place_of(whole) == place_of(whole.detach())
    assert place_of(whole) != place_of(whole.T)
    assert place_of(whole) != place_of(whole[:1])
