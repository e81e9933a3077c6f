"""What is measured, as data to pass to a process: a model, its inputs, a machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from attngraph.compiling.compiler import Model
from attngraph.export.formats import Precision
from attngraph.export.parity.samples import DTYPE
from attngraph.export.runtime.session import Session
from attngraph.export.target import Target, parse_target
from attngraph.frontend.files.factory import importable_cwd
from attngraph.frontend.files.source import Source
from attngraph.frontend.read_source import read_model

_JOB, _INPUTS = "job.json", "inputs.pt"


@dataclass(frozen=True)
class Job:
    """One workload: every engine gets this model, these inputs and this precision.

    `onnx` is a file that attngraph wrote earlier; without it the model is compiled. `static` drops
    the dynamic dims. `threads` are those of torch and of onnxruntime, by default torch's number.
    `spinning` and `provider_options` are those of `Session.open`, for every ONNX file.
    `padding` is the position of the input (B, S) that is 0 where there is padding: what
    `--ignore-padded-rows` computes is compared on the other rows only.
    """

    source: Source
    target: str = "cpu"
    precision: Precision = "fp32"
    static: bool = False
    onnx: Path | None = None
    threads: int | None = None
    spinning: bool = True
    provider_options: Mapping[str, str] = field(default_factory=dict)
    padding: int | None = None

    def write(self, folder: Path) -> None:
        (folder / _JOB).write_text(json.dumps(dataclasses.asdict(self), default=str))

    @classmethod
    def read(cls, folder: Path) -> Job:
        found = json.loads((folder / _JOB).read_text())
        source = found.pop("source")
        for name in ("path", "npz"):
            source[name] = None if source[name] is None else Path(source[name])
        for name in ("inputs", "dims", "factory_args"):
            source[name] = tuple(source[name])
        onnx = found.pop("onnx")
        return cls(Source(**source), onnx=None if onnx is None else Path(onnx), **found)

    @property
    def machine(self) -> Target:
        return parse_target(self.target)

    @property
    def device(self) -> str:
        return "cuda" if self.machine.provider == "cuda" else "cpu"

    def model(self) -> Model:
        """The model as it was written, on the CPU.

        Every process draws the same random numbers, so that random weights are the same ones.
        """
        torch.manual_seed(0)
        with importable_cwd():
            model = read_model(self.source)
        return replace(model, dynamic_shapes=None) if self.static else model

    def ready(self) -> Model:
        """The model in the precision and on the device of the job, in eval mode."""
        model = self.model()
        module = model.runnable
        if model.module is not None:
            module.eval()
        args, kwargs = self.placed((model.args, dict(model.kwargs)))
        if self.precision != "fp32":
            module = module.to(DTYPE[self.precision])
        return replace(model, module=module.to(self.device), args=args, kwargs=kwargs)

    def placed(self, tree: Any) -> Any:
        """Tensors on the device; floating ones in the precision, unless that is fp32."""

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            halved = leaf.is_floating_point() and self.precision != "fp32"
            return leaf.to(self.device, DTYPE[self.precision] if halved else leaf.dtype)

        return pytree.tree_map(place, tree)

    def keep_inputs(self, folder: Path) -> list[torch.Tensor]:
        """Saves the input tensors, for engines that need no model, in the order of an export's."""
        model = self.model()
        leaves = pytree.tree_leaves((tuple(model.args), dict(model.kwargs)))
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        torch.save(inputs, folder / _INPUTS)
        return inputs

    def inputs(self, folder: Path) -> list[torch.Tensor]:
        """What `keep_inputs` saved."""
        inputs: list[torch.Tensor] = torch.load(folder / _INPUTS, weights_only=True)
        return inputs

    def session(self, path: Path, *, cuda_graph: bool = False) -> Session:
        """Every ONNX file runs in a session of the same options."""
        return Session.open(
            path,
            self.machine,
            threads=self.threads,
            spinning=self.spinning,
            provider_options=self.provider_options,
            cuda_graph=cuda_graph,
        )
