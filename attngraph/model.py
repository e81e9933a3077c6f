"""What is compiled, and its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attngraph.errors import UsageError
from attngraph.frontend.capture import Captured, capture, from_program
from attngraph.frontend.load import Loaded
from attngraph.frontend.script import script_to_program


@dataclass(frozen=True)
class Model:
    """What is compiled: a module or an exported program, its sample inputs and dynamic dims.

    `args` and `kwargs` are what `module(*args, **kwargs)` takes; `dynamic_shapes` is
    torch.export's. `source` names the model in messages.
    """

    module: torch.nn.Module | None
    program: torch.export.ExportedProgram | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any = None
    source: str = "model"

    @classmethod
    def of(cls, loaded: Loaded) -> Model:
        """From a loaded file. Raises UsageError where it brings no sample inputs."""
        args = loaded.args
        if args is None and loaded.program is not None:
            example = loaded.program.example_inputs
            args = None if example is None else tuple(example[0])
            if example is not None:
                return cls(None, loaded.program, tuple(example[0]), example[1], None, loaded.source)
        if args is None:
            raise UsageError(
                f"{loaded.source} brings no sample inputs: describe each input, for example "
                "--input input_ids=int64[batch=2,seq=8]."
            )
        return cls(
            loaded.module, loaded.program, args, loaded.kwargs, loaded.dynamic_shapes, loaded.source
        )


def trace(model: Model) -> Captured:
    """The model as a graph, whatever form it came in."""
    if model.program is not None:
        return from_program(model.program)
    if model.module is None:
        raise UsageError(f"{model.source} holds neither a module nor a program.")
    kwargs = dict(model.kwargs)
    if isinstance(model.module, torch.jit.ScriptModule):
        program = script_to_program(model.module, model.args, kwargs, model.dynamic_shapes)
        return from_program(program)
    return capture(model.module, model.args, kwargs=kwargs, dynamic_shapes=model.dynamic_shapes)
