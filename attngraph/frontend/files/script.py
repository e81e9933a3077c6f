"""TorchScript: load a trusted archive, and turn a script module into an exported program."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from attngraph.errors import CaptureError, LoadError, first_line
from attngraph.frontend.files.factory import importable_cwd
from attngraph.frontend.interface.binding import forward_signature

_FAST_PATH_OPS = ("aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention")
_load_archive: Callable[..., torch.jit.ScriptModule] = torch.jit.load


def load_script(path: Path, *, trust_pickle: bool) -> torch.jit.ScriptModule:
    """The script module in `path`, on the CPU, in eval mode.

    Raises LoadError unless `trust_pickle`: a TorchScript `__setstate__` runs while loading. Also
    where the trace holds nn.Transformer's fast path, one opaque operator with no attention left to
    see.
    """
    if not trust_pickle:
        raise LoadError(
            f"{path} is TorchScript, and loading it can run code that it carries; pass "
            "--trust-pickle if you trust its author, or save the model with torch.export.save."
        )
    try:
        with _quiet(), importable_cwd():
            module = _load_archive(str(path), map_location="cpu")
    except Exception as error:
        raise LoadError(
            f"{path} is damaged: torch.jit.load can't read it ({first_line(error)}); save it again."
        ) from error
    module.eval()
    check_no_fast_path(module, str(path))
    return module


def check_no_fast_path(module: torch.jit.ScriptModule, source: str) -> None:
    """Raise LoadError if the fast path was on while `module` was traced."""
    graph: Any = module.inlined_graph
    for kind in _FAST_PATH_OPS:
        if graph.findAllNodes(kind, recurse=True):
            raise LoadError(
                f"{source} was traced with the transformer fast path on ({kind}), which hides "
                "attention in one opaque operator; re-trace with "
                "torch.backends.mha.set_fastpath_enabled(False)."
            )


def script_to_program(
    module: torch.jit.ScriptModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> torch.export.ExportedProgram:
    """Convert a script module, then export the result again with the caller's named dims.

    The program takes every input by position, under the names of the script's own forward; an
    optional input that is skipped is passed as its default.

    torch's converter keeps sizes symbolic; tracing with make_fx would bake them in. Raises
    CaptureError with torch's reason where it can't convert (scripted nn.MultiheadAttention, for
    one).
    """
    from torch._export.converter import TS2EPConverter

    bound = forward_signature(module).bind(*args, **dict(kwargs or {}))
    if bound.kwargs or len(bound.arguments) != len(bound.args):
        bound.apply_defaults()
    inputs = tuple(bound.arguments.values())
    if isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = {name: dynamic_shapes.get(name) for name in bound.arguments}
    try:
        with _quiet(), torch.no_grad():
            program = TS2EPConverter(module, inputs, {}).convert()
            named = _with_names(program.module(), list(bound.arguments))
            return torch.export.export(named, inputs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:
        raise CaptureError(
            "The TorchScript module can't be converted to a torch.export program "
            f"({first_line(error)}); export the eager model with torch.export.save instead."
        ) from error


def _with_names(module: torch.nn.Module, names: list[str]) -> torch.nn.Module:
    """Give `module.forward` its parameter names back: the converter numbers them (`ids_1`)."""
    unnamed: Callable[..., Any] = module.forward

    def forward(*inputs: Any) -> Any:
        return unnamed(*inputs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    vars(forward)["__signature__"] = signature
    module.forward = forward
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns that all of torch.jit is deprecated, which is not news to who has such a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", "Manually populate")  # one per tied weight
        yield
