"""The file that is compared: its inputs and outputs in the model's order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import onnx_ir
import torch

from attngraph.checks.check import Cases
from attngraph.checks.rounded import Run, further_outputs
from attngraph.errors import UsageError
from attngraph.export.files.save import to_session
from attngraph.export.lowering.emission.buffers import Buffers
from attngraph.export.runtime.session import Session
from attngraph.export.target import Target
from attngraph.frontend.capture import Captured


class ComparedFile:
    """A session that takes inputs and gives outputs in the order of the model's."""

    def __init__(
        self,
        session: Session,
        path: Path,
        captured: Captured,
        source: str,
        buffers: Buffers | None,
    ) -> None:
        self.session, self.path, self.captured, self.source = session, path, captured, source
        self.buffers = buffers
        inputs, outputs = captured.input_names, captured.output_names
        taken = session.input_names
        if buffers is not None:  # which bring along the length that stands for a dim
            taken = tuple(name for name in taken if name != buffers.length)
        by_name = set(taken) <= set(inputs)
        if not by_name and len(taken) != len(inputs):
            raise UsageError(
                f"{path} takes {_listed(taken)}, and {source} takes "
                f"{_listed(inputs)}: neither names nor number fit. Name the file of this model."
            )
        self.feeds = dict(zip(taken, taken if by_name else inputs, strict=True))
        if len(session.output_names) != len(outputs):
            raise UsageError(
                f"{path} returns {_listed(session.output_names)}, and {source} returns "
                f"{_listed(outputs)}: their number differs. Name the file of this model."
            )
        named = set(session.output_names) == set(outputs)
        order = outputs if named else session.output_names
        self.places = [session.output_names.index(name) for name in order]
        self.paired = {
            "inputs": "name" if by_name else "order",
            "outputs": "name" if named else "order",
        }

    def _given(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        values = dict(zip(self.captured.input_names, tensors, strict=True))
        given = {name: values[model_name] for name, model_name in self.feeds.items()}
        for name, tensor in given.items():
            dtype = self.session.input_dtype(name)
            if tensor.dtype is torch.float32 and dtype in (torch.float16, torch.bfloat16):
                given[name] = tensor.to(dtype)  # a cache, in a file that was converted
        return given

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        session: Session | None = None,
        names: Sequence[str] = (),
    ) -> tuple[torch.Tensor, ...]:
        """The outputs in the model's order, then those of these `names`."""
        given, session = self._given(tensors), session or self.session
        if self.buffers is None:
            outputs = session.run(given)
        else:
            outputs = self.buffers.evaluate(session.run, given, session.output_names)
        places = [*self.places, *map(session.output_names.index, names)]
        return tuple(outputs[place] for place in places)

    @contextlib.contextmanager
    def taken_apart(self, target: Target, names: Sequence[str]) -> Iterator[Run]:
        """Within it, a run that returns these of the file's values too, as the last."""
        with further_outputs(onnx_ir.load(self.path), names) as model:
            opened = to_session(model, target)
        with opened as session:
            yield partial(self.run, session=session, names=names)

    def fitting(self, cases: Cases) -> tuple[Cases, list[str]]:
        """The cases that the file takes, and a note on each that it doesn't.

        Raises UsageError where it doesn't take the first, which is the sample.
        """
        kept, notes = {}, []
        for label, tensors in cases.items():
            misfit = self._misfit(tensors)
            if not misfit:
                kept[label] = tensors
            elif not kept:
                raise UsageError(f"{self.path} doesn't fit {self.source}: {misfit}.")
            else:
                notes.append(f"Not compared at {label}: {misfit}.")
        return kept, notes

    def _misfit(self, tensors: Sequence[torch.Tensor]) -> str:
        for name, tensor in self._given(tensors).items():
            dtype, shape = self.session.input_dtype(name), self.session.input_shape(name)
            pairs = list(zip(shape, tensor.shape, strict=False))
            fits = len(shape) == tensor.dim() and tensor.dtype is dtype
            if not fits or any(isinstance(dim, int) and dim != size for dim, size in pairs):
                return (
                    f"its input {name} is {_typed(dtype, shape)}, and the model is given "
                    f"{_typed(tensor.dtype, tuple(tensor.shape))}"
                )
        return ""


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if names else "none"


def _typed(dtype: torch.dtype, shape: Sequence[int | str | None]) -> str:
    dims = ", ".join("?" if dim is None else str(dim) for dim in shape)
    return f"{str(dtype).removeprefix('torch.')}[{dims}]"
