"""One written module compiled, run in a plain onnxruntime session, and held against eager.

Nothing here is attngraph's own check: the float64 model is the same source with its float32 made
float64, and the inputs are none that the compiler saw.
"""

from __future__ import annotations

import contextlib
import importlib.util
import linecache
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch.export import Dim

from attngraph import Decoder
from attngraph.compiling.compiler import optimize
from attngraph.errors import AttngraphError, ParityError, UsageError
from attngraph.ir.ranges import Ranges
from attngraph.optimized import Optimized
from tests.fuzz import decoded
from tests.fuzz.decoded import is_consistent
from tests.fuzz.inputs import LIMITS, STYLES, Args, cases, make
from tests.fuzz.oracle import ROUNDINGS, Forward, Oracle, Rounding, doubled, in_float64
from tests.fuzz.relations import broken
from tests.fuzz.stored import differs, taken_apart
from tests.models.kit import peaked

Record = dict[str, Any]
"""Keys: outcome, said (what went wrong), fused, declined (codes and reasons), kernels, seconds."""

FAILURES = {
    "wrong": "the file's numbers are not eager's",
    "parity": "the compiler found its own result out of its budget",
    "taken back": "a rewrite was not equal, or a pass stopped",
    "crashed": "an error that is not attngraph's",
    "refused": "attngraph refuses what torch.onnx.export takes",
    "unrelated": "outputs don't follow a relation that eager's follow",
    "silent": "an attention without a remark",
    "unfused": "a plain attention is declined",
}
OUTCOMES = {
    "fused": "right, every attention fused",
    "declined": "right, declined for what the draw asks for, or a near miss",
    "without attention": "right, and no attention in it",
    "no numbers": "eager gives no finite number on any sample, as the error says",
    "no use": "an option that has no use here, as the error says",
    "refused by both": "neither attngraph nor torch.onnx.export takes it",
    **FAILURES,
    "invalid": "eager itself fails: a defect of the grammar",
}


def attempt(path: Path) -> Record:
    """The trial of a file that `write` made."""
    torch.set_num_threads(1)
    dynamo_config.fake_tensor_cache_enabled = False  # no entry is read again: a fifth of a draw
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = _attempt(path)
    return {**record, "seconds": round(time.perf_counter() - begin, 2)}


def _attempt(path: Path) -> Record:
    try:
        source = _load(path)
        module = _module(source, "Whole" if _decodes(source) else "Model")
        options = getattr(source, "OPTIONS", {})
        oracle = _oracle(path.read_text(), module, _rounding(options))
        sample = _sample(source, oracle)
        if _decodes(source) and not in_float64(lambda: is_consistent(oracle.doubled, source)):
            return {"outcome": "invalid", "said": "the model gives other logits in pieces"}
    except Exception as error:
        return _failed("invalid", error)
    try:
        built = _built(source, sample, **options)
    except ParityError as error:
        seen = make(source.INPUTS, source.SIZES) if _decodes(source) else sample
        return _failed("parity" if _has_numbers(oracle, seen) else "no numbers", error)
    except AttngraphError as error:
        return _failed(_refusal(source, error, sample), error)
    except Exception as error:
        return _failed("crashed", error)
    optimized = built if isinstance(built, Optimized) else built.optimized
    assert optimized is not None
    record = _sites(optimized, source)
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            optimized.save(file)
            told = _as_told(optimized, path, oracle)
            if isinstance(built, Decoder):
                built.save(file)
                found = decoded.tried(file, source, told, built, _floats(source, sample))
            else:
                found = _tried(file, source, told, optimized, sample)
            if "outcome" not in found:
                told_as = partial(_as_told, path=path, oracle=oracle)
                found |= _compiled_again(file, source, told_as, sample)
    except Exception as error:
        return {**record, **_failed("crashed", error)}
    return {**record, **found}


def _decodes(source: Any) -> bool:
    return hasattr(source, "CACHE")


def _built(source: Any, sample: Args, **options: Any) -> Optimized | Decoder:
    """What the compiler that a source is for makes of it."""
    shapes = _dynamic_shapes(source)
    if not _decodes(source):
        return optimize(_module(source), sample, dynamic_shapes=shapes, **options)
    assert shapes is not None
    return decoded.compiled(source, _module(source), sample, shapes, **options)


def _floats(source: Any, sample: Args) -> Callable[[], Optimized | Decoder]:
    """The same without weights in few bits."""
    options = {name: each for name, each in source.OPTIONS.items() if name != "weights"}
    return partial(_built, source, sample, **options)


def _rounding(options: Mapping[str, Any]) -> Rounding:
    kinds = [options.get("precision"), options.get("activations")]
    found = [ROUNDINGS[kind] for kind in kinds if kind in ROUNDINGS]
    return max(found, key=lambda one: one.eps, default=Rounding())


