"""Dims keep the user's names, inputs and outputs theirs; what can't be captured is a sentence."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim

from attngraph import optimize
from attngraph.errors import CaptureError, UsageError
from attngraph.frontend.capture import capture, from_program
from attngraph.ir import ScalarType, format_graph, interpret, parse
from tests.capture.formula import BATCH, BOTH, Formula, X, assert_identical, check, states


def test_item_defines_a_dim() -> None:
    def forward(self: Formula, x: Tensor, y: Tensor) -> Tensor:
        return torch.zeros(y.max().item()) + x.sum()

    result = check(
        forward, X, torch.tensor([2, 5]), dims=(BOTH, None), further=(X, torch.tensor([8, 1]))
    )
    item = next(node for node in result.graph if node.op == "aten.item")
    assert item.output.type == ScalarType("int", "u0")
    assert result.graph.dims["u0"].low == 0


def test_int_of_a_tensor_defines_a_dim() -> None:
    """Python demands a number of `int()` there, which only reading the bytecode gets around."""
    check(
        lambda self, x, y: x + torch.zeros(int(y.max())).sum(),
        X,
        torch.tensor([2, 5]),
        dims=(BOTH, None),
        further=(X, torch.tensor([8, 1])),
    )


def test_a_table_that_is_kept_by_its_size_is_computed_for_each() -> None:
    @functools.lru_cache
    def table(size: int) -> Tensor:
        return torch.arange(size).float()

    check(
        lambda self, x, y: x + y * table(x.shape[1]),
        X,
        states(1),
        dims=(BOTH, None),
        further=(states(2, 12), states(1)),
    )


class Remembers(nn.Module):
    """Keeps a table for the last length, as rotary embeddings do."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1]
        if self.table is None or self.table.shape[0] != size:
            self.table = torch.arange(size).float()
        return x * self.table


def test_a_table_left_by_an_earlier_call_fixes_no_size() -> None:
    model = Remembers()
    model(X)
    graph = capture(model, (X,), dynamic_shapes=(BOTH,)).graph
    longer = states(2, 12)
    assert torch.equal(interpret(graph, [longer])[0], Remembers()(longer))
    assert model.table is not None
    assert model.table.shape[0] == X.shape[1]


def test_a_derived_dim_keeps_the_root() -> None:
    half = Dim("half")
    result = check(
        lambda self, x, y: x[:, ::2] + y,
        states(3, 8),
        states(3, 4),
        dims=({0: BATCH, 1: 2 * half}, {0: BATCH, 1: half}),
        further=(states(2, 10), states(2, 5)),
    )
    assert [str(value.type) for value in result.graph.inputs] == [
        "f32[batch, 2*half]",
        "f32[batch, half]",
    ]


class Nested(nn.Module):
    """Each block of 8 rows without the sums of 4 that come before it, from the last one on."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made, length = torch.zeros_like(x), x.shape[1]
        for at in range(0, length, 8):
            part = x[:, at : at + 8]
            for before in range(at - 4, -4, -4):
                part = part - x[:, before : before + 4].sum(1, keepdim=True)
            made[:, at : at + 8] = part
        return made + y.sum(1, keepdim=True)


def test_a_derived_dim_that_became_a_constant_is_named_with_its_line() -> None:
    """torch says nothing of it but that it was marked; the other dim isn't blamed."""
    inputs = torch.randn(2, 24, 4), torch.randn(2, 10, 4)
    blocks, pairs = 8 * Dim("blocks", max=9), 2 * Dim("pairs", max=9)
    with pytest.raises(CaptureError) as caught:
        capture(Nested(), inputs, dynamic_shapes=({1: blocks}, {1: pairs}))
    said = str(caught.value)
    assert said.startswith(
        "Input x's axis 1 (dim '8*blocks') can't be dynamic: the model fixes it to 24 at "
    )
    assert "(for at in range(0, length, 8):). Leave the dim static, or" in said
    assert "pairs" not in said
    result = capture(Nested(), inputs, dynamic_shapes=(None, {1: pairs}))
    other = inputs[0], torch.randn(2, 6, 4)
    torch.testing.assert_close(interpret(result.graph, other)[0], Nested()(*other))


def test_a_trace_that_fails_at_other_sizes_leaves_no_vmap_behind() -> None:
    """The inner loop is traced under torch.vmap; in it, random numbers would be an error."""
    inputs = torch.randn(2, 24, 4), torch.randn(2, 10, 4)
    with pytest.raises(CaptureError, match="the model fixes it to 24"):
        optimize(Nested(), inputs, dynamic_shapes=({1: Dim("length", max=72)}, None))
    assert torch._C._functorch.peek_interpreter_stack() is None
    torch.randn(2)


