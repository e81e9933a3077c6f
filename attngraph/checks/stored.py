"""Parity of quantised weights: kernels are held to the weights that they store.

What the codes themselves make of the model is measured beside it, and has no budget.
"""

from __future__ import annotations

from dataclasses import replace

from attngraph.checks.check import Candidate, Check
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
from attngraph.export.parity.budget import Parity, compare, merge
from attngraph.export.parity.reference import ReferenceOutputs
from attngraph.export.precision.quantize import OutputError
from attngraph.ir import Graph, interpret


def held_as_stored(
    check: Check, graph: Graph, candidate: Candidate, apart: Apart | None = None
) -> tuple[Parity, list[OutputError]]:
    """Parity of kernels with the weights they store, and the outputs' distance to the model.

    `graph` is the quantised one, which says what the stored weights stand for. Where it rounds
    activations, `apart` opens the candidate with further outputs (checks/rounded.py).
    """
    if apart is not None and rounded_linears(graph):
        return _rounded(check, graph, candidate, apart)
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
    check: Check, graph: Graph, candidate: Candidate, apart: Apart
) -> tuple[Parity, list[OutputError]]:
    check.require_rows()
    originals, cases, cut = check.all_references(), check.all_cases(), Cut.of(graph)
    reference = reference_of(cut.graph, check.precision)
    names = tuple(check.captured.output_names)
    count, linears = len(names), len(cut.linears)
    parities, errors = {}, []
    plain = without_rounding(graph)
    with apart(cut.names) as run:
        taken = {label: run(tensors) for label, tensors in cases.items()}
    for label, tensors in cases.items():
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
        if label in check.drawn:
            continue
        original, kept, _ = check.padding.cut(originals[label], shipped, tensors)
        errors.append((original, kept))
    return check.required(merge(parities)), errors_of(errors)
