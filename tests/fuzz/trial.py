"""One written module compiled, run in a plain onnxruntime session, and held against eager.

Nothing here is attngraph's own check: the float64 model is the same source with its float32 made
float64, and the inputs are none that the compiler saw.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph.compiling.compiler import optimize
from attngraph.errors import AttngraphError, ParityError
from attngraph.optimized import Optimized
from tests.fuzz.inputs import LIMITS, cases, make
from tests.models.kit import peaked

Record = dict[str, Any]
"""Keys: outcome, said (what went wrong), fused, declined (codes and reasons), kernels, seconds."""

FAILURES = {
    "wrong": "the file's numbers are not eager's",
    "parity": "the compiler found its own result out of its budget",
    "taken back": "a rewrite was not equal, or a pass stopped",
    "crashed": "an error that is not attngraph's",
    "refused": "attngraph refuses what torch.onnx.export takes",
    "silent": "an attention without a remark",
    "unfused": "a plain attention is declined",
}
OUTCOMES = {
    "fused": "right, every attention fused",
    "declined": "right, declined for what the draw asks for, or a near miss",
    "refused by both": "neither attngraph nor torch.onnx.export takes it",
    **FAILURES,
    "invalid": "eager itself fails: a defect of the grammar",
}

_FACTOR, _FLOOR, _RUNS = 4.0, 16.0, 8
_EPS = torch.finfo(torch.float32).eps
_SOUND = 2.0**13 * _EPS  # what rounding explains; a finite fill is another function in float64

Forward = Callable[..., Sequence[Tensor]]


def attempt(path: Path) -> Record:
    """The trial of a file that `write` made."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = _attempt(path)
    return {**record, "seconds": round(time.perf_counter() - begin, 2)}


def _attempt(path: Path) -> Record:
    source = _load(path)
    try:
        module = _module(source)
        sample = make(source.INPUTS, source.SIZES)
        expected = _Eager(module, _doubled(path.read_text(), module))
        expected(sample)
    except Exception as error:
        return _failed("invalid", error)
    shapes = _dynamic_shapes(source)
    try:
        optimized = optimize(_module(source), sample, dynamic_shapes=shapes)
    except ParityError as error:
        return _failed("parity", error)
    except AttngraphError as error:
        taken = _plain_export(_module(source), sample, shapes)
        return _failed("refused" if taken else "refused by both", error)
    except Exception as error:
        return _failed("crashed", error)
    record = _sites(optimized, source)
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            optimized.save(file)
            run = _session(file)
            fresh = cases(source.INPUTS, source.SIZES, _free(source, optimized))
            wrong = [
                said for label, tensors in fresh if (said := expected.differs(run, tensors, label))
            ]
    except Exception as error:
        return {**record, **_failed("crashed", error)}
    if wrong:
        return {**record, "outcome": "wrong", "said": "; ".join(wrong)}
    return record


def _failed(outcome: str, error: Exception) -> Record:
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return {"outcome": outcome, "said": said[:600]}


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"drawn_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module(source: Any) -> nn.Module:
    return peaked(source.Model()).requires_grad_(False)


def _doubled(text: str, module: nn.Module) -> nn.Module:
    """The same module in float64, with the float32 module's parameters and buffers."""
    source: Any = ModuleType("doubled")
    exec(
        re.sub(r"\.float\(\)", ".double()", text.replace("torch.float32", "torch.float64")),
        source.__dict__,
    )
    torch.set_default_dtype(torch.float64)
    try:
        doubled: nn.Module = source.Model().double().eval()
    finally:
        torch.set_default_dtype(torch.float32)
    doubled.load_state_dict(module.state_dict())
    return doubled.requires_grad_(False)


def _dynamic_shapes(source: Any) -> tuple[dict[int, Dim], ...] | None:
    names = source.DYNAMIC.split()
    dims = {name: Dim(name, max=LIMITS[name]) for name in names}
    shapes = [text.partition(":")[0].split() for text in source.INPUTS.values()]
    return (
        tuple(
            {axis: dims[name] for axis, name in enumerate(shape) if name in dims}
            for shape in shapes
        )
        if names
        else None
    )


def _free(source: Any, optimized: Optimized) -> str:
    """The dims that the compiled model takes at any size within the limits."""
    known = optimized.graph.dims
    return " ".join(n for n in source.DYNAMIC.split() if n in known and known[n].low <= 2)


def _plain_export(
    module: nn.Module, args: tuple[Tensor, ...], shapes: tuple[dict[int, Dim], ...] | None
) -> bool:
    try:
        program = torch.export.export(module, args, dynamic_shapes=shapes)
        torch.onnx.export(program, args, dynamo=True, verbose=False)
    except Exception:
        return False
    return True


