"""The reference of the error budget: eager in float64, whatever the module does to its dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attngraph.errors import UsageError
from attngraph.export.parity import reference as reference_module
from attngraph.export.parity.budget import compare
from attngraph.export.parity.reference import Reference, flatten_outputs
from tests.export.parity.residual_attention import Attention, sample


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("fill", [-1e9, -1e30])
def test_rows_that_float64_computes_otherwise_are_held_against_eager(fill: float) -> None:
    """A fill absorbs the scores of a fully masked row in float32 and −1e9 doesn't in float64."""

    class SelfAttention(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            scores = x @ x.transpose(-1, -2) / 32**0.5
            return torch.softmax(scores + torch.where(mask, 0, fill)[:, None].to(x.dtype), -1) @ x

    module = SelfAttention()
    x, mask = sample()
    mask[3] = False
    reference = Reference(module, precision="fp32")((x, mask))
    eager = module(x, mask)
    assert torch.allclose(eager[3], x[3].mean(0).expand(10, 32), atol=1e-5)
    parity = compare(reference, [eager], "fp32")
    assert parity.passed
    assert parity.reference == "float64"
    assert bool(parity.notes) == (fill == -1e9)
    for wrong in (torch.zeros(32), x[3, 0]):
        output = eager.clone()
        output[3] = wrong
        assert not compare(reference, [output], "fp32").passed


def test_a_module_that_only_runs_in_its_own_dtype_is_held_against_eager() -> None:
    class Picky(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype is torch.float64:
                raise TypeError("float32 only")
            return x.softmax(-1)

    x = torch.randn(8, 16)
    reference = Reference(Picky(), precision="fp32")((x,))
    parity = compare(reference, [x.softmax(-1)], "fp32")
    assert parity.passed
    assert parity.reference == "eager"
    assert "float32 only" in str(parity)
    assert not compare(reference, [x.softmax(-1) * 1.0001], "fp32").passed


def test_float32_pinned_inside_a_module_doesnt_round_the_exact_run() -> None:
    class Pinned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = torch.ones(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.to(torch.float32) * self.plain + torch.zeros(16)
            return x.float().softmax(-1, dtype=torch.float32).type_as(x)

    x = torch.randn(4, 16)
    reference = Reference(Pinned(), precision="fp32")((x,))
    assert reference.exact[0] is not None
    assert torch.equal(reference.exact[0], x.double().softmax(-1))
    assert reference.eager[0].dtype is torch.float32


@pytest.mark.parametrize("module", ["attention", "recurrent", "transformer"])
def test_the_exact_run_of_a_large_module_is_the_same_without_a_copy_of_its_weights(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, args = {
        "attention": lambda: (Attention(), sample()),
        "recurrent": lambda: (torch.nn.GRU(8, 8), (torch.randn(3, 2, 8),)),
        "transformer": lambda: (
            torch.nn.TransformerEncoderLayer(8, 2, 16).half(),
            (torch.randn(3, 2, 8).half(),),
        ),
    }[module]()
    whole = Reference(built, precision="fp32")(args)
    monkeypatch.setattr(reference_module, "_MOST_BYTES", 0)
    converted: list[torch.Tensor] = []
    double = reference_module._double
    monkeypatch.setattr(reference_module, "_double", lambda x: (converted.append(x), double(x))[1])
    large = Reference(built, precision="fp32")(args)
    assert large.note == whole.note == ""
    for one, other in zip(large.exact, whole.exact, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    copied = any(x is p for x in converted for p in built.parameters())
    assert copied is (module == "recurrent")  # whose layers compare dtypes


def test_experts_have_an_exact_run_though_torch_has_none() -> None:
    class Experts(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(x, w, ends)

    x, w = torch.randn(6, 8), torch.randn(3, 8, 4)
    reference = Reference(Experts(), precision="fp32")((x, w, torch.tensor([2, 2, 6]).int()))
    expected = torch.cat([x[:2].double() @ w[0].double(), x[2:].double() @ w[2].double()])
    assert reference.exact[0] is not None
    assert torch.equal(reference.exact[0], expected)


def test_the_reference_leaves_the_module_as_it_was() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = torch.nn.Dropout(0.5)
            self.linear = torch.nn.Linear(8, 8)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            x += 1
            return self.dropout(self.linear(x))

    module = Counts()
    module.linear.eval()
    weight, x = module.linear.weight, torch.zeros(2, 8)
    fast = torch.backends.mha.get_fastpath_enabled()
    reference = Reference(module, precision="fp32")((x,))
    assert module.training
    assert module.dropout.training
    assert not module.linear.training
    assert module.linear.weight is weight
    assert weight.dtype is torch.float32
    assert float(module.calls) == 0
    assert not x.any()
    assert torch.backends.mha.get_fastpath_enabled() is fast
    assert torch.allclose(reference.eager[0], module.linear(torch.ones(2, 8)))
    assert not reference.eager[0].requires_grad


def test_tied_weights_and_exported_modules_have_a_float64_form() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(10, 8)
            self.head = torch.nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids)).float().softmax(-1)

    module, ids = Tied().eval(), torch.arange(6)[None]
    exported = torch.export.export(module, (ids,)).module()
    ours, theirs = (Reference(m, precision="fp32")((ids,)) for m in (module, exported))
    assert ours.exact[0] is not None
    assert theirs.exact[0] is not None
    assert ours.exact[0].dtype is torch.float64
    assert torch.equal(ours.exact[0], theirs.exact[0])


def test_outputs_are_flattened_with_their_path() -> None:
    a, b = torch.ones(1), torch.zeros(2)
    named = flatten_outputs({"logits": a, "hidden": (a, b), "loss": None, "count": 3})
    assert [name for name, _ in named] == ["logits", "hidden.0", "hidden.1"]
    assert flatten_outputs(a)[0][0] == "output"
    with pytest.raises(UsageError, match="'1' of the module is a Cache"):
        flatten_outputs((a, type("Cache", (), {})()))
    with pytest.raises(UsageError, match="no tensor"):
        flatten_outputs((None, 3))


def test_runs_of_a_model_that_no_half_takes_differ_by_roundings_of_the_half() -> None:
    """One of float32 would be lost where what is given to it is rounded to a half."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ones(len(x), 8).float() @ self.linear(x).mT

    torch.manual_seed(0)
    module = Mixed().requires_grad_(False)
    found = Reference(module, precision="fp16", converted=True)((torch.randn(4, 8),))
    assert found.exact[0] is not None
    scale = float(found.exact[0].abs().max())
    off = [float((run - found.eager[0]).abs().max()) / scale for (run,) in found.sample()]
    assert max(off) < 2.0**-7
    assert len({*off}) > 2, off  # all of them were equal
