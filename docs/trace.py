"""Draws what a rank with the tests' stand-in accelerator does during a convolution: `python -m docs.trace`."""

from __future__ import annotations

from docs.draw import COLOURS, Picture
from tests.accelerator.overlap import START, WAIT, Event, convolution
from tests.accelerator.ranks import results

LEFT, WIDTH = 110, 620
SHOWN = 0.04  # of the width: narrower bars have no name


def main() -> None:
    """Of rank 0, the events of both passes on an axis of their own."""
    traced: dict[str, list[Event]] = results(convolution)[0]
    picture = Picture(LEFT + WIDTH + 30, 250, "A trace of a convolution: operators run while the exchange is under way")
    for row, (name, events) in enumerate(traced.items()):
        _axis(picture, 14 + row * 118, name, events)
    picture.save("trace.svg")


def _axis(picture: Picture, top: float, name: str, events: list[Event]) -> None:
    first, last = min(event.began for event in events), max(event.ended for event in events)

    def at(time: float) -> float:
        return LEFT + (time - first) / (last - first) * WIDTH

    def bar(y: float, began: float, ended: float, text: str, colour: int) -> None:
        width = max(1.0, at(ended) - at(began))
        picture.box(at(began), y, width, 28, COLOURS[colour], 0.85)
        if width > max(SHOWN * WIDTH, 7.2 * len(text)):
            picture.text(at(began) + width / 2, y + 19, text, "inside middle small")

    names = [event.name for event in events]
    began, waited = events[names.index(START)], events[names.index(WAIT)]
    picture.text(LEFT - 12, top + 19, "exchange", "end")
    bar(top, began.began, waited.ended, "halo under way", 1)
    picture.text(LEFT - 12, top + 53, "operators", "end")
    for event in events:
        if event.name not in (START, WAIT):
            bar(top + 34, event.began, event.ended, event.name, 0 if event.name.startswith("convolution") else 2)
    picture.line((LEFT, top + 72), (LEFT + WIDTH, top + 72), arrow=True, kind="faint")
    picture.text(LEFT, top + 90, f"{name} pass of rank 0, {1000 * (last - first):.0f} ms; blue: convolution", "small")


if __name__ == "__main__":
    main()
