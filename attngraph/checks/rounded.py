"""Activations rounded to int8: the kernels' error, told apart from what rounding costs.

Rounding to a step is not continuous: one unit in the last place may choose the neighbouring code,
and the outputs of two sound kernels then differ by far more than they round. So no budget of
rounding holds for a whole model. The graph is cut at its rounded linears instead, and a session
that returns what each of them is given and gives is compared part by part:

- **Between them** everything is continuous. With what the session's linears gave as further inputs,
  its outputs and what the linears were given are held against the usual error budget.
- **Each of them** is held against its formula in float64, on what it was given. A code may be the
  neighbour only where the number lies within `TIE` of the middle between two; such codes widen the
  bound by a step times their weight, and nothing else does.
- **The file itself**, in which onnxruntime may fuse across these cuts, differs from that session by
  no more than the codes that flipped: the limit is what rounding costs altogether.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import onnx_ir
import torch

from attngraph.dialect.quantized import FINER, block_steps, dequantized, row_steps
from attngraph.errors import ParityError
from attngraph.export.files.save import to_session
from attngraph.export.lowering.lower import value_names
from attngraph.export.parity.budget import OutputParity
from attngraph.export.parity.reference import ReferenceOutputs
from attngraph.ir import Graph, Node, Value, clone
from attngraph.ir.ops import attribute, input_of
from attngraph.ir.traits import QUANTIZED
from attngraph.optimized import Optimized

Run: TypeAlias = Callable[[tuple[torch.Tensor, ...]], Sequence[torch.Tensor]]
Apart: TypeAlias = Callable[[Sequence[str]], contextlib.AbstractContextManager[Run]]
"""Opens a file with further outputs, by their names in it; its runs give those last."""

GIVEN, LINEARS, FUSED = "(between)", "(linears)", "(fused)"
"""Names of the three comparisons."""
TIE = 2.0**-12
"""Steps: 255 of them in float32, divided twice, are off by less."""
_FINE_TIE = 2.0**-7
"""Steps of a second code: 127 · 254 of them in float32 are off by 2⁻⁹ at most."""
_ROUNDINGS = 16  # of a product, its scales and its bias


def rounded_linears(graph: Graph) -> list[Node]:
    """The linears that round what they are given."""
    return [node for node in graph if node.op in QUANTIZED and attribute(node, "rounds")]


def without_rounding(graph: Graph) -> Graph:
    """The graph with the same weights, on activations as they are."""
    plain = clone(graph)
    for node in rounded_linears(plain):
        plain.replace(node, plain.twin(node, attrs={**node.attrs, "rounds": False}).outputs)
    return plain


@dataclass(frozen=True)
class Cut:
    """A graph cut at its rounded linears: `graph` takes what they give as its last inputs, and
    returns what they are given as its last outputs. `names` are those two in a file, in that order;
    what is None there is an input or a constant, and known.
    """

    graph: Graph
    linears: tuple[Node, ...]
    given: tuple[Value, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, graph: Graph) -> Cut:
        linears = tuple(rounded_linears(graph))
        known = {*graph.inputs, *graph.constants.values()}
        sources = dict.fromkeys(node.inputs[0] for node in linears)
        given = tuple(value for value in sources if value is not None and value not in known)
        names = value_names(graph)
        copy = clone(graph)
        twins = {value.name: value for value in copy.values()}
        returned = [twins[value.name] for value in given]
        results = {node.output.name: node.output for node in linears}
        copy.set_outputs(
            [*copy.outputs, *returned],
            [*copy.output_names, *(f"given {value.name}" for value in given)],
        )
        for node in list(copy):
            if node.outputs[0].name in results:
                copy.replace(node, [copy.add_input(f"{node.output.name}.given", node.output.type)])
        wanted = [names[node.output] for node in linears] + [names[value] for value in given]
        return cls(copy, linears, given, tuple(wanted))

    def known(
        self, inputs: Sequence[torch.Tensor], graph: Graph, found: Sequence[torch.Tensor]
    ) -> dict[Value, torch.Tensor]:
        """What each linear was given, by value; `found` are the tensors of `names`."""
        values: dict[Value, Any] = dict(zip(graph.inputs, inputs, strict=True))
        values.update({value: value.data for value in graph.constants.values()})
        values.update(zip(self.given, found[len(self.linears) :], strict=True))
        return values


@contextlib.contextmanager
def further_outputs(model: onnx_ir.Model, names: Sequence[str]) -> Iterator[onnx_ir.Model]:
    """Within it the model returns these values too, after its outputs.

    Raises ParityError where the model has no such value.
    """
    outputs = model.graph.outputs
    made = {value.name: value for node in model.graph for value in node.outputs}
    missing = [name for name in names if name not in made]
    if missing:
        raise ParityError(
            f"The file has no value {missing[0]!r}, which its model's rounded linears have, so "
            "their kernels can't be checked: optimize the model again."
        )
    before = len(outputs)
    present = {value.name for value in outputs}
    further = [made[name] for name in dict.fromkeys(names) if name not in present]
    for value in further:
        value.type = value.type or onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
    outputs.extend(further)
    try:
        yield model
    finally:
        while len(outputs) > before:  # deleted as a slice they would still count as outputs
            outputs.pop()


def in_order(
    found: Sequence[torch.Tensor], outputs: Sequence[str], count: int, names: Sequence[str]
) -> list[torch.Tensor]:
    """The first `count` of what a session returns under `outputs`, and then those of `names`."""
    place = {name: at for at, name in enumerate(outputs)}
    return [*found[:count], *(found[place[name]] for name in names)]


@contextlib.contextmanager
def taken_apart(optimized: Optimized, names: Sequence[str]) -> Iterator[Run]:
    """Within it, what evaluates the model and returns these of its values too, as the last."""
    buffers, graph = optimized.buffers, optimized.graph
    with further_outputs(optimized.model, names) as model:
        opened = to_session(model, optimized.target)
    with opened as session:

        def run(tensors: tuple[torch.Tensor, ...]) -> Sequence[torch.Tensor]:
            outputs = session.output_names
            if buffers is None:
                found = session.run(tensors)
            else:
                given = dict(zip((value.name for value in graph.inputs), tensors, strict=True))
                found = buffers.evaluate(session.run, given, outputs)
            return in_order(found, outputs, len(graph.outputs), names)

        yield run


def of_linears(
    cut: Cut, given: dict[Value, torch.Tensor], results: Sequence[torch.Tensor]
) -> OutputParity:
    """The rounded linear that is nearest to its bound, or furthest over it."""
    found = [
        _of_linear(node, given[node.inputs[0]], result)
        for node, result in zip(cut.linears, results, strict=True)
        if node.inputs[0] is not None
    ]
    return max(found, key=lambda each: each.ratio)


def _of_linear(node: Node, x: torch.Tensor, result: torch.Tensor) -> OutputParity:
    exact, limit = _formula(node, x, rounds=True)
    parity = _held(node, result, exact, limit)
    if not parity.passed and node.op == "attn.quantized_linear":
        # Accuracy level 4 allows a kernel to be more exact, and where there is none it is.
        parity = min(
            parity, _held(node, result, *_formula(node, x, rounds=False)), key=lambda p: p.ratio
        )
    return parity


def _held(
    node: Node, result: torch.Tensor, exact: torch.Tensor, limit: torch.Tensor
) -> OutputParity:
    name = f"linear {node.loc.module or node.output.name}"
    shape, wide = tuple(result.shape), result.double()
    finite = exact.isfinite()
    if result.shape != exact.shape or not torch.equal(finite, wide.isfinite()):
        return OutputParity(name, shape, math.inf, 0.0, 0.0, passed=False)
    off, most = (wide - exact)[finite].abs(), limit[finite]
    if not off.numel():
        return OutputParity(name, shape, 0.0, 0.0, 0.0, passed=True)
    scale = float(exact[finite].abs().max()) or 1.0
    at = int((off / most.clamp_min(torch.finfo(torch.float32).tiny)).argmax())
    figures = float(off[at]) / scale, 0.0, float(most[at]) / scale
    return OutputParity(
        name, shape, *figures, passed=bool((off <= most).all()), compared=off.numel()
    )


def _formula(node: Node, x: torch.Tensor, *, rounds: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A linear's result in float64, and by how much a kernel may differ from it."""
    codes, scales = input_of(node, "codes").data, input_of(node, "scales").data
    assert codes is not None
    assert scales is not None
    bias = input_of(node, "bias")
    shift = torch.zeros(()) if bias is None else bias.data
    wide, steps, shift = x.double(), scales.double(), shift.double()
    weight = (
        codes.double() * steps.unsqueeze(-1)
        if node.op == "attn.int8_linear"
        else dequantized(codes, steps, int(attribute(node, "bits")))[:, : x.shape[-1]]
    )
    sums = 1  # results in float32 that are added up
    if node.op == "attn.int8_linear":
        one_sided = bool(attribute(node, "one_sided"))
        multiples, step = row_steps(wide, one_sided=one_sided)
    else:
        block = codes.shape[2] * 8 // int(attribute(node, "bits"))
        multiples, step = block_steps(wide, block)
        sums = multiples.shape[-2] if rounds else x.shape[-1]
    near = TIE
    if node.op == "attn.int8_linear" and attribute(node, "fine"):
        # Where the first code is the neighbour, the second makes up for it: only its ties count.
        multiples, step, near, sums = multiples * FINER, step / FINER, _FINE_TIE, 2
    ties = ((multiples - multiples.floor() - 0.5).abs() < near).double() * step
    used = multiples.round() * step if rounds else multiples * step
    if node.op != "attn.int8_linear":
        totals = used.sum(-1).abs()
        used, ties = (each.flatten(-2)[..., : x.shape[-1]] for each in (used, ties))
    linear = torch.nn.functional.linear
    exact = linear(used, weight) + shift
    size = linear(used.abs(), weight.abs()) + shift.abs()
    if node.op != "attn.int8_linear" and rounds:
        # The kernel multiplies with unsigned codes, and subtracts the zero point times the sum of a
        # block from that: an outlier that meets a weight of 0 cancels there, with its rounding.
        zero_point = 1 << int(attribute(node, "bits")) - 1
        size = size + 2 * zero_point * linear(totals, steps.abs())
    if node.op == "attn.int8_linear" and attribute(node, "one_sided"):
        # The kernel adds up codes, and the part of the zero point is subtracted from that.
        size = size + wide.amin(-1, keepdim=True).clamp_max(0).abs() * weight.abs().sum(-1)
    eps = torch.finfo(torch.float32).eps / 2
    limit = (_ROUNDINGS + sums) * eps * size
    return exact, limit + (linear(ties, weight.abs()) if rounds else 0.0)


