"""Weights meet the module that a factory builds, or the file and the key are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attngraph.errors import LoadError, UsageError
from attngraph.frontend.files.load import load
from tests.load.model_files import FACTORY, IDS, run, write_pt2, write_safetensors


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_a_checkpoint_may_nest_its_state_dict(
    key: str, model: torch.nn.Module, tmp_path: Path
) -> None:
    torch.save({"epoch": 3, key: model.state_dict()}, tmp_path / "m")
    assert torch.equal(run(load(tmp_path / "m", factory=FACTORY), IDS), model(IDS))


@pytest.mark.parametrize("factory", ["load_fixture:tied", "load_fixture:on_meta"])
def test_a_tied_weight_stays_one_parameter(
    factory: str, model: torch.nn.Module, tmp_path: Path
) -> None:
    write_safetensors(model, tmp_path / "m")
    loaded = load(tmp_path / "m", factory=factory).module
    assert loaded is not None
    assert loaded.get_parameter("head.weight") is loaded.get_parameter("embed.weight")
    assert torch.equal(loaded(IDS), model(IDS))


def test_weights_are_cast_to_the_modules_dtype(model: torch.nn.Module, tmp_path: Path) -> None:
    torch.save({k: v.half() for k, v in model.state_dict().items()}, tmp_path / "m")
    loaded = load(tmp_path / "m", factory=FACTORY).module
    assert loaded is not None
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_tied_weights_that_differ_in_the_file_are_refused(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    weights = dict(model.state_dict())
    weights["head.weight"] = weights["head.weight"] + 1
    torch.save(weights, tmp_path / "m")
    with pytest.raises(LoadError, match=r"embed\.weight and head\.weight are one tied parameter"):
        load(tmp_path / "m", factory=FACTORY)


def test_weights_that_do_not_fit_name_the_first_keys(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    weights = dict(model.state_dict())
    renamed = {k.replace("norm", "ln"): v for k, v in weights.items()}
    torch.save(renamed, tmp_path / "renamed")
    torch.save({**weights, "norm.bias": torch.zeros(5)}, tmp_path / "shape")
    keys = r"2 missing \(norm.weight, norm.bias\) and 2 unexpected \(ln.weight, ln.bias\)"
    with pytest.raises(LoadError, match=keys):
        load(tmp_path / "renamed", factory=FACTORY)
    with pytest.raises(LoadError, match=r"norm.bias is \(5,\) in the file and \(4,\)"):
        load(tmp_path / "shape", factory=FACTORY)


def test_weights_without_a_factory_ask_for_one(model: torch.nn.Module, tmp_path: Path) -> None:
    write_safetensors(model, tmp_path / "m")
    with pytest.raises(LoadError, match="pass --factory"):
        load(tmp_path / "m")


def test_a_factory_is_enough_and_its_sample_inputs_come_along() -> None:
    alone = load(None, factory="load_fixture:tied")
    assert (alone.args, alone.kwargs, alone.dynamic_shapes) == (None, {}, None)
    assert alone.module is not None
    assert not alone.module.training
    args = load(None, factory="load_fixture:with_args").args
    assert args is not None
    assert torch.equal(args[0], IDS)
    assert list(load(None, factory="load_fixture:with_kwargs").kwargs) == ["ids"]
    assert load(None, factory="load_fixture:with_shapes").dynamic_shapes == {"ids": None}


@pytest.mark.parametrize(
    ("factory", "error", "reason"),
    [
        ("load_fixture", UsageError, "not of the form pkg.mod:fn"),
        ("no_such_module:fn", UsageError, "no module 'no_such_module'"),
        ("load_fixture:nothing", UsageError, "no function 'nothing'; it has broken, exits, on"),
        ("load_fixture:broken", LoadError, "failed: ValueError: no such size"),
        ("load_fixture:exits", LoadError, "exits ends the program .SystemExit: 0., as a parser"),
        ("load_fixture:wrong", LoadError, "returned a str; return a module"),
        ("load_fixture:on_meta", LoadError, "no values for embed.weight"),
    ],
)
def test_a_factory_that_fails_says_why(factory: str, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        load(None, factory=factory)


def test_a_factory_does_not_go_with_a_file_that_brings_its_model(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    write_pt2(model, tmp_path / "m")
    with pytest.raises(UsageError, match="leave out --factory"):
        load(tmp_path / "m", factory=FACTORY)
    with pytest.raises(UsageError, match="give a model file, or --factory"):
        load(None)
