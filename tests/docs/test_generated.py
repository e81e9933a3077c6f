"""What a script wrote into the documentation is what it would write now; what it says is true."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

from attngraph.cli import exit_codes
from attngraph.cli.app import app
from attngraph.errors import AttngraphError
from docs import generate

ROOT = Path(__file__).parents[2]
_PINNED = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
_PARTS = [
    pytest.param(page, name, id=f"{page.name}-{name}")
    for page in generate.pages()
    for name in generate.parts_of(page)
]


def test_every_part_has_a_maker_and_every_maker_a_part() -> None:
    names = [name for page in generate.pages() for name in generate.parts_of(page)]
    assert sorted(names) == sorted(generate.MAKERS)


@pytest.mark.parametrize(("page", "name"), _PARTS)
def test_a_generated_part_is_up_to_date(page: Path, name: str) -> None:
    if _PINNED is None or version("torch").partition("+")[0] != _PINNED[1]:
        pytest.skip("generated with the torch of constraints.txt")
    made = generate.MAKERS[name]()
    assert _without_errors(generate.parts_of(page)[name]) == _without_errors(made), "run: make docs"


def _without_errors(text: str) -> str:
    """Rounding errors, such as 5.0e-07, depend on the processor."""
    return re.sub(r"\b\d\.\de-\d\d\b", "…", text)


def test_the_exit_codes_of_the_readme_are_those_there_are() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    said = re.search(r"The exit code tells its kind: ([^.]+)\.", readme)
    assert said is not None
    known = {kind.exit_code for kind in AttngraphError.__subclasses__()}
    known |= {exit_codes.INTERNAL, exit_codes.INTERRUPTED, exit_codes.TERMINATED}
    assert {int(code) for code in re.findall(r"\d+", said[1])} == known


def test_links_lead_somewhere() -> None:
    for page in generate.pages():
        for target in _LINK.findall(page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_files_and_targets_that_are_named_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for page in generate.pages():
        text = _without_generated(page)
        for target in re.findall(r"`make ([\w-]+)`|^make ([\w-]+)$", text, re.MULTILINE):
            assert target[0] in targets or target[1] in targets, f"{page.name}: make {target}"
        for path in re.findall(r"\b(?:attngraph|passes|export|tests|examples)/[\w/.-]+\.\w+", text):
            assert (ROOT / path).exists() or page.name == "CONTRIBUTING.md", f"{page.name}: {path}"


def test_the_commands_of_the_docs_are_ones_that_the_program_takes() -> None:
    """Arguments and flags, parsed and not run; those with a placeholder are left out."""
    group: Any = typer.main.get_command(app)
    texts = [page.read_text("utf-8").replace("\\\n", " ") for page in generate.pages()]
    blocks = [
        line
        for text in texts
        for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    helped = [
        " ".join(part.replace("\\[", "[").split())
        for command in group.commands.values()
        for part in (command.help or "").split("\n\n")
    ]
    command_line = re.compile(r"\s*(?:\$ |- run: |run: )?attngraph (\w.*)")
    found = map(command_line.match, blocks + helped)
    lines = [match[1] for match in found if match]
    assert len(lines) > 20
    for line in lines:
        name, *given = shlex.split(line.partition(" > ")[0], comments=True)
        group.commands[name].make_context(name, given).close()


def _without_generated(page: Path) -> str:
    return generate._PART.sub("", page.read_text("utf-8"))


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text("utf-8")
    for source in re.findall(r"^```python\n(.*?)^```$", readme, re.S | re.M):
        exec(compile(source, "README.md", "exec"), {})
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "decoder.onnx"}
    assert "fused" in capsys.readouterr().out