def _sites(optimized: Optimized, source: Any) -> Record:
    report = optimized.report
    declined = [site for site in report.sites if site.status == "declined"]
    record: Record = {
        "outcome": "fused",
        "fused": report.fused,
        "declined": {site.code: site.reason for site in declined},
        "kernels": sorted({site.kernel.form.name for site in report.sites if site.kernel}),
    }
    back = [r.reason for result in report.passes for r in result.remarks if r.code == "unequal"]
    left = [n for n in optimized.graph if "softmax" in n.op]
    named = {site.location for site in report.sites}
    silent = [n for n in left if f"{n.loc.file}:{n.loc.line}" not in named]
    unexplained = [site.code for site in declined if site.code not in source.EXPLAINED]
    if back:
        return {**record, "outcome": "taken back", "said": "; ".join(back)}
    if silent or not report.sites:
        return {**record, "outcome": "silent", "said": "; ".join(map(repr, silent))}
    if unexplained and not source.NEAR_MISS:
        return {**record, "outcome": "unfused", "said": "; ".join(sorted({*unexplained}))}
    return {**record, "outcome": "declined"} if declined else record


def _session(file: Path) -> Forward:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def run(*tensors: Tensor) -> list[Tensor]:
        feed = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, feed)]

    return run


class _Eager:
    """Eager's outputs, and how far from float64 rounding takes them."""

    def __init__(self, module: nn.Module, doubled: nn.Module) -> None:
        self.module, self.doubled = module, doubled

    def __call__(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        return _flat(self.module(*tensors))

    def differs(self, run: Forward, tensors: tuple[Tensor, ...], label: str) -> str:
        """What is wrong with a run's outputs on these inputs, or nothing."""
        eager = self(tensors)
        torch.set_default_dtype(torch.float64)
        try:
            wide = [t.double() if t.is_floating_point() else t for t in tensors]
            exact = _flat(self.doubled(*wide))
        finally:
            torch.set_default_dtype(torch.float32)
        found = run(*tensors)
        if [t.shape for t in found] != [t.shape for t in eager]:
            return f"{label}: shapes {[tuple(t.shape) for t in found]}"
        noise = [[e] for e in eager]
        if any(_over(f, *both) for f, *both in zip(found, exact, noise, strict=True)):
            others = [self._nudged(tensors, seed) for seed in range(_RUNS)]
            noise = [[e, *more] for e, *more in zip(eager, *others, strict=True)]
        off = [_over(f, *both) for f, *both in zip(found, exact, noise, strict=True)]
        return "; ".join(f"{label}: output {i} {said}" for i, said in enumerate(off) if said)

    def _nudged(self, tensors: tuple[Tensor, ...], seed: int) -> list[Tensor]:
        """Outputs of weights and inputs that are off by one rounding."""
        random = torch.Generator().manual_seed(seed)

        def nudge(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            sign = torch.randint(0, 2, tensor.shape, generator=random) * 2 - 1
            whole = (tensor == tensor.round()) | ~tensor.isfinite()
            return torch.where(whole, tensor, tensor * (1 + sign * _EPS / 2))

        weights = {name: nudge(value) for name, value in self.module.named_parameters()}
        moved = tuple(map(nudge, tensors))
        return _flat(torch.func.functional_call(self.module, weights, moved))


def _flat(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def _over(found: Tensor, exact: Tensor, runs: Sequence[Tensor]) -> str:
    """How a result is further from float64, or where that is another function from eager, than
    rounding takes eager's runs. NaN stands where one of them has it.
    """
    eager = runs[0].double()
    scale = float(exact[exact.isfinite()].abs().max()) if bool(exact.isfinite().any()) else 0.0
    off = [(run.double() - exact).abs() for run in runs]
    sound = off[0] <= _SOUND * scale
    measured = max(
        (float(o[(o <= _SOUND * scale)].max()) for o in off if bool((o <= _SOUND * scale).any())),
        default=0.0,
    )
    limit = _FACTOR * max(measured, _FLOOR * _EPS * scale)
    target = torch.where(sound, exact, eager)
    spread = torch.stack([(run.double() - eager).abs().nan_to_num(0.0) for run in runs]).amax(0)
    allowed = torch.where(sound, limit, limit + _FACTOR * spread)
    wide = found.double()
    right = ((wide - target).abs() <= allowed) | (wide == target)
    right |= wide.isnan() & (eager.isnan() | exact.isnan())
    if bool(right.all()):
        return ""
    worst = (wide - target).abs().nan_to_num(torch.inf).where(~right, 0.0)
    return (
        f"{int((~right).sum())} of {right.numel()} elements are off by up to "
        f"{float(worst.max()):.2g}, where {limit:.2g} is rounding"
    )


def of_record(record: Mapping[str, Any]) -> bool:
    """Whether a record is of a failure."""
    return record["outcome"] in FAILURES or record["outcome"] == "invalid"
