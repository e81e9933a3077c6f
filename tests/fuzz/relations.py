"""Relations between two runs, or two compiles, of one model: what follows needs no oracle.

A relation that eager itself follows on these inputs, up to rounding, is one that a file must, as
far as rounding lets it: kernels take another order of sums for another shape, so the two runs of a
file are as far apart as two runs of eager whose weights and inputs are off by one rounding, or
whose ops are. Where eager amplifies that, those runs show by how much (`Oracle.nudged`, `rounded`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from tests.fuzz.oracle import EPS, RUNS, Args, Forward, Oracle, apart, flat, over

Change = Callable[[Args], Args]
Run = Callable[[Args, int], list[Tensor]]
"""Eager's outputs of these inputs, off by what a seed draws."""
Reading = Callable[[Tensor], Tensor]
"""What the output of the changed inputs is to be, of the output of the unchanged ones."""
_FOLLOWS = 2.0**10 * EPS
_HIDDEN: Mapping[str, float] = {"padding": 0, "int padding": 0, "float padding": 0, "hidden": 1}
_HIDDEN = {**_HIDDEN, "ids": 3, "int ids": 3, "ids padded with 0": 0, "ended ids": 2, "frames": 0}
_HIDDEN = {**_HIDDEN, "salience": -1, "added": torch.finfo(torch.float32).min, "mask": 0}
"""What a token that is padding has in an input of some kind."""


def broken(
    run: Forward,
    eager: Oracle,
    inputs: Mapping[str, str],
    tensors: Args,
    free: Mapping[str, tuple[int, int]],
) -> Iterator[str]:
    """Each relation that a run doesn't follow though eager does. Dims in `free` may have any size
    between two.
    """
    dims = [text.partition(":")[0].split() for text in inputs.values()]
    before = eager(*tensors), run(*tensors)
    for name, change, read in _relations(inputs, dims, tensors, free):
        changed = change(tensors)
        after = eager(*changed)
        wanted = [_readings(read, of, to) for of, to in zip(before[0], after, strict=True)]
        found: Sequence[Tensor] | None = None
        for i, reading in enumerate(wanted):
            if reading is None:
                continue
            found = run(*changed) if found is None else found
            target = reading(before[1][i]).double()
            own = reading(before[0][i])

            def others(
                run: Run, i: int = i, given: Args = changed, read: Callable[..., Tensor] = reading
            ) -> list[Tensor]:
                return [read(run(given, seed)[i], True) for seed in range(RUNS)]

            told, theirs = reading(found[i], True), reading(after[i], True)
            if said := _unlike(told, target, own, theirs, others, eager):
                yield f"{name}: output {i} {said}"


def unlike_at_once(
    pieces: Forward, at_once: Forward, eager: Oracle, eager_in_pieces: nn.Module, tensors: Args
) -> Iterator[str]:
    """How the outputs of a prompt in pieces aren't those of it at once."""
    found, targets = pieces(*tensors), at_once(*tensors)
    own, theirs = eager(*tensors), flat(eager_in_pieces(*tensors))
    for i, (told, target) in enumerate(zip(found, targets, strict=True)):

        def others(run: Run, i: int = i) -> list[Tensor]:
            return [run(tensors, seed)[i] for seed in range(RUNS)]

        said = _unlike(told, target.double(), own[i], theirs[i], others, eager)
        if said:
            yield f"a prompt in pieces: output {i} {said}"


def _unlike(
    told: Tensor,
    target: Tensor,
    own: Tensor,
    theirs: Tensor,
    others: Callable[[Run], list[Tensor]],
    eager: Oracle,
) -> str:
    """How one run's output is further from another's than eager's own two, `own` and `theirs`, and
    `others` of weights that are off by one rounding, or of other roundings.
    """
    noise = [target, target + (theirs - own).double()]
    said = over(told, target, noise, eager.rounding)
    if said:
        noise += [target + (each - own).double() for each in others(eager.nudged)]
        said = over(told, target, noise, eager.rounding)
    if said:
        spread = apart(own, others(eager.rounded))
        said = over(told, target, noise, eager.rounding, spread)
    return said


