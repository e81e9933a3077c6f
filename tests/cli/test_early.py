"""What is wrong with a command line itself is told before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

OUT = ("-o", "out.onnx")
MODEL = ("model.pt2", *OUT)
FILES = {
    "notes.txt": "not a model",
    "bert/config.json": '{"architectures": ["BertModel"], "model_type": "bert"}',
    "bert/model.safetensors": "never read",
    "held/thesis.tex": "to be kept",
}
LINES = {
    ("optimize", "nosuch.pt", *OUT): "nosuch.pt does not exist; check the path.",
    ("optimize", *OUT): "There is no model: give a model file, or --factory pkg.mod:fn.",
    ("optimize", "notes.txt", *OUT): "notes.txt is not a model file attngraph reads",
    ("optimize", "--factory", "build", *OUT): "--factory 'build' is not of the form pkg.mod:fn",
    (
        "optimize",
        "--factory",
        "a:b",
        *OUT,
        "--inputs",
        "no.npz",
    ): "--inputs no.npz does not exist; check the path.",
    ("optimize", *MODEL, "--target", "tpu"): "There is no target 'tpu': use cpu, cuda, or cuda:",
    ("optimize", *MODEL, "--assume", "luck"): "assume names 'luck'; it can be no-fully-masked-rows",
    ("optimize", *MODEL, "--provider-option", "a=1"): "CPUExecutionProvider has no option 'a'",
    ("optimize", *MODEL, "--max-length", "8"): "are for --decode; add it.",
    ("optimize", *MODEL, "--decode", "--cache", "static"): "A static cache needs max_length",
    ("optimize", *MODEL, "--decode", "--ignore-padded-rows"): "--ignore-padded-rows is for",
    ("optimize", *MODEL, "--decode", "--present", "a"): "--present 'a' doesn't parse; write PAST=",
    ("optimize", "bert", "-o", "nosuch/out"): "There is no folder nosuch; create it",
    ("optimize", "bert", "-o", "notes.txt"): "notes.txt is a file; give a folder, or a name",
    ("optimize", "bert", "-o", "bert/out"): "are one inside the other; choose another path.",
    ("optimize", "bert", "-o", "held"): "held holds thesis.tex, which isn't written here",
    ("explain", "nosuch.pt"): "nosuch.pt does not exist; check the path.",
    ("explain", "nosuch.pt", "--target", "tpu"): "There is no target 'tpu'",
    ("verify", "model.pt2", "nosuch.onnx"): "There is no ONNX file 'nosuch.onnx'; check",
    ("verify", "nosuch.onnx"): "verify takes a model and an ONNX file",
    ("attend", "nosuch.pt", "-o", "out.html"): "nosuch.pt does not exist; check the path.",
    ("bench", "nosuch.onnx", "model.pt2"): "There is no ONNX file 'nosuch.onnx'; check the path.",
    ("bench", "nosuch.pt"): "nosuch.pt does not exist; check the path.",
}
PROGRAM = """
import contextlib, io, json, sys
from attngraph.cli import run

told = []
for line in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = run(line)
    told.append([code, said.getvalue(), "torch" in sys.modules or "onnxruntime" in sys.modules])
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], tuple[int, str, bool]]:
    """(exit code, sentence, whether torch was imported) of each line, all in one new process."""
    folder: Path = tmp_path_factory.mktemp("early")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(list(LINES)),
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there == FILES.keys()
    return dict(zip(LINES, json.loads(ran.stdout), strict=True))


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_a_wrong_line_is_told_without_torch(
    told: dict[tuple[str, ...], tuple[int, str, bool]], line: tuple[str, ...]
) -> None:
    code, sentence, has_torch = told[line]
    assert code not in (0, 70)
    assert sentence.startswith("attngraph: error: ")
    assert LINES[line] in sentence
    assert not has_torch
