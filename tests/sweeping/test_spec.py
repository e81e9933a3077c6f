"""A SPEC.toml as command lines, and what is wrong in one, by table and key."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from attngraph.errors import UsageError
from attngraph.sweeping.spec import Kind, Task, read_spec

FLAGS: dict[str, Kind] = {
    "target": "value",
    "factory": "value",
    "opset": "value",
    "exact": "switch",
    "decode": "switch",
    "dim": "list",
}
MODEL = '[[models]]\nname = "bert"\nmodel = "bert.pt2"\n'


def tasks(folder: Path, text: str) -> list[Task]:
    path = folder / "spec.toml"
    path.write_text(text)
    return read_spec(path, FLAGS)


def test_each_model_is_compiled_in_each_variant(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    found = tasks(
        tmp_path,
        f"""
[options]
exact = true
target = "cpu"

[[models]]
name = "bert"
model = "bert.pt2"
dim = ["batch=1..4", "seq=auto"]

[[models]]
name = "llama"
model = "{tmp_path}/llama"

[[models]]
name = "own"
factory = "my.model:build"
decode = true
exact = false

[[variants]]
name = "old"
opset = 21

[[variants]]
name = "gpu"
target = "cuda"
""",
    )
    assert [task.name for task in found] == [
        f"{model}/{variant}" for model in ("bert", "llama", "own") for variant in ("old", "gpu")
    ]
    dims = ("--dim", "batch=1..4", "--dim", "seq=auto")
    assert found[0].arguments == ("bert.pt2", "--exact", "--target", "cpu", *dims, "--opset", "21")
    assert found[1].arguments == ("bert.pt2", "--exact", "--target", "cuda", *dims)
    factory = ("--factory", "my.model:build", "--decode")
    assert found[5].arguments == ("--target", "cuda", *factory)
    assert [task.output(Path("out")) for task in found[1::2]] == [
        Path("out/bert/gpu/model.onnx"), Path("out/llama/gpu"), Path("out/own/gpu")
    ]  # fmt: skip


def test_without_variants_a_task_has_the_name_of_its_model(tmp_path: Path) -> None:
    (task,) = tasks(tmp_path, MODEL)
    assert (task.name, task.arguments) == ("bert", ("bert.pt2",))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "names no models: give each a table [[models]]."),
        ("models = 3", "models are tables, each written [[models]]."),
        ("[models]\nname = 'a'", "models are tables, each written [[models]]."),
        (f"[[sweeps]]\n{MODEL}", "has a table 'sweeps'; it can have options, models, variants."),
        (f"options = 1\n{MODEL}", "options is a table, written [options]."),
        ("[[models]]\nmodel = 'a'", "has the name None; give it one of letters"),
        ("[[models]]\nname = '../a'\nmodel = 'a'", "has the name '../a'; give it one of letters"),
        ("[[models]]\nname = '..'\nmodel = 'a'", "has the name '..'; give it one of letters"),
        ("[[models]]\nname = 'sweep.json'\nmodel = 'a'", "which doesn't end in .html or .json."),
        (f"{MODEL}{MODEL.replace('bert', 'BERT')}", "two of [[models]] are called BERT"),
        ("[[models]]\nname = 'a'", "a has no model; give it model = PATH, or a factory."),
        ("[[models]]\nname = 'a'\nmodel = 3", "the model of a is 3; it is a path in quotes."),
        (f"{MODEL}tarket = 'cpu'", "sets tarket, which is no option of optimize; did you mean"),
        (f"{MODEL}output = 'x'", "sets output, which is no option of optimize; see attngraph"),
        (f"{MODEL}exact = 'yes'", "exact of bert is 'yes'; it is true or false."),
        (f"{MODEL}target = true", "target of bert is True; it is a text or a number."),
        (f"{MODEL}target = ['cpu']", "target of bert is ['cpu']; it is a text or a number."),
        (f"{MODEL}dim = [['a']]", "it is a text or a number, or a list of them."),
        ("models = [", "is no TOML: "),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        tasks(tmp_path, text)
    assert sentence in str(caught.value)
    assert "spec.toml" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        read_spec(tmp_path / "none.toml", FLAGS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = " + "[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("x = " + "9" * 100_000, "a number in it is too long"),
        (".".join("a" * 100_000) + " = 1", "10000 of them dots"),
        ("#" * (1 << 20) + "#", "1048576 bytes"),
    ],
    ids=["brackets", "digits", "dots", "long"],
)
def test_a_hostile_file_is_refused_at_no_cost(text: str, said: str, tmp_path: Path) -> None:
    begin = time.process_time()
    with pytest.raises(UsageError, match=said):
        tasks(tmp_path, text)
    assert time.process_time() - begin < 10


def test_a_file_of_many_models_is_read(tmp_path: Path) -> None:
    many = [MODEL.replace('"bert"', f'"bert{n}"') for n in range(2_000)]
    assert len(tasks(tmp_path, "".join(many))) == 2_000
