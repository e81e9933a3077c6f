"""`verify` finds what was changed in a file although its model's sample doesn't show it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from attngraph.compiling.compiler import compile_model
from attngraph.export.runtime.session import Session
from attngraph.export.target import Target
from attngraph.frontend.model import Model
from attngraph.options import Options
from attngraph.verification.verify import Verification, verify_file

pytestmark = pytest.mark.wide

ROWS = 100
Change = Callable[[onnx.ModelProto], None]


class Encoder(nn.Module):
    """(B, S) ids and their mask, 1 where there is a token, to (B, S, 16): two layers."""

    def __init__(self, fill: float, *, adds: bool) -> None:
        super().__init__()
        self.adds = adds
        self.table = nn.Embedding(ROWS, 16)
        self.projections = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.fill = fill

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x: Tensor = self.table(ids)
        for projection in self.projections:
            query, key, value = (
                part.unflatten(-1, (2, -1)).transpose(1, 2) for part in projection(x).chunk(3, -1)
            )
            scores = query @ key.mT
            keys = mask[:, None, None]
            if self.adds:
                scores = scores + (1.0 - keys.float()) * self.fill
            else:
                scores = scores.masked_fill(keys == 0, self.fill)
            x = x + (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        return x


FINITE = torch.finfo(torch.float32).min


FORMS = {"infinite": (-torch.inf, False), "finite": (FINITE, False), "added": (FINITE, True)}


def _model(form: str) -> Model:
    """Its sample has no padding and knows seven ids."""
    torch.manual_seed(0)
    fill, adds = FORMS[form]
    ids = torch.arange(14).view(2, 7) % 7
    args = (ids, torch.ones(2, 7, dtype=torch.int64))
    return Model(Encoder(fill, adds=adds).eval(), None, args, {}, None, "Encoder")


@pytest.fixture(scope="module", params=list(FORMS))
def form(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def right(form: str, tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    """A file of attngraph's, which verify takes for right."""
    path = tmp_path_factory.mktemp(form) / "out.onnx"
    compile_model(_model(form), Options(verify="off")).save(path)
    found = _verify(path, form)
    assert found.passed, found.parity
    assert found.culprit == ""
    assert found.weights is not None
    assert found.weights.compared == found.weights.total > 4
    return onnx.load(path)


@pytest.fixture
def verified(right: onnx.ModelProto, form: str, tmp_path: Path) -> Callable[[Change], Verification]:
    """What is said of that file after a change."""

    def check(change: Change) -> Verification:
        model = onnx.ModelProto()
        model.CopyFrom(right)
        change(model)
        onnx.save(model, tmp_path / "changed.onnx")
        return _verify(tmp_path / "changed.onnx", form)

    return check


def _verify(path: Path, form: str) -> Verification:
    with Session.open(path, Target("cpu")) as session:
        return verify_file(_model(form), path, session)


def _attentions(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "Attention"]


def _equal_to_itself(model: onnx.ModelProto) -> None:
    (mask,) = {node.input[3] for node in _attentions(model)}
    always = helper.make_node("Equal", [mask, mask], ["always"])
    at = next(i for i, node in enumerate(model.graph.node) if node.op_type == "Attention")
    for node in _attentions(model):
        node.input[3] = "always"
    model.graph.node.insert(at, always)


def _without_one_mask(model: onnx.ModelProto) -> None:
    _attentions(model)[1].input[3] = ""


def _weaker_fill(model: onnx.ModelProto) -> None:
    changed = 0
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values = numpy_helper.to_array(tensor).copy()
            low = values < -1e29
            values[low] = -1.0
            changed += int(low.sum())
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    assert changed


def _last_row(model: onnx.ModelProto) -> None:
    (table,) = (tensor for tensor in model.graph.initializer if list(tensor.dims) == [ROWS, 16])
    values = numpy_helper.to_array(table).copy()
    values[-30] = -values[-30]
    table.CopyFrom(numpy_helper.from_array(values, table.name))


def _last_bit(model: onnx.ModelProto) -> None:
    (table,) = (tensor for tensor in model.graph.initializer if list(tensor.dims) == [ROWS, 16])
    values = numpy_helper.to_array(table).copy()
    values.view(np.int32)[50, 3] ^= 1
    table.CopyFrom(numpy_helper.from_array(values, table.name))


def _other_layer(model: onnx.ModelProto) -> None:
    """Two layers' weights change places."""
    found = [t for t in model.graph.initializer if sorted(t.dims) == [16, 48] or t.dims == [16, 16]]
    first, second = next(
        pair for pair in itertools.combinations(found, 2) if pair[0].dims == pair[1].dims
    )
    first.raw_data, second.raw_data = second.raw_data, first.raw_data


Verified = Callable[[Change], Verification]


@pytest.mark.parametrize("change", [_equal_to_itself, _without_one_mask])
def test_a_mask_that_is_gone_is_found_without_padding_in_the_sample(
    change: Change, form: str, verified: Verified
) -> None:
    found = verified(change)
    assert not found.parity.passed
    assert "other weights" not in found.culprit
    assert found.culprit.startswith("The first ONNX value to diverge is %")
    assert "attn.attention" in found.culprit


def test_a_weaker_fill(form: str, verified: Verified) -> None:
    if form != "added":
        pytest.skip("has no fill")
    found = verified(_weaker_fill)
    assert not found.parity.passed
    assert "other weights" not in found.culprit
    assert found.culprit.startswith("The first ONNX value to diverge is %")


def test_rows_of_a_table_that_the_sample_does_not_use(verified: Verified) -> None:
    found = verified(_last_row)
    assert not found.passed
    assert found.culprit.startswith("The file holds other weights than the model: table.weight (1 ")
    assert f"of {ROWS} rows)" in found.culprit


def test_one_bit_of_a_weight_that_no_budget_shows(form: str, verified: Verified) -> None:
    found = verified(_last_bit)
    assert found.parity.passed
    assert not found.passed
    assert not found.to_dict()["passed"]
    assert found.weights is not None
    assert found.weights.different == [f"table.weight (1 of {ROWS} rows)"]


def _unsigned(change: Change) -> Change:
    def both(model: onnx.ModelProto) -> None:
        del model.metadata_props[:]
        change(model)

    return both


@pytest.mark.parametrize("change", [_equal_to_itself, _without_one_mask, _other_layer])
def test_a_file_without_its_metadata_is_held_to_the_outputs(
    change: Change, form: str, verified: Verified
) -> None:
    if form != "finite":
        pytest.skip("one is enough: no metadata is read of any")
    untouched = verified(_unsigned(lambda model: None))
    assert untouched.passed
    assert untouched.weights is None
    assert any("and not bit for bit" in note for note in untouched.notes)
    found = verified(_unsigned(change))
    assert not found.parity.passed
    assert found.culprit.endswith("says that attngraph made it from this model.")


def test_a_right_file_of_another_exporter_passes(tmp_path: Path) -> None:
    model = _model("infinite")
    assert model.module is not None
    path = tmp_path / "other.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model.module, model.args, str(path), dynamo=True, verbose=False)
    found = _verify(path, "infinite")
    assert found.passed, found.parity
    assert found.weights is None