def test_auto_dims_are_named_after_their_input() -> None:
    auto = {0: Dim.AUTO, 1: Dim.AUTO}
    result = check(lambda self, x, y: x * 2, X, dims=(auto,), further=(states(5, 4),))
    assert result.dynamic == {(0, 0): "x_0", (0, 1): "x_1"}


def test_a_name_stands_for_its_dim_wherever_it_is_given() -> None:
    shapes = {"x": {0: "batch", 1: "seq"}, "y": ("batch", None)}
    result = capture(Formula(lambda self, x, y: x + y[:, :1]), (X, X), dynamic_shapes=shapes)
    assert result.dynamic == {(0, 0): "batch", (0, 1): "seq", (1, 0): "batch"}


@pytest.mark.parametrize(
    ("dim", "said"), [("two words", "a dim's name is an identifier"), (1.5, "a float for axis 0")]
)
def test_what_is_no_dim_is_named(dim: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        capture(Formula(lambda self, x, y: x * 2), (X,), dynamic_shapes=({0: dim},))


class SameNames(nn.Module):
    def forward(self, x: Tensor, past: Tensor, kept: Tensor) -> dict[str, Tensor]:
        return {"x": x * 2, "past": past + x, "kept": kept}


def test_an_output_called_as_another_input_has_a_name_of_its_own() -> None:
    result = capture(SameNames(), (X, X, X))
    assert result.output_names == ("x.1", "present", "kept")
    assert parse(format_graph(result.graph)).output_names == result.output_names


def test_names_that_the_text_form_reads_otherwise_are_adapted() -> None:
    dims = ({0: Dim("f32"), 1: Dim("none")},)
    result = check(lambda self, x, y: x.view(-1), X, dims=dims, further=(states(5, 4),))
    assert result.dynamic == {(0, 0): "f32_", (0, 1): "none_"}


def test_a_size_that_the_program_asserts_to_be_others_is_no_dim_of_its_own() -> None:
    class Joined(nn.Module):
        def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            torch._check(mask.shape[0] == x.shape[0] + y.shape[0])
            return torch.cat([x, y]) * mask

    args = (states(3), states(5), states(8))
    shapes = ({0: Dim("new")}, {0: Dim("past")}, {0: Dim.AUTO})
    program = torch.export.export(
        Joined(), args, dynamic_shapes=shapes, prefer_deferred_runtime_asserts_over_guards=True
    )
    result = from_program(program, args, dynamic_shapes=shapes)
    assert str(result.graph.inputs[2].shape[0]) == "new + past"


def _fixes_the_batch(self: Formula, x: Tensor, y: None) -> Tensor:
    doubled = x * 2
    return doubled + torch.ones(3)[:, None]


def test_a_dim_that_specialised_names_what_forced_it() -> None:
    with pytest.raises(CaptureError) as error:
        capture(Formula(_fixes_the_batch), (X,), dynamic_shapes=(BOTH,))
    line = _fixes_the_batch.__code__.co_firstlineno + 2
    message = str(error.value)
    assert "nput x's axis 0" in message
    assert "fixes it to 3" in message
    assert f"{Path(__file__).name}:{line} (return doubled + torch.ones(3)[:, None])" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("function", "args", "dims", "words"),
    [
        (lambda s, x, y: x, (X[:1],), (BOTH,), ["axis 0", "size 1", "2 or more"]),
        (lambda s, x, y: x.view(x.shape[0], 3, -1), (X,), (BOTH,), ["'seq'", "seq = 3*_seq"]),
        (lambda s, x, y: x + y, (X, X), (BOTH, {0: BATCH, 1: Dim("other")}), ["'other'", "equal"]),
        (
            lambda s, x, y: x if x.sum() > 0 else -x,
            (X,),
            None,
            [Path(__file__).name, "torch.where"],
        ),
        (lambda s, x, y: x @ y, (X, X), None, [Path(__file__).name, "reduction dim"]),
        (lambda s, x, y: x.shape[0], (X,), None, ["no tensor"]),
        (lambda s, x, y: x * y, (X, 3), (None, Dim.DYNAMIC), ["Input y", "take a tensor"]),
        (
            lambda s, x, y: while_loop(lambda q: q.sum() < 9, lambda q: (q.abs() + 1,), (x,))[0],
            (X,),
            None,
            ["while_loop", "formula.py"],
        ),
    ],
)
def test_what_cannot_be_captured_is_said_in_a_sentence(
    function: Any, args: Any, dims: Any, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError) as error:
        capture(Formula(function), args, dynamic_shapes=dims)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)
    assert capsys.readouterr().err == ""


