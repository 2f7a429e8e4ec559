"""What a plan's ranks send each other, against all pairs of them."""

from __future__ import annotations

from convmesh.geometry import HaloPlan, Interval


def check_that_ranks_agree(plan: HaloPlan) -> None:
    """A rank finds its peers without looking at all ranks, and every one finds the same."""
    ranks = range(len(plan.owned))
    expected = [
        (src, dst, common)
        for src in ranks
        for dst in ranks
        for part in plan.needed.parts(dst)
        if src != dst and (common := part & plan.owned[src])
    ]
    sent = [(src, dst, part) for src in ranks for dst, part in plan.sends(src)]
    received = [(src, dst, part) for dst in ranks for src, part in plan.receives(dst)]
    assert sent == expected
    assert sorted(received, key=lambda entry: entry[:2]) == expected
    whole = Interval(0, plan.size)
    assert plan.silent == (not expected)
    for rank in ranks:
        own = plan.owned[rank]
        missing = {i for part in plan.needed.parts(rank) for i in range((part & whole).start, (part & whole).stop)}
        assert plan.lacks(rank) == len(missing - set(range(own.start, own.stop)))
