"""One row compiled, checked, and tried again on inputs that the compile never saw."""

from __future__ import annotations

import copy
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from attngraph import optimize
from attngraph.checks.chosen import OTHERS
from attngraph.errors import AttngraphError
from tests.corpus.packages.kit import Built, build, find, first_of_equals

Record = dict[str, Any]
"""Keys: outcome, error, unseen, notes, fused, declined, seconds.

`outcome` is "right", "fixed" (right at the sample's sizes, and an error at others), "tied" (eager's
where that takes the first of equal scores in a top-k, which the compile's own note tells of),
"wrong" (at inputs that it takes), "refused" (an error of the compiler that names a cause),
"crashed" (any other exception), or "absent" (the row's own code fails). `unseen` is the largest
distance from eager.
"""

_TOLERANCE = 2e-4
"""Of the output's scale, in float32: models here are small, and their own rounding is 1e-6."""


def attempt(label: str) -> Record:
    """The record of a row ("package model"). Raises nothing that the model is to blame for."""
    begin = time.perf_counter()
    try:
        built = _made(label)
    except Exception as error:
        return {"outcome": "absent", "error": _sentence(error)}
    try:
        optimized = optimize(
            built.module, built.args, kwargs=dict(built.kwargs), dynamic_shapes=built.dynamic_shapes
        )
        record = _tried(built, optimized, AttngraphError)
    except AttngraphError as error:
        record = {"outcome": "refused", "error": _sentence(error)}
    except Exception as error:
        trace = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(trace.filename).name}:{trace.lineno}"
        record = {"outcome": "crashed", "error": f"{_sentence(error)} ({at})"}
    else:
        sites = optimized.report.sites
        declined = [site.code for site in sites if site.status == "declined"]
        record["fused"] = sum(site.status == "fused" for site in sites)
        record["declined"] = dict(Counter(declined))
        told = [note for note in optimized.report.notes if OTHERS in note]
        if record["outcome"] == "wrong" and told:
            first_of_equals()
            if _tried(built, optimized, AttngraphError)["outcome"] == "right":
                record |= {"outcome": "tied", "notes": told}
        if record["outcome"] == "fixed":
            notes = [note for note in optimized.report.notes if " stays " in note]
            record["notes"] = [_plain(note) for note in notes]
    return {**record, "seconds": round(time.perf_counter() - begin, 1)}


def exported(label: str) -> Record:
    """The same of torch.onnx.export and onnxruntime; nothing where the row's own code fails."""
    begin = time.perf_counter()
    try:
        built = _made(label)
    except Exception:
        return {}
    try:
        program = torch.onnx.export(
            built.module,
            built.args,
            kwargs=dict(built.kwargs),
            dynamo=True,
            dynamic_shapes=built.dynamic_shapes,
            verbose=False,
        )
        assert program is not None
        program(*built.args, **built.kwargs)
        record = _tried(built, program, Exception)
    except Exception as error:
        record = {"outcome": "refused", "error": _sentence(error)}
    return {**record, "seconds": round(time.perf_counter() - begin, 1)}


def _made(label: str) -> Built:
    """The row's model, called once before it is compiled, as a user's has been."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _stand_in()
    built = build(find(label))
    args, kwargs = pytree.tree_map(lambda leaf: leaf, (built.args, dict(built.kwargs)))
    with torch.no_grad():
        built.module(*args, **kwargs)  # which may write into its containers
    return built


def _stand_in() -> None:
    """torchvision's compiled operators don't load beside a torch of another build: without them."""
    register: Any = torch.library.register_fake

    def registered(name: Any, *args: Any, **kwargs: Any) -> Any:
        if str(name).startswith("torchvision::"):
            return lambda function: function
        return register(name, *args, **kwargs)

    setattr(torch.library, "register_fake", registered)  # noqa: B010


def _tried(built: Built, compiled: Callable[..., Any], error: type[Exception]) -> Record:
    """What comes of it on the unseen inputs; `error` is what it may say of those it can't take."""
    gaps, said = [0.0], []
    for args, kwargs in built.unseen:
        try:
            expected = _eager(built.module, args, kwargs)
        except Exception:
            continue  # the model's own limit
        try:
            found = compiled(*args, **kwargs)
        except error as refusal:
            said.append(_sentence(refusal))
        else:
            gaps.append(_distance(built, found, expected, args, kwargs))
    record: Record = {"outcome": "right", "unseen": float(f"{max(gaps):.1e}")}
    if said:
        record |= {"outcome": "fixed", "error": said[0]}
    if max(gaps) > _TOLERANCE:
        record["outcome"] = "wrong"
    return record


def _distance(built: Built, found: Any, expected: Any, args: Any, kwargs: Any) -> float:
    """Of the file's outputs from eager's, over the largest."""
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
            args, kwargs = pytree.tree_map(lambda leaf: leaf, (args, dict(kwargs)))
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
    tensors = [
        [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        for outputs in (found, expected)
    ]
    for ours, own in zip(*tensors, strict=True):
        if ours.shape != own.shape:
            return float("inf")
        if not own.is_floating_point():
            worst = max(worst, float(not torch.equal(ours, own)))
        elif own.numel():
            if not torch.equal(ours.isnan(), own.isnan()):
                return float("inf")
            largest = own.nan_to_num().abs().max().clamp_min(1e-9)
            worst = max(worst, float((ours - own).nan_to_num().abs().max() / largest))
    return worst


def _sentence(error: BaseException) -> str:
    return _plain(f"{type(error).__name__}: {error}")[:500]


def _plain(text: str) -> str:
    """One line, with the paths from their package on: where it is installed says nothing."""
    folders = {folder for path in sys.path if path for folder in (path, os.path.relpath(path))}
    for folder in sorted(folders - {"."}, key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    return " ".join(text.split())
