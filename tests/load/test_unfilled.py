"""Parameters that a file has are never made; what a factory computes besides is as it would be."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model

from attngraph.errors import LoadError, UsageError
from attngraph.frontend.files.load import load

_MODELS = """
import torch
from torch import nn

MADE = []


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.embed = nn.Embedding(7, width, padding_idx=0)
        self.scale = nn.Parameter(torch.randn(width) * 0.1)
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(width)) for _ in range(2)])
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(width) / 3, persistent=False)
        MADE.append(self.head.weight.is_meta)

    def forward(self, ids):
        found = self.embed(ids) * self.scale + self.parts[0] + self.steps.to(self.scale.dtype)
        return self.head(found)


class Random(Net):
    def __init__(self):
        torch.manual_seed(3)
        super().__init__()
        self.register_buffer("drawn", torch.randn(4, 4), persistent=False)


class OfParameter(Net):
    def __init__(self):
        super().__init__()
        self.largest = float(self.scale.detach().abs().max())


class OnItsDevice(Net):
    def __init__(self):
        super().__init__()
        self.table = torch.arange(4, device=self.scale.device)


class Attribute(Net):
    def __init__(self):
        torch.manual_seed(3)
        super().__init__()
        self.shift = torch.rand(()).item()


def plain():
    return Net()


def halved():
    return Net().half()


def moved():
    return Net().to("cpu", torch.float16).eval()


def sized(width, *, wider=False):
    return Net(2 * width if wider else width)


def registered_twice():
    net, shared = Net(), nn.Parameter(torch.ones(4))
    net.first, net.second = shared, shared
    return net


class Nested:
    @staticmethod
    def build():
        return Net()
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "unfilled_models.py").write_text(_MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("unfilled_models")
    monkeypatch.undo()
    import sys

    sys.modules.pop("unfilled_models", None)


def _loaded(models: Any, factory: str) -> tuple[Any, Any]:
    """The module that a file of the factory's weights is loaded into, and that which it is of."""
    own = getattr(models, factory)()
    save_model(own, "weights")
    models.MADE.clear()
    module: Any = load(Path("weights"), factory=f"unfilled_models:{factory}").module
    return module, own


def _assert_alike(module: Any, own: Any) -> None:
    for kind in ("named_parameters", "named_buffers"):
        found, wanted = dict(getattr(module, kind)()), dict(getattr(own, kind)())
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("factory", ["plain", "halved", "moved", "registered_twice"])
def test_parameters_are_never_made(models: Any, factory: str) -> None:
    module, own = _loaded(models, factory)
    assert models.MADE
    assert all(models.MADE)
    _assert_alike(module, own)
    assert module.head.weight is module.embed.weight
    if factory == "registered_twice":
        assert module.first is module.second


@pytest.mark.parametrize("kind", ["Random", "OfParameter", "OnItsDevice", "Attribute"])
def test_what_depends_on_parameters_or_on_what_they_draw_is_built_as_it_is(
    models: Any, kind: str
) -> None:
    module, own = _loaded(models, kind)
    assert not models.MADE[-1]
    _assert_alike(module, own)
    if kind == "Attribute":
        assert module.shift == own.shift
    if kind == "OnItsDevice":
        assert not module.table.is_meta


def test_nothing_is_left_patched(models: Any) -> None:
    before = torch.nn.Module.register_parameter, torch.nn.Module._apply
    _loaded(models, "plain")
    assert (torch.nn.Module.register_parameter, torch.nn.Module._apply) == before
    assert not models.plain().scale.is_meta


def test_a_parameter_that_the_file_lacks_is_named(models: Any) -> None:
    weights = {n: t.contiguous() for n, t in models.plain().state_dict().items()}
    del weights["scale"], weights["head.weight"]
    save_file(weights, "weights")
    with pytest.raises(LoadError, match=r"1 missing \(scale\)"):
        load(Path("weights"), factory="unfilled_models:plain")


def test_a_prefix_of_all_names_is_taken_off_and_told(models: Any) -> None:
    own = models.plain()
    torch.save({"state_dict": {f"module.{n}": t for n, t in own.state_dict().items()}}, "m.ckpt")
    loaded = load(Path("m.ckpt"), factory="unfilled_models:plain")
    assert loaded.module is not None
    assert torch.equal(loaded.module.get_parameter("scale"), own.scale)
    assert loaded.notes == ("The names of the weights begin with 'module.', which was taken off.",)


def test_a_factory_is_called_with_what_is_given(models: Any) -> None:
    def width(*arguments: str) -> int:
        module: Any = load(None, factory="unfilled_models:sized", factory_args=arguments).module
        return int(module.scale.numel())

    assert width("3") == width("width=3") == 3
    assert width("3", "wider=True") == 6
    assert load(None, factory="unfilled_models:Nested.build").module is not None
    with pytest.raises(LoadError, match="sized failed: TypeError"):
        width("many")
    with pytest.raises(UsageError, match="--factory-arg width was given twice"):
        width("width=3", "width=4")
