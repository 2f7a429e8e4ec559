"""The ranks that write or read a checkpoint together: an error on one of them is raised on all.

They communicate over a gloo group of their own, so that a thread can do it while other threads train.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ... import _torch
from ..errors import CheckpointError

Result = TypeVar("Result")
# Minimum timeout once all ranks have come, for writing or reading: one may have much more to do than another.
_DISK = timedelta(hours=1)
_SHOWN = 4
# By world, and the ranks in it.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


class Ranks:
    """The ranks of the model's mesh, or of the given group, which do `what` (the same sentence on all ranks)."""

    def __init__(self, model: nn.Module, given: dist.ProcessGroup | None, what: str, remedy: str):
        self.what, self._remedy = what, remedy
        self.ranks = _members(model, given)
        self.number = self.ranks.index(dist.get_rank()) if dist.is_initialized() else 0
        self._channel: _Channel | None = None
        if len(self.ranks) > 1:
            try:
                self._channel = _Channel(tuple(self.ranks))
            except RuntimeError as error:
                raise self._missing_rank("some rank", error) from error

    @property
    def first(self) -> bool:
        return self.number == 0

    def agree(self, work: Callable[[], Result]) -> Result:
        """Return this rank's result, once all ranks have one."""
        own: list[Result] = []
        self._report_and_answer(lambda: own.append(work()))
        return own[0]

    def gather(self, work: Callable[[], Any]) -> list[Any]:
        """Return the results of all ranks, in order, on the first rank, and nothing elsewhere.

        They are sent as JSON.
        """
        return self._report_and_answer(work)[0]

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Return the first rank's result on all ranks. It is sent as JSON."""
        return self._report_and_answer(lambda: work() if self.first else None)[1]

    def _report_and_answer(self, work: Callable[[], Any]) -> tuple[list[Any], Any]:
        """Let all ranks do their work and report to the first rank, which answers all.

        Errors of any rank are raised on all.
        """
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        own_report = {"what": self.what, "result": result, "error": _described(failure), "known": _is_known(failure)}
        reports: list[dict[str, Any]] = [own_report]
        if self._channel is not None and not self.first:
            try:
                self._channel.send(own_report, 0)
                verdict = self._channel.receive(0)
            except RuntimeError as error:
                raise self._missing_rank(f"rank {self.ranks[0]}", error) from (failure or error)
        else:
            reports += [self._receive_report(number) for number in range(1, len(self.ranks))]
            verdict = {"error": self._verdict(reports), "result": result}
            for number in range(1, len(self.ranks)):
                self._send_verdict(number, verdict)
        if verdict["error"] is not None:
            raise CheckpointError(verdict["error"]) from failure
        if self._channel is not None:
            self._channel.timeout = max(self._channel.timeout, _DISK)
        return [report["result"] for report in reports] if self.first else [], verdict["result"]

    def _receive_report(self, number: int) -> dict[str, Any]:
        assert self._channel is not None
        try:
            return self._channel.receive(number)
        except RuntimeError as error:
            reason = str(self._missing_rank(f"rank {self.ranks[number]}", error))
            return {"what": self.what, "result": None, "error": reason, "known": True}

    def _send_verdict(self, number: int, verdict: dict[str, Any]) -> None:
        assert self._channel is not None
        try:
            self._channel.send(verdict, number)
        except RuntimeError as error:
            if verdict["error"] is None:  # it was there a moment ago, and others have been told of success
                raise self._missing_rank(f"rank {self.ranks[number]}", error) from error

    def _verdict(self, reports: list[dict[str, Any]]) -> str | None:
        """Return the one error message that all ranks raise, or None."""
        if any(report["what"] != self.what for report in reports):
            each = "\n".join(
                f"  rank {rank}: {report['what']}" for rank, report in zip(self.ranks, reports, strict=True)
            )
            return f"checkpoint: ranks do different things\n{each}\n  remedy: the same call on all ranks"
        by_error: dict[tuple[str, bool], list[int]] = {}
        for rank, report in zip(self.ranks, reports, strict=True):
            if report["error"] is not None:
                by_error.setdefault((report["error"], report["known"]), []).append(rank)
        texts = []
        for (error, known), ranks in by_error.items():
            where = "" if len(ranks) == len(self.ranks) else f"on rank {', '.join(map(str, ranks))}: "
            texts.append(f"{where}{error}" if known else
                         f"{where}{self.what} failed\n  reason: {error}\n  remedy: {self._remedy}")  # fmt: skip
        more = [f"and {len(texts) - _SHOWN} more errors on other ranks"] if len(texts) > _SHOWN else []
        return "\n".join([*texts[:_SHOWN], *more]) or None

    def _missing_rank(self, who: str, error: Exception) -> CheckpointError:
        reason = (str(error).splitlines() or [""])[0]
        return CheckpointError(
            f"{self.what} failed: {who} has ended, or takes no part\n  reason: {reason}\n"
            f"  remedy: call it on all ranks ({', '.join(map(str, self.ranks))}), not on one; look for the first error "
            f"in the other ranks' output; {self._remedy}"
        )


def _described(error: Exception | None) -> str | None:
    if error is None or isinstance(error, CheckpointError):
        return None if error is None else str(error)
    return f"{type(error).__name__}: {error}"


def _is_known(error: Exception | None) -> bool:
    return isinstance(error, CheckpointError)


def _members(model: nn.Module, given: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of the given group; or of the model's mesh, if it has exactly one; or all."""
    if not dist.is_initialized():
        return [0]
    meshes = {tensor.device_mesh for tensor in model.state_dict().values() if isinstance(tensor, DTensor)}
    ranks: list[int] = (
        dist.get_process_group_ranks(given) if given is not None
        else sorted(meshes.pop().mesh.flatten().tolist()) if len(meshes) == 1
        else list(range(dist.get_world_size()))
    )  # fmt: skip
    if dist.get_rank() not in ranks:
        raise CheckpointError(
            f"checkpoint: rank {dist.get_rank()} is none of those of the model's mesh, {ranks}\n"
            "  remedy: call it on these ranks only, or on all ranks with process_group=dist.group.WORLD"
        )
    return ranks


class _Channel:
    """Messages between the ranks of a checkpoint, at first with the timeout of the world."""

    def __init__(self, ranks: tuple[int, ...]):
        world = dist.group.WORLD
        assert world is not None, "several ranks are part of an initialised world"
        self.timeout = _torch.timeout_of(world)
        known = _groups.setdefault(world, {})
        if ranks not in known:
            known[ranks] = _torch.messages_between(ranks, "checkpoint", self.timeout)
        self._group = known[ranks]

    def send(self, message: dict[str, Any], to: int) -> None:
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        for tensor in (torch.tensor([len(data)]), data):
            # Through the group's own methods: they still work when a script ends and destroys the world while a thread
            # saves.
            self._group.send([tensor], to, 0).wait(self.timeout)

    def receive(self, sender: int) -> dict[str, Any]:
        size = torch.zeros(1, dtype=torch.int64)
        self._group.recv([size], sender, 0).wait(self.timeout)
        data = bytearray(int(size))
        self._group.recv([torch.frombuffer(data, dtype=torch.uint8)], sender, 0).wait(self.timeout)
        message: dict[str, Any] = json.loads(data)
        return message