def _sample(source: Any, oracle: Oracle) -> Args:
    """Of the first style that gives finite numbers; for a decoder, all that it takes."""
    if _decodes(source):
        return make(source.TAKEN, source.SIZES, "all")
    found = [make(source.INPUTS, source.SIZES, style) for style in STYLES]
    return next((tensors for tensors in found if _has_numbers(oracle, tensors)), found[0])


def _has_numbers(oracle: Oracle, tensors: Args) -> bool:
    floats = [output for output in oracle(*tensors) if output.is_floating_point()]
    return all(bool(output.isfinite().any()) for output in floats)


def _refusal(source: Any, error: Exception, sample: Args) -> str:
    """What a refusal is: by both compilers, of an option that has no use, or by attngraph alone."""
    chosen = getattr(source, "OPTIONS", {}) or getattr(source, "CACHE", {})
    plain = {"cache": "growing", "max_length": None} if _decodes(source) else {}
    if isinstance(error, UsageError) and chosen:
        with contextlib.suppress(AttngraphError):
            _built(source, sample, **plain)
            return "no use"
    return "refused" if _plain_export(source, sample) else "refused by both"


def _oracle(text: str, module: nn.Module, rounding: Rounding) -> Oracle:
    return Oracle(module, doubled(text, module), rounding)


def _as_told(optimized: Optimized, path: Path, oracle: Oracle) -> Oracle:
    """The oracle, beside one of what the report states: that a fill counts as low as any, or that a
    row's maximum is taken from its exponents.
    """
    said = " ".join(each.what for each in optimized.report.reassociated)
    known = text = path.read_text()
    if "A fill of" in said:
        text = re.sub(r"-1e[49]\b", "-1e30", text)
    if "no exponential overflows" in said:
        shifted = r"e = (scores - scores.amax(\2, keepdim=True)).exp()\1w = e / e.sum(\2,"
        text = re.sub(r"e = scores\.exp\(\)(\s+)w = e / e\.sum\((-?\d),", shifted, text)
    if text == known:
        return oracle
    told = path.with_name(f"{path.stem}-told.py")
    told.write_text(text)
    try:
        module = _module(_load(told), type(oracle.module).__name__)
    finally:
        told.unlink()
    module.load_state_dict(oracle.module.state_dict())
    other = _oracle(text, module, oracle.rounding)
    return Oracle(oracle.module, oracle.doubled, oracle.rounding, other)


def _tried(file: Path, source: Any, oracle: Oracle, optimized: Optimized, sample: Args) -> Record:
    """What is wrong with a file at inputs that its compile never saw, if anything is."""
    free, limits = _free(source, optimized), Ranges.of(optimized.graph)
    run, sides = session_of(file)
    held: list[Forward] = []
    if "weights" in source.OPTIONS and "activations" not in source.OPTIONS:
        floats = file.with_name("floats.onnx")
        _floats(source, sample)().save(floats)
        parts, said = taken_apart(file, floats, oracle.module)
        if said:
            return {"outcome": "wrong", "said": said}
        coded, run, *held = run, *(session_of(part)[0] for part in parts)
    valid = getattr(source, "VALID", None)
    fresh = list(cases(source.INPUTS, source.SIZES, free, lambda sizes: not limits.broken(sizes)))
    if getattr(source, "OVERFLOWS", False):
        fresh = [(label, tensors) for label, tensors in fresh if not label.endswith("large")]
    wrong = [
        said
        for label, tensors in fresh
        if (said := oracle.differs(run, tensors, label, valid and valid(*tensors)))
    ]
    if held:
        wrong += [said for label, given in fresh if (said := differs(coded, held, given, label))]
    found: Record = {"sides": [sum(map(len, sides.values())), 2 * len(sides)]} if sides else {}
    if wrong:
        return {**found, "outcome": "wrong", "said": "; ".join(wrong)}
    if valid is None:
        _, tensors = fresh[0]
        off = broken(run, oracle, source.INPUTS, tensors, free)
        if said := "; ".join(off):
            return {**found, "outcome": "unrelated", "said": said}
    return found


def _compiled_again(
    file: Path, source: Any, told: Callable[[Optimized], Oracle], sample: Args
) -> Record:
    """What is wrong with the file of another compile, which the source asks for, if anything is.

    `told` is the oracle beside what a report states, which of another target may be something else.
    """
    relation = getattr(source, "RELATION", "none")
    if relation == "none":
        return {}
    options, module = dict(source.OPTIONS), _module(source)
    if relation == "cuda":
        options |= {"target": "cuda", "verify": "off"}
        options.pop("activations", None)
    if relation == "renamed":
        module = renamed(module, list(source.INPUTS))
    shapes = _dynamic_shapes(source)
    other = optimize(module, sample, dynamic_shapes=shapes, **options)
    path = file.with_name("again.onnx")
    other.save(path)
    if relation == "twice":
        if path.read_bytes() != file.read_bytes():
            return {"outcome": "unrelated", "said": "a second compile gives other bytes"}
        return {}
    try:
        run, _ = session_of(path)
    except Exception as error:
        if relation == "cuda" and "NOT_IMPLEMENTED" in str(error):
            return {}  # a kernel of CUDA alone
        raise
    wrong, valid = [], getattr(source, "VALID", None)
    for label, tensors in cases(source.INPUTS, source.SIZES, {}):
        if relation == "cuda":
            said = told(other).differs(run, tensors, label, valid and valid(*tensors))
        else:
            both = zip(run(*tensors), session_of(file)[0](*tensors), strict=True)
            same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in both)
            said = "" if same else f"{label}: other bits"
        wrong += [said] if said else []
    if wrong:
        return {"outcome": "unrelated", "said": f"{relation}: {'; '.join(wrong)}"}
    return {}


