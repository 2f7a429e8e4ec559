"""Where the cache is, and which paths are the user's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from convmesh.user_cache import cache_directory, make_private, trusted
from tests.kernels.permissions import given_to_another


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CONVMESH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_directory() == Path("/home/somebody/.cache/convmesh")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")
    assert cache_directory() == Path("/var/caches/convmesh")
    monkeypatch.setenv("CONVMESH_CACHE", "here")
    monkeypatch.chdir(tmp_path)
    assert cache_directory() == tmp_path / "here"


def test_what_is_made_is_the_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]


def test_links_are_followed(tmp_path: Path) -> None:
    make_private(tmp_path / "real" / "inner")
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    (tmp_path / "relative").symlink_to("absolute/../real")
    assert trusted(tmp_path / "relative" / "inner") == Path(os.path.realpath(tmp_path)) / "real" / "inner"


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="too many symbolic links"):
        trusted(tmp_path / "a")


def test_a_sticky_directory_may_be_on_the_way_and_not_at_the_end(tmp_path: Path) -> None:
    make_private(tmp_path / "sticky" / "mine")
    (tmp_path / "sticky").chmod(0o1777)
    trusted(tmp_path / "sticky" / "mine")
    with pytest.raises(PermissionError, match="others can write"):
        trusted(tmp_path / "sticky")


@pytest.mark.parametrize("where", ["on the way", "behind a link", "behind a link in a writable directory"])
def test_every_step_of_the_way_is_looked_at(where: str, tmp_path: Path) -> None:
    make_private(tmp_path / "open" / "mine")
    make_private(tmp_path / "closed")
    (tmp_path / "closed" / "link").symlink_to(tmp_path / "open" / "mine")
    (tmp_path / "open" / "link").symlink_to(tmp_path / "closed")
    (tmp_path / "open").chmod(0o777)
    paths = {
        "on the way": tmp_path / "open" / "mine",
        "behind a link": tmp_path / "closed" / "link",
        "behind a link in a writable directory": tmp_path / "open" / "link",
    }
    with pytest.raises(PermissionError, match=r"others can write to .*open"):
        trusted(paths[where])


def test_a_link_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who planted it in a directory for all can point it at anything, also at what is mine."""
    make_private(tmp_path / "mine")
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    link = tmp_path / "sticky" / "link"
    link.symlink_to(tmp_path / "mine")
    given_to_another(link, monkeypatch)
    with pytest.raises(PermissionError, match="belongs to another user"):
        trusted(link)
