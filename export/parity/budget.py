"""The error budget: is an output as close to the exact result as the eager module itself is?

With y the eager module in float64, e_ref = ‖eager − y‖ and e = ‖candidate − y‖, an output passes if
e ≤ k · max(e_ref, floor): k = 4 in fp32, 2 in fp16 and bf16, where the rounding of the stored
output, equal for both, is most of the error.

**Norm.** Both the largest element and the root mean square, each against its own e_ref. The largest
element finds one wrong value among a million, which the mean hides. The mean finds a drift of all
values, which hides under the largest element: rounding's largest is 4 to 5 times its mean. The
figures published are those of the norm that is nearer to its budget, divided by that norm of y,
so that they are relative errors on the output's scale and compare across outputs.

**Floor.** e_ref is a sample of the rounding noise and can be small by accident. It is never taken
below one unit in the last place on the output's scale, eps · ‖y‖, which any reordering of the last
operation may cost. With n elements, e / e_ref of two equally good engines stays within k at 99.9 %
(the quantile of √F(n, n)) from n = 8 for k = 4 and n = 24 for k = 2, if the elements were
independent; below FEW = 32 elements the sample can't be trusted and the floor is the relative noise
of the run's larger outputs. Where there is none it is 16 eps in fp32 and 4 eps in halves: measured
e_ref of 2 to 12 layers of BERT, GPT-2 and Llama is 3 to 24 eps and 0.7 to 7 eps.

**Ill-conditioned outputs.** Where a few directions of a model amplify all rounding, that one
sample may be far too small. Before an output fails, eager is run again, 8 times, with each weight
and input off by one rounding, and e_ref is the largest of their errors. Each of them is as good a
run as eager's, so what they show is the model's own noise and nothing that a candidate did. Rows in
which such a run is past what rounding explains (below) took another branch, and widen nothing.

**Sums.** A kernel may add the terms of a row, or of a product, one after another, by which a norm
of one row of 768, or a mean over 1024 keys, is off by more than all of eager's runs show. Where an
output still fails, what that makes of it counts as well (export/parity/summation.py), if it is
proportional, as rounding is.

**Saturated outputs.** A kernel's sigmoid is accurate to eps of its range, 1, and torch's to eps of
each value. Where an output fails even so, what the former makes of it counts in the same way
(export/parity/saturation.py), also what a recurrence adds up of an error that is alike in each
step; a compile writes such functions in exponentials first, where it can
(export/precision/gates.py).

**Where float64 is another function.** A finite fill such as −1e9 absorbs a score in float32 and
not in float64, so a fully masked row is uniform in one and not in the other; e_ref would be huge
there and admit anything. Rows (last axis) where eager is off by more than 2¹³ eps, at most a
quarter, of the output's scale are past what rounding explains. They, and outputs without a finite
float64 form, are compared with eager: ‖candidate − eager‖ ≤ (k + 1) · max(e_ref, floor), by the
triangle inequality, with e_ref of the sound rows.

**Where a half dtype is another function.** The same fill overflows float16, or absorbs less in it.
Where a module in float32 is run in a half, rows past what rounding explains there, of which float32
agrees with float64, are compared with whichever of float64 and eager is nearer: a conversion that
leaves a mask in float32 is no error, nor is one that does as eager would.

**Outliers.** One −1e9 among logits would set a scale, and by its rounding an e_ref, under which all
others could be wrong. Elements over 256 times the median magnitude are held apart, on their own
scale. NaN, infinities and finfo.min must stand where eager (or float64) has them; they are not
counted as compared, and an output that has nothing else in any case was not checked. Integers and
bools are compared exactly.

**Zeros.** Where most elements are zero but for rounding (export/parity/cancellation.py), they are
held apart as well, and their scale is that of the terms which cancelled, as eager's rounding shows
it: e_ref over eps. So their budget is k · e_ref, and no other element's is touched.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from attngraph.errors import ParityError
from attngraph.export.formats import Precision
from attngraph.export.parity.reference import ReferenceOutputs
from attngraph.export.parity.samples import (
    FEW,
    GROUPS,
    NORMS,
    Norm,
    Sample,
    eps,
    extreme,
    misplaced,
    noise_of,
    norm_of,
)

COARSE = 6.0
"""How many times eager's usual rounding is told."""
FACTOR: dict[Precision, float] = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0}


