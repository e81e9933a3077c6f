"""A model's own outputs, and how far from them a result is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from attngraph.errors import AttngraphError, ParityError, UsageError
from attngraph.export.parity import Parity, compare, merge
from attngraph.export.quantize import OutputError
from attngraph.export.reference import Precision, Reference, ReferenceOutputs
from attngraph.export.sizes import choose_sizes, resized_inputs
from attngraph.few_bits import errors_of, reference_of
from attngraph.frontend.capture import Captured
from attngraph.frontend.tracing import reason
from attngraph.ir import Graph, interpret
from attngraph.model import Model
from attngraph.padded import Padding, annotated, packed_tokens
from attngraph.passes import PassResult

Cases = Mapping[str, tuple[torch.Tensor, ...]]
"""Inputs by label, in the order of the graph's."""
Candidate = Callable[[tuple[torch.Tensor, ...]], Sequence[torch.Tensor]]
"""What is compared with the model: inputs to outputs, both in the order of the graph's."""


class Check:
    """Parity of one model: references are computed once per size."""

    def __init__(
        self, model: Model, captured: Captured, precision: Precision, cases: Cases | None = None
    ) -> None:
        self.cases = cases
        self.padding = Padding([])
        self.model = model
        self.captured = captured
        self.precision = precision
        module = model.module
        if module is None and model.program is not None:
            module = model.program.module()
        assert module is not None
        self.module = module
        self.reference = Reference(module, precision=precision)

    def convert(self, precision: Precision) -> None:
        """From now on the result is held against the module in another precision."""
        self.precision = precision
        self.reference = Reference(self.module, precision=precision, converted=True)

    def references(self, tensors: tuple[torch.Tensor, ...]) -> ReferenceOutputs:
        """Eager's outputs, under the names that the graph's have."""
        args, kwargs = self.captured.call(tensors)
        try:
            found = self.reference(args, kwargs)
        except AttngraphError:
            raise
        except Exception as error:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise UsageError(
                f"{self.model.source} itself fails on inputs of shape {shapes}: "
                f"{type(error).__name__}: {reason(error).rstrip('.')}. Give sample inputs that it "
                "takes, and the range of each dynamic dim."
            ) from error
        names = self.captured.output_names
        return replace(found, names=names) if len(names) == len(found.names) else found

    def compare(self, tensors: tuple[torch.Tensor, ...], candidate: Candidate) -> Parity:
        """Parity of a candidate on these inputs, without what is padding.

        The model runs first: where it fails on the inputs itself, that is what is told.
        """
        reference = self.references(tensors)
        outputs = candidate(tensors)
        if self.reference.converted:
            outputs = reference.in_its_dtypes(outputs)
        reference, outputs, notes = self.padding.cut(reference, outputs, tensors)
        return annotated(compare(reference, outputs, self.precision), notes)

    def few_bits(self, graph: Graph, candidate: Candidate) -> tuple[Parity, list[OutputError]]:
        """Parity of kernels with the weights they store, and the outputs' distance to the model.

        `graph` is the quantised one, which says what the stored weights stand for.
        """
        reference = reference_of(graph, self.precision)
        parities, cases = {}, []
        for label, tensors in (self.cases or self.resized()).items():
            outputs = candidate(tensors)
            stored = replace(reference(tensors), names=tuple(self.captured.output_names))
            stored, kept, notes = self.padding.cut(stored, outputs, tensors)
            parities[label] = annotated(compare(stored, kept, self.precision), notes)
            original, kept, _ = self.padding.cut(self.references(tensors), outputs, tensors)
            cases.append((original, kept))
        return merge(parities), errors_of(cases)

    def of_trace(self, graph: Graph) -> str:
        """A sentence, if the captured graph, evaluated by PyTorch, isn't the model already."""
        for label, tensors in (self.cases or self.resized()).items():
            parity = self.compare(tensors, lambda inputs: interpret(graph, inputs))
            if not parity.passed:
                worst = parity.worst
                return (
                    f"No pass is to blame: what torch.export traced of {self.model.source} already "
                    f"differs from it at {label} (error {worst.error:.2e}, budget "
                    f"{worst.budget:.2e}). Look for what runs in another way under a trace, such "
                    "as torch.compiler.is_compiling(), or for a number that the trace made a "
                    "constant."
                )
        return ""

    def after_pass(self, graph: Graph, result: PassResult) -> None:
        """Raises ParityError naming the pass, if the graph now computes something else."""
        self.padding = Padding([*self.padding.packed, *packed_tokens([result])])
        parity = self.compare(self.captured.args, lambda inputs: interpret(graph, inputs))
        if not parity.passed:
            raise ParityError(f"After the pass {result.name} the graph is wrong: {parity}.")

    def sizes(self) -> list[dict[str, int]]:
        """The sample's sizes, and up to two more."""
        captured = self.captured
        sample = {
            name: int(captured.args[index].shape[axis])
            for (index, axis), name in captured.dynamic.items()
        }
        ranges = {
            name: (captured.graph.dims[name].low, captured.graph.dims[name].high) for name in sample
        }
        return [sample, *choose_sizes(sample, ranges)] if sample else [{}]

    def final(self, candidate: Candidate) -> Parity:
        """Parity over all sizes."""
        return merge(
            {
                label: self.compare(tensors, candidate)
                for label, tensors in (self.cases or self.resized()).items()
            }
        )

    def resized(self) -> Cases:
        """The sample's inputs at each of the sizes."""
        return {
            ", ".join(f"{name}={size}" for name, size in sizes.items()) or "sample": resized_inputs(
                self.captured.args, self.captured.dynamic, sizes
            )
            for sizes in self.sizes()
        }
