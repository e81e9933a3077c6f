"""Choices by rounded scores: a tie that was settled otherwise, told apart from an error.

The largest of scores aren't continuous in them: where two are nearer than rounding, as those of a
router in bf16 often are, eager and a file may both be sound and take different ones, and the rows
that follow have nothing in common. No budget of rounding holds for that. So where a file is out of
its budget, the model is run again, eagerly and in float64, with the choices that the file's own
TopK nodes made in place of its own:

- **Each choice** must be one that rounding explains: in float64 no score that was taken is lower
  than the one that should stand there by more than what rounding makes of scores: four times what
  eager's own are off, as the file may be off twice as far as eager and two scores are compared.
- **All else** is then held against the usual error budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import onnx_ir
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attngraph.checks.rounded import Apart
from attngraph.export.parity.budget import Parity
from attngraph.export.parity.reference import ReferenceOutputs

_FACTOR = 4.0
OTHERS = "the file's top-k takes others than the model does"
"""How the note begins on what was compared with the file's choices."""
NEARLY_TIED = (
    "The file chooses the largest of scores that are rounded to a half: where two are nearer to "
    "each other than that, it may take another than eager does, and such a row's result is another."
)
Tensors: TypeAlias = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Chosen:
    """The choices of a file: `names` are those of its values, `apart` opens it with these as
    further outputs, and `given` makes its inputs of the model's.
    """

    names: tuple[str, ...]
    apart: Apart
    given: Callable[[Tensors], Tensors] = tuple

    @contextlib.contextmanager
    def taken(
        self,
    ) -> Iterator[Callable[[Tensors, Sequence[torch.Tensor]], Choices | None]]:
        """Within it, gives the choices for inputs and the file's outputs; None where with further
        outputs the file gives others, so that what it chose isn't known.
        """
        with self.apart(self.names) as run:

            def choices(tensors: Tensors, outputs: Sequence[torch.Tensor]) -> Choices | None:
                found = run(self.given(tensors))
                again, places = found[: len(outputs)], found[len(outputs) :]
                pairs = zip(again, outputs, strict=True)
                if len(places) != len(self.names) or not all(_is_same(a, b) for a, b in pairs):
                    return None
                return Choices(tuple(places))

            yield choices


def held_as_chosen(
    chosen: Chosen,
    cases: Mapping[str, Tensors],
    outputs: Mapping[str, Sequence[torch.Tensor]],
    references: Callable[[Tensors], ReferenceOutputs],
    held: Callable[[ReferenceOutputs, Sequence[torch.Tensor], Tensors], Parity],
) -> tuple[dict[str, Parity], str]:
    """Parity with the model where it chooses as the file did, in those of the cases where that
    explains what is out of budget, and a note on them.
    """
    found: dict[str, Parity] = {}
    if not cases:
        return found, ""
    others = rows = 0
    with chosen.taken() as taken:
        for label, tensors in cases.items():
            choices = taken(tensors, outputs[label])
            if choices is None:
                continue
            with choices.imposed():
                reference = references(tensors)
            if not choices.are_ties():  # asked outside, where a topk is a topk
                continue
            with choices.imposed():
                parity = held(reference, outputs[label], tensors)
            if parity.passed:
                found[label] = parity
                others, rows = others + choices.others, rows + choices.rows
    if not found:
        return found, ""
    if not others:
        return found, (
            f"At {'; '.join(found)} the file's top-k takes what the model's takes, in another "
            "order: either may, where scores are nearer to each other than rounding or "
            "sorted=False asks for any order. It was held against the model with the file's."
        )
    return found, (
        f"In {others} of {rows} rows, at {'; '.join(found)}, {OTHERS} in its own precision or in "
        "float64. Their scores are nearer to each other than rounding, so either may, and it was "
        "held against the model with the file's choices. Such rows differ from eager's. Where "
        "scores are equal, only a choice by torch.sort(..., stable=True) is the same for both."
    )