def flipped(
    reference: ReferenceOutputs, found: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]
) -> tuple[OutputParity, ...]:
    """Outputs that may differ by codes that flipped: by no more than what rounding costs.

    That is measured, as how far off the same graph's outputs are without it, the `plain` ones.
    """
    targets = zip(reference.names, reference.eager, found, plain, strict=True)
    return tuple(_bounded(name, a, b, _rms(a, other)) for name, a, b, other in targets)


def _bounded(name: str, target: torch.Tensor, found: torch.Tensor, cost: float) -> OutputParity:
    shape = tuple(target.shape)
    if found.shape != target.shape or found.dtype != target.dtype:
        return OutputParity(name, shape, math.inf, 0.0, 0.0, passed=False)
    if not target.is_floating_point():
        # What is chosen by a rounded number may be another choice.
        return OutputParity(name, shape, 0.0, 0.0, 0.0, True, "exact", compared=target.numel())
    if not torch.equal(target.isfinite(), found.isfinite()):
        return OutputParity(name, shape, math.inf, 0.0, 0.0, passed=False)
    scale = _rms(target, torch.zeros_like(target))
    error = _rms(found, target)
    budget = max(cost, 64 * torch.finfo(target.dtype).eps * scale)
    unit = scale or 1.0
    return OutputParity(
        name,
        shape,
        error / unit,
        cost / unit,
        budget / unit,
        passed=error <= budget,
        norm="rms",
        compared=target.numel(),
    )


def _rms(found: torch.Tensor, target: torch.Tensor) -> float:
    if not found.is_floating_point() or not found.numel():
        return 0.0
    usual = found.isfinite() & target.isfinite()
    off = torch.where(usual, found.double() - target.double(), 0.0)
    return float(off.square().mean().sqrt())


def worst(outputs: Sequence[OutputParity], name: str) -> OutputParity:
    """The one that is nearest to its budget, or furthest over it, under another name."""
    found = max(outputs, key=lambda each: each.ratio)
    said = f"{found.name}: {found.note}" if found.note else found.name
    return replace(found, name=name, note="" if found.passed else said)
