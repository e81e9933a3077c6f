"""Models as training leaves them: inside of wrappers, parametrised, pruned, not yet loaded."""

from __future__ import annotations

from collections.abc import Callable
from os.path import isabs
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.utils import parametrizations, prune

import attngraph
from attngraph.errors import CaptureError, UsageError
from attngraph.frontend.capture import capture
from attngraph.frontend.model import Model, trace
from attngraph.ir.interpreter import interpret

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.linear(x), -1)


class Passes(nn.Module):
    """Takes whatever the model inside takes, as PEFT's models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def on_linear(change: Callable[[nn.Module], object]) -> nn.Module:
    module = Mixes()
    change(module.linear)
    return module


MODELS: dict[str, Callable[[], nn.Module]] = {
    "data parallel": lambda: nn.DataParallel(Mixes()),
    "compiled": lambda: torch.compile(Mixes(), backend="eager"),  # type: ignore[dict-item]
    "compiled inside": lambda: Passes(torch.compile(Mixes(), backend="eager")),  # type: ignore[arg-type]
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(Mixes()),
    "passes on": lambda: Passes(Mixes()),
    "weight norm": lambda: on_linear(parametrizations.weight_norm),
    "spectral norm": lambda: on_linear(parametrizations.spectral_norm),
    "orthogonal": lambda: on_linear(parametrizations.orthogonal),
    "parametrised": lambda: on_linear(
        lambda part: nn.utils.parametrize.register_parametrization(part, "weight", Symmetric())
    ),
    "pruned": lambda: on_linear(lambda part: prune.l1_unstructured(part, "weight", 0.5)),
    "hooked": lambda: on_linear(lambda part: part.register_forward_hook(lambda *given: given[2])),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_wrapped_model_is_what_it_computes(name: str) -> None:
    module = MODELS[name]().eval()
    model = Model(module, None, (X,), {}, ({0: Dim("batch")},))
    captured = trace(model)
    assert captured.notes == ()
    places = [node.loc for node in captured.graph]
    assert not [place for place in places if "_orig_mod" in place.module or isabs(place.file)]
    x = torch.randn(5, 3, 8)
    with torch.no_grad():
        (found,) = interpret(captured.graph, (x,))
        torch.testing.assert_close(found, module(x))
    if name in ("data parallel", "compiled", "averaged"):
        assert captured.input_names == ("x",)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4))


def without_numbers() -> nn.Module:
    with torch.device("meta"):
        return Mixes()


def of_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return Mixes()


@pytest.mark.filterwarnings("ignore")
def quantised() -> nn.Module:
    quantised: nn.Module = torch.ao.quantization.quantize_dynamic(Mixes(), {nn.Linear}, torch.qint8)
    return quantised


HELP: dict[Callable[[], nn.Module], str] = {
    lazy: r"0\.weight has no shape yet.*call the model once on the sample before",
    without_numbers: r"linear\.weight is on the meta device .* load the weights first",
    of_inference_mode: r"linear\.weight was made under torch\.inference_mode\(\).*outside of it",
    quantised: r"linear is a Linear, whose packed weights .*compile the model as it was before",
}


@pytest.mark.parametrize("make", HELP, ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("ignore")
def test_what_no_trace_takes_is_named_with_what_helps(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(CaptureError, match=HELP[make]):
        capture(make(), (X,))


def test_a_lazy_module_that_was_called_compiles() -> None:
    module = lazy()
    module(X)
    capture(module, (X,))


class Adds(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result + 1


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_part_is_named_and_the_advice_compiles() -> None:
    part: Any = torch.jit.script(Mixes())
    with pytest.raises(CaptureError, match=r"inner is a scripted module .*script the whole model"):
        capture(Adds(part), (X,))
    capture(Adds(Mixes()), (X,))
    capture(torch.jit.script(Adds(Mixes())), (X,))


class Turns(nn.Module):
    """Gemma's rotary embedding in its first form: the angles are an input."""

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * angles
        return torch.view_as_real(turned).flatten(-2)


def test_complex_inputs_are_pairs_of_reals_in_the_file_and_complex_in_a_call() -> None:
    rows, dim = torch.export.Dim("rows"), torch.export.Dim("length")

    def angles(length: int) -> Tensor:
        return torch.polar(torch.ones(length, 4), torch.randn(length, 4))

    x, sample = torch.randn(2, 3, 8), angles(3)
    shapes = {"x": {0: rows, 1: dim}, "angles": {0: dim}}
    optimized = attngraph.optimize(Turns(), (x, sample), dynamic_shapes=shapes)
    assert any("takes torch.view_as_real of it" in note for note in optimized.report.notes)
    assert [value.shape[1:] for value in optimized.graph.inputs][1] == (4, 2)
    for length in (1, 5):
        x, given = torch.randn(3, length, 8), angles(length).conj()
        torch.testing.assert_close(optimized(x, given), Turns()(x, given))
        torch.testing.assert_close(
            optimized(x, torch.view_as_real(given.resolve_conj())), Turns()(x, given)
        )


def test_complex_outputs_are_complex_in_a_call() -> None:
    class Spectrum(nn.Module):
        def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return torch.fft.rfft(x), x + 1, z.conj()

    z = torch.randn(3, dtype=torch.complex64)
    optimized = attngraph.optimize(Spectrum(), (X, z))
    assert any("Output output_0 is complex" in note for note in optimized.report.notes)
    torch.testing.assert_close(optimized(X, z), Spectrum()(X, z))


@pytest.mark.parametrize("compiled", [attngraph.optimize_decoder, attngraph.optimize_seq2seq])
def test_a_model_of_peft_is_to_be_merged_before_it_generates(compiled: Any) -> None:
    class Peft(nn.Module):
        def merge_and_unload(self) -> nn.Module:
            return self

    with pytest.raises(UsageError, match=r"compile what its merge_and_unload\(\) returns"):
        compiled(Peft())