@dataclass(frozen=True)
class OutputParity:
    """One output's figures. Errors are relative to the output's scale in `norm`; for integers and
    bools (`reference` "exact") `error` is the share of elements that differ. A file made of others
    is held against "parts", themselves held against eager. `compared` counts the elements whose
    values were compared: a NaN or an infinity stands where it should or doesn't, and says nothing
    of the numbers.
    """

    name: str
    shape: tuple[int, ...]
    error: float
    reference_error: float
    budget: float
    passed: bool
    reference: Literal["float64", "eager", "exact", "parts"] = "float64"
    norm: Literal["max", "rms", "mismatch"] = "max"
    note: str = ""
    case: str = ""
    compared: int = 0

    @property
    def figures(self) -> dict[str, float]:
        """Those that say something: of what is compared exactly the budget is 0, and a file made
        of others has no error of eager's own beside its.
        """
        found = {"error": self.error}
        if self.reference in ("float64", "eager"):
            found["eager's own"] = self.reference_error
        return found if self.reference == "exact" else {**found, "budget": self.budget}

    @property
    def ratio(self) -> float:
        """Error over budget: 1 is the limit. A failure for another reason is infinitely over."""
        if self.budget > 0 and math.isfinite(self.error):
            ratio = self.error / self.budget
        else:
            ratio = math.inf if self.error > 0 else 0.0
        return ratio if self.passed else max(ratio, math.nextafter(1.0, 2.0))


