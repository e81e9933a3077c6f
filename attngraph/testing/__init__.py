"""For tests of your own: does an ONNX file compute what a module computes?

    from attngraph.testing import assert_parity

    def test_the_file_is_up_to_date():
        assert_parity(build(), "model.onnx", (ids, mask))

With `pytest_plugins = ["attngraph.testing.plugin"]` in conftest.py there is the fixture
`onnx_parity` as well, which compiles a module and checks its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

from attngraph.export.formats import Precision
from attngraph.export.runtime.session import Session
from attngraph.frontend.families.cache import METADATA_KEY
from attngraph.frontend.families.causal_lm import is_causal_lm
from attngraph.frontend.families.seq2seq import is_seq2seq
from attngraph.frontend.interface.shapes import combine
from attngraph.frontend.model import Model
from attngraph.ir.ranges import RANGES_KEY, Ranges
from attngraph.options import Options
from attngraph.paths import require_file
from attngraph.verification.verify import Verification, verify_file
from attngraph.verification.verify_parts import verify_seq2seq


def assert_parity(
    module: torch.nn.Module,
    path: str | Path,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    target: str = "cpu",
    precision: Precision | None = None,
) -> list[Verification]:
    """Asserts that the file computes what the module does, within the budget that `optimize` keeps.

    `args` and `kwargs` are samples, with torch.export's `dynamic_shapes`; without these the dims
    are those that a file of attngraph's says it takes, and it is checked at several sizes. A file
    with its cache needs no samples where the module is a causal language model of transformers, nor
    does the folder of an encoder-decoder.

    Returns what was compared. Raises AssertionError that names the outputs which are off, and the
    first node that diverges; UsageError where inputs and outputs don't fit the module's.
    """
    path, name = Path(path), type(module).__name__
    options = Options(target, precision)
    if path.is_dir() and is_seq2seq(module):
        found = verify_seq2seq(module, name, path, options)
    else:
        path = path / "model.onnx" if path.is_dir() else path
        require_file(path)
        with Session.open(path, options.device) as session:
            if METADATA_KEY in session.metadata and is_causal_lm(module):
                model = Model.of_module(module, source=name)
            else:
                named = dict(kwargs or {})
                if dynamic_shapes is None:
                    dynamic_shapes = _declared(session, module, args, named)
                model = Model(module, None, args, named, dynamic_shapes, name)
            found = [verify_file(model, path, session, options)]
    failed = [each for each in found if not each.passed]
    if failed:
        raise AssertionError(
            " ".join(
                f"{each.path} doesn't compute what {each.source} does: {each.parity}. "
                f"{each.culprit}".strip()
                for each in failed
            )
        )
    return found


def _declared(
    session: Session, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The dims of a file of attngraph's, as dynamic shapes of the samples.

    None where they can't be told: another's file, other inputs, dims that are made of others.
    """
    if RANGES_KEY not in session.metadata:
        return None
    combined = combine(module, args, kwargs)
    leaves, structure = pytree.tree_flatten(dict(combined))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len(tensors) != len(session.input_names):
        return None
    ranges = Ranges.of_file(session.metadata, "the file").dims
    dims: dict[str, Any] = {}
    declared = iter(session.input_names)
    shapes: list[Any] = []
    for leaf in leaves:
        axes: dict[int, Any] = {}
        if isinstance(leaf, torch.Tensor):
            for axis, size in enumerate(session.input_shape(next(declared))):
                if not isinstance(size, str):
                    continue
                if not size.isidentifier():
                    return None
                low, high = ranges.get(size, (1, None))
                axes[axis] = dims.setdefault(size, Dim(size, min=low, max=high))
        shapes.append(axes or None)
    return pytree.tree_unflatten(shapes, structure)
