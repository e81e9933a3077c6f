"""The text of --input and --dim: what parses, what follows from it, and what each refusal says."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.export import Dim

from attngraph.errors import LoadError, UsageError
from attngraph.frontend.files.specs import (
    DimRange,
    InputSpec,
    SpecDim,
    dim_sizes,
    dynamic_shapes,
    make_inputs,
    parse_dim,
    parse_input,
    parse_inputs,
    ranged,
    read_npz,
)
from attngraph.frontend.interface.binding import bind, forward_signature


def test_named_dims_are_dynamic_and_bare_numbers_static() -> None:
    spec = parse_input("input_ids=int64[batch=2, seq=8]")
    assert spec == InputSpec("input_ids", torch.int64, (SpecDim(2, "batch"), SpecDim(8, "seq")))
    assert parse_input("x=float32[2,3]").dims == (SpecDim(2), SpecDim(3))
    assert parse_input("t=float32[]").shape == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "x=float32",
        "x=float32[2",
        "=float32[2]",
        "x[2]",
        "x=float32[2]]",
        "x=float32[a b=2]",
    ],
)
def test_an_input_that_does_not_parse_shows_the_form(text: str) -> None:
    with pytest.raises(UsageError, match=r"input_ids=int64\[batch=2,seq=8\]|is no dim"):
        parse_input(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x=float31[2]", "'float31' is no dtype; use one of float64"),
        ("x=float32[2,,3]", "'' is no dim"),
        ("x=float32[seq]", r"'seq' is no dim; write a size \(8\)"),
        ("x=float32[-1]", "'-1' is no dim"),
        ("x=float32[0]", "size 0 is empty"),
    ],
)
def test_what_is_wrong_with_an_input_is_named(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse_input(text)


def test_dim_ranges() -> None:
    assert parse_dim("seq=2..2048") == DimRange("seq", 2, 2048)
    assert parse_dim("seq=2..") == DimRange("seq", 2, None)


@pytest.mark.parametrize("text", ["seq", "seq=2", "seq=2...5", "seq=..5", "seq=9..3", "seq=0..4"])
def test_a_dim_that_is_no_range_shows_the_form(text: str) -> None:
    with pytest.raises(UsageError, match=r"seq=2\.\.2048"):
        parse_dim(text)


def test_one_name_with_two_sizes_is_refused() -> None:
    with pytest.raises(UsageError, match="batch is 2 in --input a and 3 in --input b"):
        parse_inputs(["a=int64[batch=2]", "b=int64[batch=3]"])


def test_a_dynamic_sample_of_one_is_refused_because_it_would_specialise() -> None:
    with pytest.raises(UsageError, match="write batch=2 or more, or 1 alone"):
        parse_inputs(["a=int64[batch=1]"])


def test_an_input_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="--input a is given 2 times"):
        parse_inputs(["a=int64[2]", "a=int64[3]"])


def test_samples_are_repeatable_and_valid_for_what_their_names_say() -> None:
    specs = parse_inputs(
        [
            "input_ids=int64[b=2,s=8]",
            "attention_mask=int64[b=2,s=8]",
            "position_ids=int64[b=2,s=8]",
            "token_type_ids=int64[b=2,s=8]",
            "flag=bool[3]",
            "x=float16[4,4]",
        ]
    )
    first, again, other = make_inputs(specs), make_inputs(specs), make_inputs(specs, seed=1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["x"], other["x"])
    assert [t.dtype for t in first.values()] == [s.dtype for s in specs]
    assert [tuple(t.shape) for t in first.values()] == [s.shape for s in specs]
    assert 0 <= int(first["input_ids"].min()) <= int(first["input_ids"].max()) < 100
    assert bool((first["attention_mask"] == 1).all())
    assert bool(first["flag"].all())
    assert first["position_ids"][1].tolist() == list(range(8))
    assert int(first["token_type_ids"].max()) == 0


def test_samples_that_no_memory_holds_are_told() -> None:
    specs = parse_inputs(["x=float32[batch=2,seq=999999999999,16]"])
    with pytest.raises(UsageError, match=r"--input x: a sample of shape .2, 9+, 16. doesn't fit"):
        make_inputs(specs)


def test_one_dim_name_is_one_dim_object() -> None:
    specs = parse_inputs(["ids=int64[batch=2,seq=8]", "mask=bool[batch=2,4]", "x=float32[3]"])
    shapes = dynamic_shapes(specs, [parse_dim("seq=2..64")])
    ids, mask = shapes["ids"], shapes["mask"]
    assert ids is not None
    assert mask is not None
    assert ids[0] is mask[0]
    assert list(mask) == [0]
    assert shapes["x"] is None
    assert (ids[1].__name__, ids[1].min, ids[1].max) == ("seq", 2, 64)


def test_dynamic_shapes_are_what_export_takes() -> None:
    class Masked(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(mask[..., None], 0.0)

    specs = parse_inputs(["x=float32[batch=2,seq=8,4]", "mask=bool[batch=2,seq=8]"])
    args, kwargs = bind(make_inputs(specs), forward_signature(Masked()))
    shapes = dynamic_shapes(specs, [parse_dim("seq=2..64"), parse_dim("batch=1..")])
    program = torch.export.export(Masked(), args, kwargs, dynamic_shapes=shapes, strict=False)
    assert len(program.range_constraints) == 2
    assert {r.upper for r in program.range_constraints.values()} >= {64}


@pytest.mark.parametrize(
    ("dims", "reason"),
    [
        (["sequence=2..8"], "names no dim of an input; the named dims are batch, seq"),
        (["seq=2..8", "seq=2..9"], "given twice"),
        (["seq=16..32"], "leaves out the sample size 8"),
        (["seq=2..4"], "leaves out the sample size 8"),
    ],
)
def test_a_range_that_does_not_fit_the_inputs_is_refused(dims: list[str], reason: str) -> None:
    specs = parse_inputs(["ids=int64[batch=2,seq=8]"])
    with pytest.raises(UsageError, match=reason):
        dynamic_shapes(specs, [parse_dim(text) for text in dims])


def _forward(
    ids: object, mask: object = None, scale: object = None, *, last: object = 1
) -> None: ...


def _star(*tensors: object) -> None: ...


def test_binding_is_by_position_up_to_the_first_gap_then_by_name() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    signature = inspect.signature(_forward)
    assert bind({"mask": b, "ids": a}, signature) == ((a, b), {})
    assert bind({"scale": b, "ids": a}, signature) == ((a,), {"scale": b})
    assert bind({"ids": a, "last": b}, signature) == ((a,), {"last": b})
    assert bind({"q": a, "k": b}, inspect.signature(_star)) == ((a, b), {})


def test_unknown_and_missing_inputs_list_the_parameters() -> None:
    a, signature = torch.zeros(1), inspect.signature(_forward)
    expected = r"ids, mask \(optional\), scale \(optional\), last \(optional\)"
    with pytest.raises(UsageError, match=f"no parameter 'idz'; it takes {expected}"):
        bind({"ids": a, "idz": a}, signature)
    with pytest.raises(
        UsageError, match=f"needs 'ids', which no --input gives; it takes {expected}"
    ):
        bind({"mask": a}, signature)


def test_npz_inputs_are_read_by_name_and_held_against_the_specs(tmp_path: Path) -> None:
    path = tmp_path / "sample.npz"
    np.savez(path, ids=np.arange(6).reshape(2, 3), x=np.ones((2, 2), np.float32))
    tensors = read_npz(path, parse_inputs(["ids=int64[batch=2,seq=3]"]))
    assert tensors["ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["x"].dtype == torch.float32
    with pytest.raises(UsageError, match=r"ids is torch.int64 of shape \(2, 3\)"):
        read_npz(path, parse_inputs(["ids=int64[batch=2,seq=4]"]))
    with pytest.raises(UsageError, match="has no mask; it has ids, x"):
        read_npz(path, parse_inputs(["mask=bool[2]"]))


def test_npz_that_needs_unpickling_or_is_no_npz_is_refused(tmp_path: Path) -> None:
    objects, text = tmp_path / "objects.npz", tmp_path / "text.npz"
    np.savez(objects, ids=np.array([{}], dtype=object))
    text.write_text("hello")
    for path in (objects, text):
        with pytest.raises(LoadError, match="plain arrays"):
            read_npz(path)
    with pytest.raises(LoadError, match="does not exist"):
        read_npz(tmp_path / "none.npz")


def test_dim_sizes_reads_every_named_dim() -> None:
    assert dim_sizes(parse_inputs(["a=int64[b=2,s=8]", "c=int64[3,b=2]"])) == {"b": 2, "s": 8}


def test_ranges_of_dims_that_a_model_came_with() -> None:
    """A checkpoint's folder brings samples with named dims: their ranges are to be had too."""
    batch, seq = Dim("batch"), Dim("seq", max=64)
    samples = {"ids": torch.ones(2, 8), "types": torch.ones(2, 8)}
    shapes = {"ids": {0: batch, 1: seq}, "types": {0: batch, 1: seq}, "cache": None}
    found = ranged(shapes, samples, [DimRange("seq", 1, 28)])
    assert found is not None
    assert found["ids"][0] is batch
    assert (found["ids"][1].min, found["ids"][1].max) == (1, 28)
    assert found["types"][1] is found["ids"][1]
    free = ranged(shapes, samples, [DimRange("seq", None, None)])
    assert free is not None
    assert free["ids"][1].max > 1 << 30
    for ranges, told in (
        ([DimRange("length", 1, 2)], "the named dims are batch, seq"),
        ([DimRange("seq", 1, 4)], "seq"),
    ):
        with pytest.raises(UsageError, match=told):
            ranged(shapes, samples, ranges)
    doubled = {"ids": {0: seq, 1: 2 * seq}}
    with pytest.raises(UsageError, match="derived from it"):
        ranged(doubled, {"ids": torch.ones(8, 16)}, [DimRange("seq", 1, 28)])
