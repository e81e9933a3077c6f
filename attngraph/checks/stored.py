"""Parity of quantised weights: kernels are held to the weights that they store.

What the codes themselves make of the model is measured beside it, and has no budget.
"""

from __future__ import annotations

from dataclasses import replace

from attngraph.checks.check import Candidate, Cases, Check
from attngraph.checks.padded import annotated
from attngraph.checks.rounded import (
    FUSED,
    GIVEN,
    LINEARS,
    Apart,
    Cut,
    flipped,
    of_linears,
    rounded_linears,
    without_rounding,
    worst,
)
from attngraph.checks.weight_only import errors_of, reference_of
from attngraph.export.lowering.emission.buffers import Buffers
from attngraph.export.parity.budget import Parity, compare, merge
from attngraph.export.parity.reference import ReferenceOutputs
from attngraph.export.precision.quantize import OutputError
from attngraph.ir import Graph, interpret


def held_as_stored(
    check: Check,
    graph: Graph,
    candidate: Candidate,
    apart: Apart | None = None,
    buffers: Buffers | None = None,
) -> tuple[Parity, list[OutputError]]:
    """Parity of kernels with the weights they store, and the outputs' distance to the model.

    `graph` is the quantised one, which says what the stored weights stand for. Where it rounds
    activations, `apart` opens the candidate with further outputs (checks/rounded.py). `buffers` are
    those of a static cache, whose file may run the rows of a batch one by one.
    """
    if apart is not None and rounded_linears(graph):
        return _rounded(check, graph, candidate, apart, buffers)
    check.require_rows()
    originals = check.all_references()
    reference = reference_of(graph, check.precision)
    cases, names = check.all_cases(), tuple(check.captured.output_names)
    graphs = {label: replace(reference(tensors), names=names) for label, tensors in cases.items()}
    parities, errors = {}, []
    for label, tensors in cases.items():
        outputs = candidate(tensors)
        stored, kept, notes = check.padding.cut(graphs[label], outputs, tensors)
        found = compare(stored, kept, check.precision)
        parities[label] = annotated(found, notes, graphs[label].eager)
        if label in check.drawn:  # whose magnitudes are not the sample's
            continue
        original, kept, _ = check.padding.cut(originals[label], outputs, tensors)
        errors.append((original, kept))
    return check.required(merge(parities)), errors_of(errors)


def _rounded(
    check: Check, graph: Graph, candidate: Candidate, apart: Apart, buffers: Buffers | None
) -> tuple[Parity, list[OutputError]]:
    check.require_rows()
    originals, cases, cut = check.all_references(), check.all_cases(), Cut.of(graph)
    reference = reference_of(cut.graph, check.precision)
    names = tuple(check.captured.output_names)
    count, linears = len(names), len(cut.linears)
    parities, errors = {}, []
    plain = without_rounding(graph)
    alone = _alone(cases, graph, buffers)
    with apart(cut.names) as run:
        taken = {label: run(tensors) for label, tensors in alone.items()}
    for label, tensors in alone.items():
        whole, found = taken[label][:count], taken[label][count:]
        given = cut.known(tensors, graph, found)
        results = found[:linears]
        between = reference((*tensors, *results))
        between = replace(between, names=(*names, *between.names[count:]))
        both = (*whole, *found[linears:])
        stored, kept, notes = check.padding.cut(between, both, tensors)
        parity = compare(stored, kept, check.precision)
        outputs = list(parity.outputs[:count])
        if parity.outputs[count:]:
            outputs.append(worst(parity.outputs[count:], GIVEN))
        outputs.append(worst([of_linears(cut, given, results)], LINEARS))
        shipped = candidate(tensors)
        session = ReferenceOutputs(names, tuple(whole), (None,) * count)
        session, kept, _ = check.padding.cut(session, shipped, tensors)
        others = ReferenceOutputs(names, interpret(plain, tensors), (None,) * count)
        others = check.padding.cut(others, shipped, tensors)[0]
        outputs.append(worst(flipped(session, kept, others.eager), FUSED))
        shapes = [*between.eager[:count], *[results[0]] * (len(outputs) - count)]
        parities[label] = annotated(replace(parity, outputs=tuple(outputs)), notes, shapes)
    for label, tensors in cases.items():
        if label not in check.drawn:
            original, kept, _ = check.padding.cut(originals[label], candidate(tensors), tensors)
            errors.append((original, kept))
    return check.required(merge(parities)), errors_of(errors)


def _alone(cases: Cases, graph: Graph, buffers: Buffers | None) -> Cases:
    """The cases, each row by itself where the file runs rows one by one.

    Their results are joined along the first axis, which holds of a decoder's outputs alone: what
    lies before these may have rows along any axis, or as many as a router gave an expert.
    """
    if buffers is None:
        return cases
    names, found = [value.name for value in graph.inputs], {}
    for label, tensors in cases.items():
        rows = buffers.alone(dict(zip(names, tensors, strict=True)))
        for row, given in enumerate(rows):
            place = f"{label}, row {row}" if len(rows) > 1 else label
            found[place] = tuple(given[name] for name in names)
    return found