@dataclass(frozen=True)
class Parity:
    """All outputs of one input, or after `merge` of several. The figures are the worst output's.

    `saturated` if it counts what a kernel's bounded functions are off.
    """

    outputs: tuple[OutputParity, ...]
    precision: Precision
    saturated: bool = False

    @property
    def worst(self) -> OutputParity:
        return max(self.outputs, key=lambda output: output.ratio)

    @property
    def passed(self) -> bool:
        return all(output.passed for output in self.outputs)

    @property
    def error(self) -> float:
        return self.worst.error

    @property
    def reference_error(self) -> float:
        return self.worst.reference_error

    @property
    def budget(self) -> float:
        return self.worst.budget

    @property
    def reference(self) -> Literal["float64", "eager", "parts"]:
        """What the candidate was held against; "eager" if any output had no float64 form."""
        held = {output.reference for output in self.outputs}
        return "parts" if "parts" in held else "eager" if "eager" in held else "float64"

    @property
    def uncompared(self) -> tuple[str, ...]:
        """The outputs that have elements, of which none was compared in any case."""
        sizes: dict[str, int] = {}
        compared: dict[str, int] = {}
        for output in self.outputs:
            sizes[output.name] = sizes.get(output.name, 0) + math.prod(output.shape)
            compared[output.name] = compared.get(output.name, 0) + output.compared
        return tuple(name for name, size in sizes.items() if size and not compared[name])

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(output.note for output in self.outputs if output.note))

    @property
    def rounded_in_eager(self) -> list[str]:
        """A note on each output that a half dtype rounds far more in one case than in most: a score
        that -1e4 is added to in bf16 has no digits left where all of a row is hidden so.
        """
        found = []
        for name in () if self.precision == "fp32" else dict.fromkeys(o.name for o in self.outputs):
            own = [output for output in self.outputs if output.name == name]
            worst = max(own, key=lambda output: output.reference_error)
            usual = statistics.median(output.reference_error for output in own)
            if worst.reference_error > max(COARSE * usual, 2 * eps(self.precision)):
                found.append(
                    f"Eager PyTorch in {self.precision} is itself {worst.reference_error:.1g} off "
                    f"float64 in {name} at {worst.case}, and {usual:.1g} elsewhere. The file is "
                    "held to float64, and may differ from eager there."
                )
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; an infinite error, which JSON has no number for, is None."""
        head = {
            "passed": self.passed,
            "error": self.error,
            "reference_error": self.reference_error,
            "budget": self.budget,
            "precision": self.precision,
            "reference": self.reference,
        }
        outputs = [_finite(dataclasses.asdict(output)) for output in self.outputs]
        return {**_finite(head), "outputs": outputs}

    def __str__(self) -> str:
        worst = self.worst
        name = f"{worst.name} at {worst.case}" if worst.case else worst.name
        figures = ", ".join(f"{what} {figure:.2e}" for what, figure in worst.figures.items())
        against = "its parts" if worst.reference == "parts" else worst.reference
        text = (
            f"parity {'passed' if self.passed else 'FAILED'} ({self.precision}): worst output "
            f"{name}: {figures} ({worst.norm}, against {against})"
        )
        return f"{text}; {worst.note}" if worst.note else text


def compare(
    reference: ReferenceOutputs,
    candidate: Sequence[torch.Tensor],
    precision: Precision,
) -> Parity:
    """Hold a candidate's outputs, in the reference's order, against the error budget.

    Logits need none of their own: an error of at most b moves no top-1 that leads by more than 2b,
    and the KL divergence of their softmax is at most b² / 2 (Hoeffding's lemma).

    Raises ParityError if the number of outputs differs.
    """
    if len(candidate) != len(reference.names):
        raise ParityError(
            f"The candidate returns {len(candidate)} outputs and the module "
            f"{len(reference.names)} ({', '.join(reference.names)})."
        )
    found = _against(reference, candidate, precision)
    if found.passed:
        return found
    runs = reference.sample()
    found = _against(reference, candidate, precision, runs)
    if found.passed:
        return found
    sums = reference.sums()
    found = _against(reference, candidate, precision, runs, sums)
    if found.passed:
        return found
    found = _against(reference, candidate, precision, runs, (*sums, *reference.gates()))
    return dataclasses.replace(found, saturated=True)


def _against(
    reference: ReferenceOutputs,
    candidate: Sequence[torch.Tensor],
    precision: Precision,
    runs: Sequence[Sequence[torch.Tensor]] = (),
    nudged: Sequence[Sequence[Sequence[torch.Tensor]]] = (),
) -> Parity:
    """`runs` are eager's further ones, a tensor per output in each; `nudged` are pairs of such."""
    samples = [
        Sample.of(
            eager,
            exact,
            precision,
            [run[place] for run in runs],
            reference.single[place] if reference.single else None,
            [[run[place] for run in pair] for pair in nudged],
        )
        for place, (eager, exact) in enumerate(zip(reference.eager, reference.exact, strict=True))
    ]
    noise = {norm: noise_of(samples, norm, precision) for norm in NORMS}
    results = []
    for name, sample, tensor in zip(reference.names, samples, candidate, strict=True):
        result = _compare(name, sample, tensor.detach().cpu(), precision, noise)
        if result.reference == "eager" and reference.note:
            result = dataclasses.replace(result, note=_join(result.note, reference.note))
        results.append(result)
    return Parity(tuple(results), precision)


def merge(cases: Mapping[str, Parity]) -> Parity:
    """One parity of several, by label such as "batch=1, seq=5"; each output keeps its label,
    and the one it has where that is empty.
    """
    outputs = [
        dataclasses.replace(output, case=label or output.case)
        for label, parity in cases.items()
        for output in parity.outputs
    ]
    if not outputs:
        raise ParityError("There is no case to merge: nothing was compared.")
    precision = next(iter(cases.values())).precision
    return Parity(tuple(outputs), precision, any(each.saturated for each in cases.values()))


def _compare(
    name: str,
    sample: Sample,
    candidate: torch.Tensor,
    precision: Precision,
    noise: Mapping[Norm, float],
) -> OutputParity:
    eager = sample.eager
    shape = tuple(eager.shape)
    if tuple(candidate.shape) != shape or candidate.dtype is not eager.dtype:
        note = (
            f"is {candidate.dtype} {tuple(candidate.shape)} where the module returns "
            f"{eager.dtype} {shape}"
        )
        return OutputParity(name, shape, math.inf, 0.0, 0.0, passed=False, note=note)
    if not eager.is_floating_point():
        different = float((candidate != eager).double().mean()) if eager.numel() else 0.0
        return OutputParity(
            name,
            shape,
            different,
            0.0,
            0.0,
            different == 0.0,
            "exact",
            "mismatch",
            compared=eager.numel(),
        )
    reference: Literal["float64", "eager"] = "float64"
    note = ""
    if not bool(sample.sound.any()) and eager.numel():
        reference = "eager"
    elif not bool(sample.sound.all()):
        count = int((~sample.sound).sum())
        note = f"{count} of {eager.numel()} elements compared with eager: no sound float64 there"
    wide = candidate.double()
    astray = int(misplaced(wide, sample).sum())
    if astray:
        note = _join(f"{astray} elements break the pattern of NaN, infinity and fills", note)
        return OutputParity(name, shape, math.inf, 0.0, 0.0, False, reference, "max", note)
    difference = sample.off(wide)
    results = []
    for kind, norm in itertools.product(GROUPS, NORMS):
        group = sample.group(kind)
        measured = group & sample.measured
        own, scale = sample.own(measured, norm), norm_of(sample.target[group], norm)
        if kind == "zeros":
            scale = own / eps(precision)
        floor = max(eps(precision) * scale, torch.finfo(eager.dtype).tiny)
        if int(measured.sum()) < FEW and kind != "zeros":
            floor = max(floor, noise[norm] * scale)
        for where, factor in (
            (group & sample.sound, FACTOR[precision]),
            (group & ~sample.sound, FACTOR[precision] + 1.0),
        ):
            error, budget = norm_of(difference[where], norm), factor * max(own, floor)
            unit = scale or 1.0
            figures = (error / unit, own / unit, budget / unit)
            results.append(
                OutputParity(name, shape, *figures, error <= budget, reference, norm, note)
            )
    worst = max(results, key=lambda result: result.ratio)
    compared = int((~extreme(sample.target, eager.dtype)).sum())
    return dataclasses.replace(worst, compared=compared)


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
