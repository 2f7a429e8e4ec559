"""The command line, and the page that it writes."""

from pathlib import Path

import pytest

from convmesh import ops
from convmesh.cli import main, markdown
from convmesh.sharding.registry import declared

PAGE = Path(__file__).parent.parent / "docs" / "operators.md"


def test_the_page_of_operators_is_current() -> None:
    assert PAGE.read_text() == markdown(), "convmesh operators --markdown > docs/operators.md"


def test_families_are_the_folders_of_the_rules() -> None:
    folders = {path.parent.name for path in Path(ops.__file__).parent.glob("[!_]*/__init__.py")}
    assert {behaviour.family for behaviour in declared().values()} == folders
    headings = [line.removeprefix("## ").lower() for line in PAGE.read_text().splitlines() if line.startswith("## ")]
    assert headings == sorted(folders)


def test_every_operator_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operators", "--markdown"]) == 0
    shown = capsys.readouterr().out
    for operator in declared():
        assert f"`{operator._schema.name.removeprefix('aten::')}`" in shown


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operators"]) == 0
    shown = capsys.readouterr().out
    assert "convolution_backward" in shown
    assert "communication" in shown


def test_an_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fly"])
    assert "invalid choice" in capsys.readouterr().err
