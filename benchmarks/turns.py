"""Processes that take turns: each runs the same work in its own way, and none changes another's memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any


class Contender:
    """A process of its own that answers questions: `answers` is made in it, and its methods are called."""

    def __init__(self, answers: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, answers, args), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, method: str, *args: Any) -> Any:
        self._line.send((method, args))
        answer = self._line.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self) -> None:
        self._line.close()
        self._process.join()


class Contenders:
    """Some of them, by name."""

    def __init__(self, makers: Mapping[str, tuple[Any, ...]]) -> None:
        self.all = {name: Contender(*maker) for name, maker in makers.items()}

    def ask_all(self, method: str, *args: Any) -> dict[str, Any]:
        """One after the other."""
        return {name: contender.ask(method, *args) for name, contender in self.all.items()}

    def __enter__(self) -> Contenders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for contender in self.all.values():
            contender.end()


def _serve(line: Connection, answers: Callable[..., Any], args: tuple[Any, ...]) -> None:
    answering = answers(*args)
    while True:
        try:
            method, of = line.recv()
        except EOFError:
            return
        try:
            line.send(getattr(answering, method)(*of))
        except Exception as error:  # which is the caller's to see
            line.send(error)