def test_inputs_that_do_not_fit_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="too many positional"):
        capture(Formula(lambda s, x, y: x), (X, X, X))
    with pytest.raises(UsageError, match="2 entries for 1 inputs"):
        capture(Formula(lambda s, x, y: x), (X,), dynamic_shapes=(BOTH, BOTH))
    given: Any = {"x": X}
    with pytest.raises(UsageError, match="The samples are a dict"):
        capture(Formula(lambda s, x, y: x), given)


FAR = Dim("far", min=X.shape[0] + 1, max=99)


@pytest.mark.parametrize(
    ("dims", "says"),
    [
        ({"z": {0: "b"}}, "names 'z', which is none of the inputs that are given: x, y"),
        ("batch", "dynamic_shapes is a Dim; give a dict"),
        (({0: FAR}, None), f"axis 0 .dim 'far'. has size {X.shape[0]}, and the dim goes from"),
        (({0: "b", 1: "b"}, None), "has size .*, and that of input x's axis 1 .dim 'b'. has"),
    ],
)
def test_dims_that_do_not_fit_are_usage_errors(dims: Any, says: str) -> None:
    assert X.shape[0] != X.shape[1]
    with pytest.raises(UsageError, match=says):
        capture(Formula(lambda s, x, y: x + y.sum()), (X, X), dynamic_shapes=dims)


def test_an_input_that_has_no_entry_is_static() -> None:
    dims: Any = {"x": {0: "b"}}
    captured = capture(Formula(lambda s, x, y: x + y.sum()), (X, X), dynamic_shapes=dims)
    assert captured.dynamic == {(0, 0): "b"}


def test_one_tensor_given_twice_is_two_inputs() -> None:
    check(lambda self, x, y: x - 2 * y, X, X, dims=(BOTH, BOTH), further=(states(5, 4), X[0, :4]
          .expand(5, 4)))  # fmt: skip


def test_keywords_in_any_order_and_constants_of_the_trace() -> None:
    class Model(nn.Module):
        def forward(self, a: Tensor, flag: bool, b: Tensor, c: Tensor | None = None) -> Tensor:
            return a - b if flag else a + b

    module, other = Model(), states(3, 9) + 1
    dims = {"a": BOTH, "flag": None, "b": BOTH, "c": None}
    result = capture(
        module, (), kwargs={"c": None, "b": other, "flag": True, "a": X}, dynamic_shapes=dims
    )
    assert result.input_names == ("a", "b")
    assert_identical(interpret(result.graph, result.args), [X - other])


def test_outputs_are_named_by_what_the_model_returns() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Any:
        return {"logits": x + 1, "states": [x + 2, None, x + 3], "size": 3, "same": x}

    result = capture(Formula(forward), (X,))
    assert result.output_names == ("logits", "states_0", "states_2", "same")
    outputs = result.signature.unflatten(interpret(result.graph, (X,)))
    assert outputs["states"][1] is None
    assert outputs["size"] == 3
    assert_identical([outputs["states"][2], outputs["same"]], [X + 3, X])


def test_an_output_of_unknown_type_is_named_with_what_to_do() -> None:
    class MyCache:
        __slots__ = ("__held",)

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, MyCache]:
            return x + 1, MyCache()

    with pytest.raises(CaptureError, match=r"Model returns a MyCache, .*use_cache"):
        capture(Model(), (torch.ones(2),))


