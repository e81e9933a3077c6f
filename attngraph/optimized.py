"""The result: an ONNX model that is callable from torch and can be saved."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir
import torch

from attngraph.errors import UsageError
from attngraph.export.files.save import save, to_session
from attngraph.export.files.staged import Staged
from attngraph.export.lowering.emission.buffers import Buffers
from attngraph.export.runtime.session import Session
from attngraph.export.target import Target
from attngraph.frontend.interface.signature import Signature
from attngraph.frontend.sizes.demands import told
from attngraph.ir import Graph
from attngraph.ir.conditions import shown
from attngraph.ir.dims import DimInfo, shown_dim
from attngraph.ir.ranges import Ranges
from attngraph.ir.storage import as_pairs
from attngraph.reports.attention_weights import AttentionWeights, attention_weights
from attngraph.reports.report import Report
from attngraph.versions import versions

_ADVICE = (
    "Compile with a Dim that takes it; if the report says that the model demands the bound, give a "
    "sample of that size, or trace the model before its first call, which may leave tables behind."
)


class Optimized:
    """An optimised model. Calling it runs onnxruntime on the provider it was compiled for.

    Several threads may call it at once.

    `model` is the onnx_ir.Model, `graph` the optimised IR, `report` what was done and measured;
    `origin` is the graph as it was captured, unless verification was off; `options` are those of
    `Session.open` for its sessions, and `buffers` those of a static cache. What is `staged` where
    it will be saved is written once. `signature` is how the model itself is called; without it,
    inputs and outputs are flat.
    """

    def __init__(
        self,
        graph: Graph,
        model: onnx_ir.Model,
        report: Report,
        target: Target,
        origin: Graph | None = None,
        options: Mapping[str, Any] | None = None,
        buffers: Buffers | None = None,
        staged: Staged | None = None,
        signature: Signature | None = None,
    ) -> None:
        self.buffers = buffers
        self._signature = signature
        self._staged = staged
        self.graph = graph
        self.origin = origin
        self.model = model
        self.report = report
        self.target = target
        self._options = dict(options or {})
        self._session: Session | None = None
        self._lock = threading.Lock()
        weights = model.graph.initializers.values()
        tensors = [value.const_value for value in weights if value.const_value is not None]
        self.ranges = Ranges.of(graph)
        report.dims = dict(self.ranges.dims)
        bounds = {name: DimInfo(low, high) for name, (low, high) in self.ranges.dims.items()}
        report.relations = list(map(shown, told(self.ranges.relations, bounds)))
        report.nodes_after = sum(1 for _ in model.graph)
        report.weights = len(tensors)
        report.weight_bytes = sum(tensor.nbytes for tensor in tensors)

    def __getstate__(self) -> dict[str, Any]:
        """What `copy.deepcopy` and `pickle` take: all but the session, which a copy opens anew."""
        return {**vars(self), "_session": None, "_lock": None, "_staged": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    @property
    def session(self) -> Session:
        """The session on the target's provider, opened on first use and after `close`.

        Raises ProviderError where the provider can't be used, and why.
        """
        with self._lock:
            if self._session is None:
                opened = to_session if self._staged is None else self._staged.session
                self._session = opened(self.model, self.target, **self._options)
            return self._session

    def open(self, **options: Any) -> Session:
        """Opens the model anew, for all calls from now on; `options` are those of `Session.open`.

        Such as `threads`, `spinning`, `cuda_graph` and `provider_options`. Raises as that does, and
        then keeps the session it had.
        """
        session = to_session(self.model, self.target, **options)
        with self._lock:
            self._session = session
        return session

    def close(self) -> None:
        """Frees what onnxruntime holds; the next call opens the model again."""
        with self._lock:
            self._session = None

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Every output, for inputs in the order of `session.input_names`."""
        return self.session.run(tensors)

    def evaluate(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Every output of `graph`, for its inputs: a static cache is given as one that grows."""
        if self.buffers is None:
            return self.run(tensors)
        names = [value.name for value in self.graph.inputs]
        given = dict(zip(names, tensors, strict=True))
        return self.buffers.evaluate(self.session.run, given, self.session.output_names)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, for its own arguments: nested as they are, numbers and None too.

        The tensors alone do as well, by position in the order of `session.input_names`, then by
        name; what is no tensor is then what it was when the model was compiled, whatever its
        default. Raises UsageError for an input twice, of a size that the model was not compiled
        for, or that is no tensor and not what it was when the model was compiled.
        """
        feeds = {
            name: as_pairs(value) if isinstance(value, torch.Tensor) else value
            for name, value in self._feeds(args, kwargs).items()
        }
        self.check_sizes(feeds)
        outputs = self.session.run(feeds)
        if self._signature is not None:
            return self._signature.unflatten(outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def _feeds(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        names = self.session.input_names
        is_flat = all(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values()))
        if self._signature is not None and not is_flat:
            return dict(zip(names, self._signature.tensors(args, kwargs), strict=True))
        if self._signature is not None and (name := self._signature.left_out(args)) is not None:
            raise UsageError(
                f"By position one of the tensors is {name!r}, which was not given when the model "
                "was compiled: give those that were by their names."
            )
        if len(args) > len(names):
            raise UsageError(f"{len(args)} inputs were given; there are {', '.join(names)}.")
        feeds = dict(zip(names, args, strict=False))
        for name, tensor in kwargs.items():
            if name in feeds:
                raise UsageError(f"The input {name} was given twice.")
            feeds[name] = tensor
        return feeds

    def check_sizes(self, feeds: Mapping[str, torch.Tensor]) -> None:
        """Raises UsageError for inputs, by name, of sizes that the model wasn't compiled for.

        The file fails in a session for such sizes; this says it for the caller's input.
        """
        axes: dict[tuple[str, int], int] = {}
        sizes: dict[str, int] = {}
        for value in self.graph.inputs:
            tensor = feeds.get(value.name)
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != len(value.shape):
                continue  # the session says what is wrong
            for axis, (dim, size) in enumerate(zip(value.shape, tensor.shape, strict=True)):
                axes[value.name, axis] = size
                if str(dim) in self.ranges.dims:
                    self._check_size(f"Input {value.name}'s axis {axis}", size, str(dim), size)
                    sizes[str(dim)] = size
        for each in self.ranges.axes:
            if (each.name, each.axis) not in axes:
                continue
            size, said = axes[each.name, each.axis], f"Input {each.name}'s axis {each.axis}"
            of_dim = each.at(size)
            if of_dim is None:
                raise UsageError(f"{said} is {size}; the model takes {each.taken} there.")
            if of_dim != sizes.setdefault(each.dim, of_dim):
                raise UsageError(
                    f"{said} is {size}; the model takes {shown_dim(each.size)} there, and "
                    f"{each.dim} is {sizes[each.dim]} in another axis."
                )
            self._check_size(said, size, each.dim, of_dim)
        if broken := self.ranges.broken(sizes):
            given = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            raise UsageError(
                f"The model was compiled for sizes with {broken}, and these are {given}. {_ADVICE}"
            )

    def _check_size(self, said: str, size: int, dim: str, of_dim: int) -> None:
        """Raises UsageError for an axis whose size gives a dim another one than its range has."""
        low, high = self.ranges.dims[dim]
        above = high is not None and of_dim > high
        if of_dim == 0 and low > 0:
            raise UsageError(
                f"{said} is {size or 'empty'}, and dim {dim!r} was compiled for sizes from 1 on: "
                "torch.export traces no empty inputs."
            )
        if above or of_dim < low:
            bound = f"at most {high}" if above else f"at least {low}"
            made = "" if of_dim == size else f", where dim {dim!r} is {of_dim}"
            raise UsageError(
                f"{said} is {size}{made}; dim {dim!r} was compiled for {bound}. {_ADVICE}"
            )

    def attention(
        self,
        *tensors: torch.Tensor,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> list[AttentionWeights]:
        """What the chosen attentions look at, for inputs in the order of `session.input_names`.

        Weights (B, H, S, T), compared with eager's. Raises UsageError for a layer or head that
        isn't there, with the list of what there is.
        """
        return attention_weights(
            self.graph,
            self.origin,
            self.target,
            tensors,
            layers=layers,
            heads=heads,
            session=self._options,
        )

    def save(self, path: str | Path) -> None:
        """Writes the ONNX file, and its weights beside it, as `<name>.data`, where they exceed
        16 MiB and the model wasn't compiled to be a single file.

        Raises OutputError; nothing is left half written.
        """
        path = Path(path)
        said = self.model.metadata_props
        said["attngraph.model"] = _without_folders(self.report.source)
        said["attngraph.versions"] = json.dumps(versions(), sort_keys=True)
        data = None if self._staged is None else self._staged.data_of(self.model, path)
        save(self.model, path, data=data)


def _without_folders(source: str) -> str:
    """A model's name without the folders of the machine that it was compiled on."""
    return re.sub(r"\S*[/\\](?=\S)", "", source)