def renamed(module: nn.Module, names: list[str]) -> nn.Module:
    """The module with inputs of other names, in another order of the alphabet."""
    class_ = type("Renamed", (nn.Module,), {})
    others = [f"n{99 - i}_{name[::-1]}" for i, name in enumerate(names)]
    listed = ", ".join(others)
    known: dict[str, Any] = {}
    exec(f"def forward(self, {listed}):\n    return self.inner({listed})", known)
    class_.forward = known["forward"]  # type: ignore[attr-defined]
    found = class_()
    found.inner = module
    made: nn.Module = found.eval()
    return made


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


def _module(source: Any, name: str = "Model") -> nn.Module:
    return peaked(getattr(source, name)()).requires_grad_(False)


def _dynamic_shapes(source: Any) -> tuple[dict[int, Dim], ...] | None:
    names = source.DYNAMIC.split()
    low, high = getattr(source, "RANGE", (None, None))
    dims = {}
    for name in names:
        least, most = (None, LIMITS[name]) if name == "b" else (low, high or LIMITS[name])
        dims[name] = Dim(name, min=least, max=most)
    taken = getattr(source, "TAKEN", source.INPUTS)
    shapes = [text.partition(":")[0].split() for text in taken.values()]
    return (
        tuple(
            {axis: dims[name] for axis, name in enumerate(shape) if name in dims}
            for shape in shapes
        )
        if names
        else None
    )


def _free(source: Any, optimized: Optimized) -> dict[str, tuple[int, int]]:
    """The sizes between which the compiled model takes each of the dims that are dynamic."""
    known = optimized.graph.dims
    return {
        name: (max(known[name].low, 1), min(known[name].high or LIMITS[name], LIMITS[name]))
        for name in source.DYNAMIC.split()
        if name in known
    }


def _plain_export(source: Any, args: Args) -> bool:
    module, shapes = _module(source), _dynamic_shapes(source)
    if shapes is not None and _decodes(source):
        args, shapes = source.ARGS(*args), source.ARGS(*shapes)
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
    left = [n for n in optimized.graph if "softmax" in n.op and not _is_other(n.loc)]
    named = {site.location for site in report.sites}
    silent = [n for n in left if f"{n.loc.file}:{n.loc.line}" not in named]
    if back:
        return {**record, "outcome": "taken back", "said": "; ".join(back)}
    if silent or not (report.sites or source.EXPLAINED is None):
        return {**record, "outcome": "silent", "said": "; ".join(map(repr, silent))}
    if not report.sites:
        return {**record, "outcome": "without attention"}
    unexplained = [site.code for site in declined if site.code not in (source.EXPLAINED or ())]
    as_exact = any(note.startswith("Compiled as with --exact") for note in report.notes)
    if unexplained and not source.NEAR_MISS and not as_exact:
        return {**record, "outcome": "unfused", "said": "; ".join(sorted({*unexplained}))}
    return {**record, "outcome": "declined"} if declined else record


def _is_other(where: Any) -> bool:
    """Whether a softmax's line says that it is in no attention."""
    lines = linecache.getlines(where.file)
    return where.line <= len(lines) and "# no attention" in lines[where.line - 1]


def session_of(file: Path) -> tuple[Forward, dict[str, set[bool]]]:
    """A file's run, and the values that the conditions of its branches had in all runs."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    model = onnx.load(file)
    asked = list(dict.fromkeys(n.input[0] for n in model.graph.node if n.op_type == "If"))
    own = {value.name for value in model.graph.output}
    for name in asked:
        if name not in own:
            model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    content = model.SerializeToString() if asked else file
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    sides: dict[str, set[bool]] = {name: set() for name in asked}

    def run(*tensors: Tensor) -> list[Tensor]:
        feed = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        arrays = session.run(None, feed)
        for name, side in zip(asked, arrays[len(own) :], strict=True):
            sides[name].add(bool(side))
        return [torch.from_numpy(array) for array in arrays[: len(own)]]

    return run, sides


def of_record(record: Mapping[str, Any]) -> bool:
    """Whether a record is of a failure."""
    return record["outcome"] in FAILURES or record["outcome"] == "invalid"