def _readings(read: object, before: Tensor, after: Tensor) -> Callable[..., Tensor] | None:
    """The axis along which eager follows, as a function of the outputs of either run."""
    for axis in range(before.ndim):
        reading = _along(read, axis)
        try:
            one, two = reading(before), reading(after, True)
        except (IndexError, RuntimeError):
            continue
        if one.shape != two.shape or not one.is_floating_point():
            continue
        scale = one[one.isfinite()].abs().max() if bool(one.isfinite().any()) else torch.tensor(0.0)
        if bool(((one - two).abs() <= _FOLLOWS * scale).all()):
            return reading
    return None


def _along(read: object, axis: int) -> Callable[..., Tensor]:
    def reading(output: Tensor, is_changed: bool = False) -> Tensor:
        found: Tensor = read(output, axis, is_changed)  # type: ignore[operator]
        return found

    return reading


def _relations(
    inputs: Mapping[str, str],
    dims: Sequence[Sequence[str]],
    tensors: Args,
    free: Mapping[str, tuple[int, int]],
) -> Iterator[tuple[str, Change, object]]:
    sizes = {n: t.shape[i] for names, t in zip(dims, tensors, strict=True) for i, n in _of(names)}
    batch = sizes.get("b", 1)
    if batch > 1:
        order = torch.arange(batch).roll(1)
        yield (
            "a batch in another order",
            lambda given: tuple(
                t.index_select(names.index("b"), order) if "b" in names else t
                for names, t in zip(dims, given, strict=True)
            ),
            lambda o, axis, is_changed: o if is_changed else o.index_select(axis, order),
        )
    if batch > 1 and "b" in free and free["b"][0] == 1:
        yield (
            "a batch in parts",
            lambda given: tuple(
                t.narrow(names.index("b"), 1, 1) if "b" in names else t
                for names, t in zip(dims, given, strict=True)
            ),
            lambda o, axis, is_changed: o if is_changed else o.narrow(axis, 1, 1),
        )
    kinds = [text.partition(":")[2] for text in inputs.values()]
    seq = sizes.get("s", 0)
    if "s" in free and free["s"][0] <= seq - 2:  # where no token sees those behind it
        yield (
            "a sequence cut short",
            lambda given: tuple(
                _cut(t, names, seq - 2) for names, t in zip(dims, given, strict=True)
            ),
            lambda o, axis, is_changed: o if is_changed else o.narrow(axis, 0, seq - 2),
        )
    if "s" in free and free["s"][1] >= seq + 2 and {*kinds} & {*_HIDDEN}:
        yield (
            "a sequence with more padding",
            lambda given: tuple(
                _padded(t, names, kind) for names, kind, t in zip(dims, kinds, given, strict=True)
            ),
            lambda o, axis, is_changed: o.narrow(axis, 0, seq) if is_changed else o,
        )


def _of(names: Sequence[str]) -> Iterator[tuple[int, str]]:
    return enumerate(names)


def _cut(tensor: Tensor, names: Sequence[str], length: int) -> Tensor:
    """Its first tokens, along each axis of queries."""
    for axis, name in enumerate(names):
        if name == "s":
            tensor = tensor.narrow(axis, 0, length)
    return tensor


def _padded(tensor: Tensor, names: Sequence[str], kind: str) -> Tensor:
    """With two more tokens at the end of each axis of queries."""
    for axis, name in enumerate(names):
        if name == "s":
            shape = [*tensor.shape]
            shape[axis] = 2
            fill = torch.full(shape, _HIDDEN.get(kind, 1.0)).to(tensor.dtype)
            tensor = torch.cat([tensor, fill], axis)
    return tensor
