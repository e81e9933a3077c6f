"""One engine's process: `python -m attngraph.measuring.worker WHAT FOLDER [ENGINE] [SECONDS]`.

WHAT is `reference` (the outputs that all are held against), `prepare` (an engine's ONNX file) or
`serve` (its calls, once its outputs are within the error budget). Answers are lines of JSON:
`{"failed": reason}`, `{"skipped": reason}` or what was found.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attngraph.errors import AttngraphError, ParityError
from attngraph.export.parity.budget import compare
from attngraph.export.parity.reference import Reference, ReferenceOutputs
from attngraph.measuring.engines import BY_NAME, open_engine
from attngraph.measuring.exporters import NotFor
from attngraph.measuring.job import Job
from attngraph.measuring.turns import own_stdout, serve, timed

REFERENCE = "reference.pt"
_WARM_UP = 3
Outputs = tuple[torch.Tensor, ...]


def reference(folder: Path) -> dict[str, Any]:
    """Saves the eager outputs and those in float64, on the CPU."""
    job = Job.read(folder)
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    model = job.ready()
    assert model.module is not None
    found = Reference(model.module, precision=job.precision)(model.args, model.kwargs)
    saved = {
        "names": list(found.names),
        "eager": [tensor.detach().cpu() for tensor in found.eager],
        "exact": [None if t is None else t.detach().cpu() for t in found.exact],
        "note": found.note,
    }
    torch.save(saved, folder / REFERENCE)
    inputs = job.keep_inputs(folder)
    return {"inputs": [list(tensor.shape) for tensor in inputs], "threads": torch.get_num_threads()}


def prepare(folder: Path, name: str) -> dict[str, Any]:
    """Writes the engine's ONNX file; says how much CPU time and memory that took."""
    engine, job = BY_NAME[name], Job.read(folder)
    assert engine.export is not None
    start = time.process_time()
    base = BY_NAME[engine.base].file(folder) if engine.base else engine.file(folder)
    engine.export(job, base, engine.file(folder))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"prepare_cpu_s": time.process_time() - start, "prepare_peak_bytes": peak}


def engine_calls(
    folder: Path, name: str, seconds: float
) -> tuple[Callable[[], float], dict[str, Any]]:
    """A block of calls, and the parity of the last of the calls that warm up.

    Raises ParityError where that is out of budget.
    """
    job = Job.read(folder)
    call, outputs, note = open_engine(BY_NAME[name], job, folder)
    for _ in range(_WARM_UP):
        result = call()
    saved = torch.load(folder / REFERENCE, weights_only=True)
    expected = ReferenceOutputs(
        tuple(saved["names"]), tuple(saved["eager"]), tuple(saved["exact"]), saved["note"]
    )
    found = expected.in_its_dtypes(outputs(result))
    if "packed" in name and job.padding is not None:
        expected, found = _valid(expected, found, job.inputs(folder)[job.padding].bool())
    if BY_NAME[name].quantized:
        return (lambda: timed(call, seconds)), {"error": _error(expected, found), "note": note}
    parity = compare(expected, found, job.precision)
    if not parity.passed:
        raise ParityError(f"{parity}.")
    figures = parity.to_dict()
    del figures["outputs"]
    return (lambda: timed(call, seconds)), {"parity": figures, "note": note}


def _error(expected: ReferenceOutputs, found: Outputs) -> float:
    """The largest error of an output, as the rms of its difference over its own."""
    errors = []
    for eager, exact, output in zip(expected.eager, expected.exact, found, strict=True):
        target = (eager if exact is None else exact).double()
        if output.shape != target.shape:
            raise ParityError(f"An output is {tuple(output.shape)}, not {tuple(target.shape)}.")
        if eager.is_floating_point():
            errors.append(float((output.cpu().double() - target).norm() / target.norm()))
    return max(errors, default=0.0)


def _valid(
    expected: ReferenceOutputs, found: Outputs, mask: torch.Tensor
) -> tuple[ReferenceOutputs, Outputs]:
    """Both without the padded rows; mask is (B, S), true where there is a token."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()[mask] if tensor.shape[:2] == mask.shape else tensor

    exact = tuple(None if tensor is None else cut(tensor) for tensor in expected.exact)
    eager = tuple(cut(tensor) for tensor in expected.eager)
    return replace(expected, eager=eager, exact=exact), tuple(cut(tensor) for tensor in found)


def answer(what: str, folder: Path, *more: str) -> tuple[dict[str, Any], Callable[[], Any] | None]:
    """The answer, with the reason where the work failed; and the block to `serve`."""
    block: Callable[[], Any] | None = None
    try:
        if what == "reference":
            said = reference(folder)
        elif what == "prepare":
            said = prepare(folder, more[0])
        else:
            block, said = engine_calls(folder, more[0], float(more[1]))
    except NotFor as reason:
        said = {"skipped": str(reason)}
    except ParityError as error:
        said = {"out of parity": str(error)}
    except Exception as error:
        kind = "" if isinstance(error, AttngraphError) else f"{type(error).__name__}: "
        said = {"failed": f"{kind}{' '.join(str(error).split())}"}
    return said, block


def main(arguments: list[str]) -> None:
    answers = own_stdout()
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    what, folder, *more = arguments
    said, block = answer(what, Path(folder), *more)
    if block is None:
        print(json.dumps(said), file=answers, flush=True)
    else:
        serve(block, answers, said)


if __name__ == "__main__":
    main(sys.argv[1:])
