"""Each example of docs/remarks.md gets the code that it stands under, and no other site."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

from attngraph.compiling.compiler import Model, analyse
from attngraph.options import Options

PAGE = Path(__file__).parents[2] / "docs" / "remarks.md"
# Guards that no model is known to reach; their entries say so.
UNREACHED = {"heads-dynamic", "not-evaluated", "unequal"}
PACKING = {"packed", "kept-padded"}
EXACT = {"biases-cancel"}
NOTES = {"unrolled": "unrolled", "tied-choice": "choose among scores that are filled"}
_SIZES = {"b": 2, "h": 4, "s": 5, "t": 7, "d": 8}
_USUAL = {"q": "B H S D", "k": "B H T D", "v": "B H T D"}
_ENTRY = re.compile(r"^### `([^`]+)`$(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
_EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class _Spelled:
    """`Float["H S T"]` in an annotation: a kind of argument and its shape."""

    def __init__(self, kind: str, shape: str = "") -> None:
        self.kind, self.shape = kind, shape

    def __getitem__(self, shape: str) -> _Spelled:
        return _Spelled(self.kind, shape)


class _Example(torch.nn.Module):
    def __init__(self, source: str) -> None:
        super().__init__()
        scope: dict[str, Any] = {
            kind: _Spelled(kind) for kind in ("Bool", "Float", "Index", "Weight")
        }
        code = compile(source, str(PAGE), "exec", dont_inherit=True)  # annotations as values
        exec(code, {"torch": torch, **scope}, scope)
        self.function: Callable[..., Any] = scope["forward"]
        parameters = inspect.signature(self.function).parameters
        self.spelled = {
            name: _Spelled("Float", _USUAL[name])
            if parameter.annotation is parameter.empty
            else parameter.annotation
            for name, parameter in parameters.items()
        }
        torch.manual_seed(0)
        for name, item in self.spelled.items():
            if item.kind == "Weight":
                self.register_parameter(name, torch.nn.Parameter(_tensor(item)))

    def sample(self) -> tuple[tuple[torch.Tensor, ...], tuple[dict[int, Dim], ...]]:
        """The arguments, and those of their axes that are written small."""
        items = [item for item in self.spelled.values() if item.kind != "Weight"]
        return tuple(map(_tensor, items)), tuple(map(_dims, items))

    def forward(self, *args: torch.Tensor) -> Any:
        rest = iter(args)
        named = {
            name: self.get_parameter(name) if item.kind == "Weight" else next(rest)
            for name, item in self.spelled.items()
        }
        return self.function(**named)


def _dims(item: _Spelled) -> dict[int, Dim]:
    named = enumerate(item.shape.split())
    return {axis: Dim(name, max=64) for axis, name in named if name.islower()}


def _tensor(item: _Spelled) -> torch.Tensor:
    shape = [_SIZES.get(name.lower()) or int(name) for name in item.shape.split()]
    values = torch.randn(shape)
    if item.kind == "Index":
        return torch.arange(values.numel()).reshape(shape) % 5
    return values > -1 if item.kind == "Bool" else values


def _examples() -> dict[str, list[str]]:
    return {code: _EXAMPLE.findall(text) for code, text in _ENTRY.findall(PAGE.read_text("utf-8"))}


def test_every_code_has_an_example() -> None:
    assert {code for code, found in _examples().items() if not found} == UNREACHED


@pytest.mark.parametrize(
    ("code", "source"),
    [pytest.param(code, text, id=code) for code, found in _examples().items() for text in found],
)
def test_example_gets_its_code(code: str, source: str) -> None:
    module = _Example(textwrap.dedent(source))
    args, dims = module.sample()
    shapes = (dims,) if any(dims) else None
    model = Model(module.eval(), None, args, {}, shapes)
    _, report = analyse(model, Options(ignore_padded_rows=code in PACKING, exact=code in EXACT))
    assert report.sites or code in NOTES
    if code in NOTES:
        assert any(NOTES[code] in note for note in report.notes)
    elif code in ("mask", "cache", "merged"):
        assert all(getattr(site, code) for site in report.sites)
    elif code in PACKING:
        remarks = [remark for result in report.passes for remark in result.remarks]
        assert PACKING & {remark.code for remark in remarks} == {code}
    elif code == "reassociated":
        assert report.reassociated
    elif code == "hidden-rows":
        assert any("masks hide every key of a row" in note for note in report.notes)
    else:
        codes = {site.code for site in report.sites}  # a router's softmax is named beside experts
        assert (codes - {"distribution"} or codes) == {code}
    declined = [site for site in report.sites if site.status == "declined"]
    assert all(site.reason.endswith(".") and site.blamed for site in declined)
