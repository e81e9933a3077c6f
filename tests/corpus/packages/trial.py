"""One row compiled, checked, and tried again on inputs that the compile never saw."""

from __future__ import annotations

import copy
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from attngraph import optimize
from attngraph.errors import AttngraphError
from tests.corpus.packages.kit import Built, Row, build

Record = dict[str, Any]
_TOLERANCE = 2e-4
"""Of the output's scale, in float32: models here are small, and their own rounding is 1e-6."""


def attempt(row: Row) -> Record:
    record: Record = {"package": row.package, "model": row.name, "outcome": "right"}
    begin = time.perf_counter()
    try:
        built = build(row)
        with torch.no_grad():
            built.module(*built.args, **built.kwargs)
    except Exception as error:
        return {**record, "outcome": "absent", "error": _sentence(error)}
    try:
        optimized = optimize(
            built.module, built.args, kwargs=dict(built.kwargs), dynamic_shapes=built.dynamic_shapes
        )
    except AttngraphError as error:
        record |= {"outcome": "refused", "error": _sentence(error)}
    except Exception as error:
        trace = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(trace.filename).name}:{trace.lineno}"
        record |= {"outcome": "crashed", "error": f"{_sentence(error)} ({at})"}
    else:
        sites = optimized.report.sites
        record["fused"] = sum(site.status == "fused" for site in sites)
        declined = [site for site in sites if site.status == "declined"]
        record["declined"] = dict(Counter(site.code for site in declined))
        off = [_distance(built, optimized, *unseen) for unseen in built.unseen]
        record["unseen"] = off
        bad = [each for each in off if isinstance(each, str) or each > _TOLERANCE]
        if bad:
            told = all(isinstance(each, str) for each in bad)
            record["outcome"] = "fixed" if told else "wrong"
            record["notes"] = [note for note in optimized.report.notes if "stays" in note][:1]
    if record["outcome"] == "refused":
        record["exported"] = exported(built)
    record["seconds"] = round(time.perf_counter() - begin, 1)
    return record


def _distance(built: Built, optimized: Any, args: Any, kwargs: Any) -> float | str:
    """Of the file's outputs from eager's, over the largest; or what was said instead."""
    try:
        expected = _eager(built.module, args, kwargs)
    except Exception:
        return 0.0
    try:
        found = optimized(*args, **kwargs)
    except AttngraphError as error:
        return _sentence(error)
    gap = _gap(found, expected)
    if _TOLERANCE < gap < 1:  # of an ill-conditioned model eager itself is as far from the truth
        try:
            exact = _eager(copy.deepcopy(built.module).double(), *_doubled(args, kwargs))
        except Exception:
            return gap
        own, ours = _gap(expected, exact), _gap(found, exact)
        return _TOLERANCE * ours / (2 * own) if own else gap
    return gap


def _eager(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """The module's own code, which the file follows: torch.nn's fast path is another function."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            return module(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _doubled(args: Any, kwargs: Any) -> Any:
    def double(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if is_float else value

    return pytree.tree_map(double, (args, kwargs))


def _gap(found: Any, expected: Any) -> float:
    """The largest distance of two outputs, over the largest number of the second."""
    worst = 0.0
    for ours, own in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        if isinstance(own, torch.Tensor) and own.is_floating_point() and own.numel():
            if not torch.equal(ours.isnan(), own.isnan()) or ours.shape != own.shape:
                return float("inf")
            largest = own.nan_to_num().abs().max().clamp_min(1e-9)
            worst = max(worst, float((ours - own).nan_to_num().abs().max() / largest))
    return worst


def exported(built: Built) -> str:
    """What torch.onnx.export and onnxruntime make of it: "right", "wrong" or "refused"."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            torch.onnx.export(
                built.module,
                built.args,
                kwargs=dict(built.kwargs),
                f=path,
                dynamo=True,
                dynamic_shapes=built.dynamic_shapes,
                verbose=False,
            )
            session = onnxruntime.InferenceSession(path)
        except Exception:
            return "refused"
        feeds = pytree.tree_leaves((built.args, dict(built.kwargs)))
        tensors = [each for each in feeds if isinstance(each, torch.Tensor)]
        with torch.no_grad():
            own = pytree.tree_leaves(built.module(*built.args, **built.kwargs))
        names = [each.name for each in session.get_inputs()]
        try:
            found = session.run(None, dict(zip(names, (t.numpy() for t in tensors), strict=False)))
        except Exception:
            return "refused"
    outputs = [each for each in own if isinstance(each, torch.Tensor)]
    for ours, eager in zip(found, outputs, strict=False):
        if eager.is_floating_point():
            gap = (torch.from_numpy(ours) - eager).nan_to_num().abs().max()
            if float(gap) > _TOLERANCE * float(eager.nan_to_num().abs().max().clamp_min(1e-9)):
                return "wrong"
    return "right"


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