def test_a_condition_that_the_trace_met_is_said_in_the_dims_own_names() -> None:
    class Cut(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            size = x.shape[1]
            return x + 1 if size * size % 7 != 2 else x

    with pytest.raises(CaptureError) as caught:
        optimize(Cut(), (torch.randn(2, 5, 4),), dynamic_shapes=({1: Dim("seq", min=2, max=64)},))
    said = str(caught.value)
    assert said.startswith(
        "Input x's axis 1 (dim 'seq') can't take every size: the trace relies on"
    )
    assert "% 7" in said
    assert "L['x']" not in said
    assert "Leave the dim static" in said


@pytest.mark.parametrize(
    ("number", "dim"), [(3, Dim.DYNAMIC), (3, Dim.AUTO), (3, Dim("n")), (0.5, Dim.AUTO)]
)
def test_a_number_that_is_asked_to_be_dynamic_is_named_with_what_to_do(
    number: float, dim: Any
) -> None:
    class Scales(nn.Module):
        def forward(self, x: torch.Tensor, n: float) -> torch.Tensor:
            return x * n

    with pytest.raises(CaptureError, match=r"Input n is a number .*take a tensor of it") as caught:
        capture(Scales(), (X, number), dynamic_shapes=({0: BATCH}, dim))
    assert "None for it in dynamic_shapes" in str(caught.value)
    assert capture(Scales(), (X, number), dynamic_shapes=({0: BATCH}, None)).input_names == ("x",)


def test_a_program_with_a_dynamic_number_is_named_with_what_to_do() -> None:
    class Cuts(nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return x[:n]

    program = torch.export.export(Cuts(), (X, 2), dynamic_shapes=(None, Dim.DYNAMIC))
    with pytest.raises(
        CaptureError, match=r"Input n is a number .*export the module again"
    ) as told:
        from_program(program)
    assert "torch._check(n >= 0) and torch._check(n <= x.shape[1])" in str(told.value)


def test_a_comparison_of_sizes_is_a_flag() -> None:
    def forward(self: Formula, x: Tensor, y: Any) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=x.shape[1] > 1)

    check(forward, states(3, 5, 4), dims=(BOTH,), further=(states(2, 7, 4),))


def test_one_dim_of_two_caches_stays_one() -> None:
    """torch.export keeps a symbol for each, because it can't solve past + seq = past' + seq."""

    class Cached(nn.Module):
        def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            k, v = torch.cat([keys, x], 1), torch.cat([values, x], 1)
            return (x @ k.mT).softmax(-1) @ v

    past, seq = Dim("past", max=12), Dim("seq", max=20)
    args = states(2, 5, 6), states(2, 3, 6), states(2, 3, 6)
    graph = capture(Cached(), args, dynamic_shapes=({1: seq}, {1: past}, {1: past})).graph
    assert sorted(graph.dims) == ["past", "seq"]


def test_a_shift_by_a_view_of_a_slice_takes_every_size() -> None:
    def forward(self: Formula, x: Tensor, y: Any) -> Tensor:
        batch, size, _ = x.shape
        scores = x @ torch.cat([x, x[:, 1:]], 1).mT  # (B, S, 2S - 1)
        padded = torch.cat([x.new_zeros(batch, size, 1), scores], -1).view(batch, 2 * size, size)
        return padded[:, 1:].view_as(scores)[..., :size]

    check(forward, states(3, 7, 4), dims=(BOTH,), further=(states(2, 1, 4),))


@pytest.mark.parametrize("as_layer", [False, True], ids=["function", "layer"])
def test_what_a_library_does_is_told_by_the_models_own_line(as_layer: bool) -> None:
    """As einops computes with the numbers that the sizes of a model's tensors are."""
    library: dict[str, Any] = {"__name__": "library", "Module": nn.Module}
    exec(
        compile(
            "def fix(x):\n    return x.view([*range(x.shape[1])][-1] + 1, -1)\n"
            "class Layer(Module):\n    def forward(self, x):\n        return fix(x)",
            "library.py",
            "exec",
        ),
        library,
    )

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fixed = library["Layer"]() if as_layer else library["fix"]

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.fixed(x)
            return result

    with pytest.raises(
        CaptureError, match=r"can\'t be dynamic.*test_capture_dims.*self.fixed\(x\)"
    ):
        capture(Calls(), (X,), dynamic_shapes=(BOTH,))


def test_an_assert_on_data_is_no_branch() -> None:
    """torch tells one from an `if` by the bytecode of the model's frame, which pytest rewrites."""
    model: dict[str, Any] = {}
    text = "def forward(self, x, y):\n    assert y.max().item() <= x.shape[1]\n    return x + 1"
    exec(compile(text, "model.py", "exec"), model)
    data, other = torch.tensor([1, 2]), torch.tensor([2, 1])
    check(model["forward"], X, data, dims=(BOTH, None), further=(X, other))


class Frames(nn.Module):
    """A token for the whole and those of three frames, which attend frame by frame."""

    def forward(self, x: Tensor) -> Tensor:
        places = (x.shape[1] - 1) // 3
        frames = x[:, 1:].reshape(x.shape[0], 3, places, -1)
        mixed = (frames @ frames.mT).softmax(-1) @ frames
        return torch.cat([x[:, :1], mixed.reshape(x.shape[0], 3 * places, -1)], 1)


def test_a_length_that_leaves_no_frames_is_refused_as_any_other() -> None:
    x = torch.randn(2, 13, 8)
    for least in (1, 4):
        with pytest.raises(CaptureError, match=r"the model needs n = 3\*_n - 2; derive it"):
            capture(Frames(), (x,), dynamic_shapes=({1: Dim("n", min=least, max=99)},))
    derived = ({1: 3 * Dim("n", max=30) + 1},)
    optimized = optimize(Frames(), (x,), dynamic_shapes=derived)
    for length in (4, 7, 34):
        given = torch.randn(2, length, 8)
        torch.testing.assert_close(optimized(given), Frames()(given))
