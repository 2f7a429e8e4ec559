"""The command line, and the page that it writes."""

from pathlib import Path

import pytest

from convmesh.cli import main, markdown
from convmesh.sharding.registry import declared

PAGE = Path(__file__).parent.parent / "docs" / "operators.md"


def test_the_page_of_operators_is_current() -> None:
    assert PAGE.read_text() == markdown(), "convmesh operators --markdown > docs/operators.md"


def test_every_operator_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operators", "--markdown"]) == 0
    shown = capsys.readouterr().out
    for operator in declared():
        assert f"`{operator._schema.name.removeprefix('aten::')}`" in shown


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operators"]) == 0
    shown = capsys.readouterr().out
    assert "convolution_backward" in shown
    assert "what travels" in shown


def test_an_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fly"])
    assert "invalid choice" in capsys.readouterr().err