def choices_of(model: onnx_ir.Model) -> tuple[str, ...]:
    """The names of the places that a model's TopK nodes give, in the order of its nodes."""
    found = []
    for node in model.graph:
        places = node.outputs[1] if node.op_type == "TopK" else None
        if places is not None and places.name and (places.uses() or places.is_graph_output()):
            places.type = places.type or onnx_ir.TensorType(onnx_ir.DataType.INT64)
            found.append(places.name)
    return tuple(found)


@dataclass
class Choices:
    """What a model is to choose in place of the largest, call by call, and by what scores.

    `others` counts the rows, of all `rows`, of which the model would have chosen others.
    """

    places: Tensors
    calls: int = 0
    fits: bool = True
    exact: dict[int, torch.Tensor] = field(default_factory=dict)
    rounded: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    others: int = 0
    rows: int = 0

    def are_ties(self) -> bool:
        """Whether rounding explains each choice, after a run of the model in float64 and others."""
        if not self.fits or len(self.exact) != len(self.places) or self.calls % len(self.places):
            return False
        for at, scores in self.exact.items():
            taken = scores.gather(-1, self.places[at])
            best = scores.topk(taken.shape[-1], -1).values
            gaps = torch.where(_agree(best, taken), 0.0, best - taken).abs()
            errors = [_error(each, scores) for each in self.rounded.get(at, ())]
            # asked of each, for the largest of gaps is NaN where one is, and more than nothing
            if not errors or not bool((gaps <= _FACTOR * max(errors)).all()):
                return False
            differ = [_differ(each, self.places[at]) for each in (scores, *self.rounded[at])]
            self.others += int(torch.stack(differ).any(0).sum())
            self.rows += scores.shape[:-1].numel()
        return True

    def imposed(self) -> Any:
        """A context in which each topk takes these."""
        mode = _Imposing()
        mode.choices = self
        return mode

    def replaced(self, scores: torch.Tensor, found: Sequence[torch.Tensor]) -> Any:
        at = self.calls % len(self.places)
        self.calls += 1
        places = self.places[at]
        in_order = places.sort(-1).values
        if (
            places.shape != found[1].shape
            or not bool(((places >= 0) & (places < scores.shape[-1])).all())
            or bool((in_order[..., 1:] == in_order[..., :-1]).any())
        ):
            self.fits = False
            return found
        if scores.dtype == torch.float64:
            self.exact[at] = scores.detach()
        else:
            self.rounded.setdefault(at, []).append(scores.detach())
        return scores.gather(-1, places), places.clone()


def _error(rounded: torch.Tensor, exact: torch.Tensor) -> float:
    """How far scores are off, and no less than their dtype rounds."""
    usual = exact.isfinite() & rounded.isfinite()
    off = torch.where(usual, rounded.double() - exact, 0.0).abs()
    largest = float(torch.where(usual, exact, 0.0).abs().max()) if exact.numel() else 0.0
    return max(float(off.max()), torch.finfo(rounded.dtype).eps / 2 * largest)


def _differ(scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The rows of which the largest are in other places."""
    own = scores.topk(places.shape[-1], -1).indices.sort(-1).values
    return (own != places.sort(-1).values).any(-1)


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(_agree(a, b).all())


def _agree(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two are the same number, or both NaN."""
    return (a == b) | (a.isnan() & b.isnan())


def _dispatch(
    mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    found = func(*args, **(kwargs or {}))
    if func is not torch.ops.aten.topk.default:
        return found
    largest = args[3] if len(args) > 3 else True
    dim = args[2] if len(args) > 2 else -1
    choices: Choices = mode.choices
    if not largest or dim not in (-1, args[0].dim() - 1):
        choices.fits = False
        return found
    return choices.replaced(args[0], found)


# Built by type(): TorchDispatchMode has no annotations, and strict mypy takes no such base class.
_Imposing = type("_Imposing", (TorchDispatchMode,), {"__torch_dispatch__": _dispatch})
