"""What counts as equal: rounding does, an error does not, nor ranks that differ."""

from typing import Any

import pytest
import torch

from tests.compare import assert_close, same_on_all_ranks


@pytest.mark.parametrize(
    ("dtype", "rounding", "error"),
    [
        (torch.float64, 1e-13, 1e-11),
        (torch.float32, 1e-6, 1e-3),
        (torch.float16, 1e-3, 1e-1),
        (torch.bfloat16, 5e-3, 1e-1),
    ],
)
def test_assert_close_tells_rounding_from_error(dtype: torch.dtype, rounding: float, error: float) -> None:
    expected = torch.linspace(-8, 8, 12, dtype=torch.float64).reshape(3, 4)
    assert_close((expected * (1 + rounding)).to(dtype), expected)
    wrong = expected.clone()
    wrong[1, 2] += 8 * error
    with pytest.raises(AssertionError, match=r"at \(1, 2\)"):
        assert_close(wrong.to(dtype), expected)


def test_assert_close_at_the_edges() -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    assert_close(special, special.clone())
    for index in range(3):
        wrong = special.clone()
        wrong[index] = 1.0
        for pair in ((special, wrong), (wrong, special)):
            with pytest.raises(AssertionError, match=rf"at \({index},\)"):
                assert_close(*pair)
    assert_close(torch.empty(0, 3), torch.empty(0, 3))
    assert_close(torch.tensor(2.0 + 1j), torch.tensor(2.0 + 1j))
    assert_close(torch.tensor([1e-9]), torch.tensor([0.0]), scale=1.0)
    # What is small beside others is compared with itself only if that is asked for.
    many, wrong = torch.tensor([1.0, 1e-10], dtype=torch.float64), torch.tensor([1.0, 1.001e-10], dtype=torch.float64)
    assert_close(wrong, many)
    with pytest.raises(AssertionError, match=r"at \(1,\)"):
        assert_close(wrong, many, elementwise=True)
    assert_close(many * (1 + 1e-13), many, elementwise=True)
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.zeros(1, 3), torch.zeros(3))
    with pytest.raises(AssertionError, match="allowed 0"):
        assert_close(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_same_on_all_ranks() -> None:
    tensor = torch.tensor([1.0, float("nan")])
    value = {"a": [tensor, 3], "b": None}
    assert same_on_all_ranks([value, {"a": [tensor.clone(), 3], "b": None}]) is value
    others: list[Any] = [{"a": [tensor, 3]}, {"a": [tensor], "b": None}, {"a": [tensor + 1, 3], "b": None}, tensor]
    for other in others:
        with pytest.raises(AssertionError, match="results 0 and 2 differ"):
            same_on_all_ranks([value, value, other])
    with pytest.raises(AssertionError, match="differ"):
        same_on_all_ranks([torch.zeros(2), torch.zeros(2, dtype=torch.float64)])
