"""The model that is compiled, and its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from attngraph.errors import UsageError
from attngraph.frontend.capture import Captured, capture, from_program
from attngraph.frontend.files.load import Loaded
from attngraph.frontend.interface.wrappers import unwrapped
from attngraph.frontend.rolled_loops import rolled
from attngraph.frontend.watching.asked import Place


@dataclass(frozen=True)
class Model:
    """What is compiled: a module or an exported program, its sample inputs and dynamic dims.

    `args` and `kwargs` are what `module(*args, **kwargs)` takes; `dynamic_shapes` is
    torch.export's. `dim_names` names the dims of a program, by input and axis. `source` names the
    model in messages; `notes` are sentences for the user about how it was loaded. `names` are what
    its inputs and outputs are called instead of what the code calls them, where others expect that.
    """

    module: torch.nn.Module | None
    program: torch.export.ExportedProgram | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any = None
    source: str = "model"
    dim_names: Mapping[tuple[str, int], str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.module is not None:
            object.__setattr__(self, "module", unwrapped(self.module))

    @property
    def runnable(self) -> torch.nn.Module:
        """The module, or that of the program, which has no eval(): it was exported in its mode."""
        if self.module is not None:
            return self.module
        assert self.program is not None
        return self.program.module()

    @classmethod
    def of_module(
        cls,
        module: torch.nn.Module | None,
        args: tuple[Any, ...] = (),
        dynamic_shapes: Any = None,
        source: str = "model",
        names: Mapping[str, str] | None = None,
    ) -> Model:
        """Of a module that takes its inputs by their places."""
        return cls(module, None, args, {}, dynamic_shapes, source, names=names or {})

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
            generates: Any = getattr(loaded.module, "can_generate", None)
            more = "; or add --decode, which makes them" if generates and generates() else ""
            raise UsageError(
                f"{loaded.source} brings no sample inputs: describe each input, for example "
                f"--input input_ids=int64[batch=2,seq=8]{more}."
            )
        return cls(
            loaded.module,
            loaded.program,
            args,
            loaded.kwargs,
            loaded.dynamic_shapes,
            loaded.source,
            notes=loaded.notes,
        )


def trace(
    model: Model,
    sides: Mapping[Place, bool] | None = None,
    *,
    way: tuple[bool, ...] | None = None,
    elsewhere: bool = False,
) -> Captured:
    """The model as a graph, whatever form it came in.

    `sides` say which side of a branch on a tensor's values is followed (branches.py); with None
    such a branch is an error. With a `way`, the answers of the first conditions that are asked, all
    are kept in `Captured.asked`. `elsewhere`, where the sample's sizes lead into a special case, it
    is traced at others, whose suspects are then to be checked.
    """
    if model.program is not None:
        return from_program(model.program, dim_names=model.dim_names)
    if model.module is None:
        raise UsageError(f"{model.source} holds neither a module nor a program.")
    captured = partial(
        capture,
        model.module,
        model.args,
        kwargs=model.kwargs,
        dynamic_shapes=model.dynamic_shapes,
        sides=sides,
        way=way,
        elsewhere=elsewhere,
    )
    return rolled(captured(), captured).renamed(model.names)
