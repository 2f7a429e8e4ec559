"""Jumping ahead in torch's CPU generator, without drawing the numbers in between.

The generator is mt19937. It has a block of 624 words, returns them one by one, and then makes the next block from them.
Each step is linear over bits, so the words `x` follow a recurrence whose characteristic polynomial `P` is known. If
`t^n mod P` is the sum of `t^i` over some `i`, then `x[n + j]` is the exclusive or of `x[i + j]` over the same `i`: any
later word is the sum of about half of 19937 consecutive words. The output of the generator is an invertible linear
function of its words, so the same sums hold for the output.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch

WORDS, MIDDLE, TWIST, DEGREE = 624, 397, 0x9908B0DF, 19937  # of mt19937
BITS = 6  # of a polynomial that are looked up in a table at once

# Where a generator's state has, in bytes and then in integers of 4 and of 8 of them: how many words, and one more, are
# left of the block; which is next; and the block, with 8 bytes for each word.
SIZE, LEFT, NEXT, BLOCK = 5056, 2, 2, slice(3, 3 + WORDS)


def is_generator_of(device: torch.device) -> bool:
    """Whether this device's random numbers come from this generator, one after the other."""
    return device.type == "cpu"


def advanced(state: torch.Tensor, words: int) -> torch.Tensor:
    """Return the generator's state, byte for byte, after `words` more words."""
    result = state.clone()
    if words:
        given = WORDS + 1 - int(state.view(torch.int32)[LEFT])
        blocks, last = divmod(given + words - 1, WORDS)
        if blocks:
            result.view(torch.int64)[BLOCK] = _block(state, blocks - 1)
        result.view(torch.int32)[LEFT] = WORDS - last
        result.view(torch.int64)[NEXT] = last + 1
    return result


@cache
def can_advance() -> bool:
    """Whether torch's generator is the one described here."""
    generator = torch.Generator().manual_seed(1)
    if generator.get_state().numel() != SIZE:
        return False
    for numbers in (3, WORDS // 2, DEGREE):  # the last is twice as many words, which takes the polynomial
        expected = advanced(generator.get_state(), 2 * numbers)
        torch.empty(numbers, dtype=torch.int64).random_(generator=generator)
        if not torch.equal(generator.get_state(), expected):
            return False
    return True


def _block(state: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return a later block, counted from the next one, which is the first that follows the recurrence after seeding."""
    digits = _power(blocks)
    length = len(digits) * BITS + WORDS
    near = _next_words(state, length + BITS)
    # Rows have sums of words of which each is up to `BITS - 1` further on: all that a digit can mean.
    table = torch.empty(2**BITS, length, dtype=torch.int32)
    table[0] = 0
    for bit in range(BITS):
        torch.bitwise_xor(table[: 2**bit], near[bit : bit + length], out=table[2**bit : 2 ** (bit + 1)])
    pairs = table.view(torch.int64)
    windows = pairs.as_strided((len(pairs), len(digits), WORDS // 2), (length // 2, BITS // 2, 1))
    sums = windows[digits, torch.arange(len(digits))]
    while len(sums) > 1:
        half = len(sums) // 2
        sums[:half].bitwise_xor_(sums[-half:])
        sums = sums[: len(sums) - half]
    return _untempered(sums[0].view(torch.int32))


def _next_words(state: torch.Tensor, count: int) -> torch.Tensor:
    """Return the generator's outputs from its next block on."""
    state = state.clone()
    state.view(torch.int32)[LEFT] = 1
    generator = torch.Generator()
    generator.set_state(state)
    pairs = torch.empty(count // 2, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return pairs.view(torch.int32).view(-1, 2).flip(1).view(-1)  # the first word of a pair is its higher half


def _untempered(given: torch.Tensor) -> torch.Tensor:
    """Invert the tempering: return the words from the outputs. Each line inverts one step."""
    word = given.long() & 0xFFFFFFFF
    word ^= word >> 18
    word ^= word << 15 & 0xEFC60000
    for mask in (0x1680, 0xC4000, 0xD200000, 0x90000000):  # seven bits after the other, of 0x9D2C5680
        word ^= word << 7 & mask
    return word ^ word >> 11 ^ word >> 22


@lru_cache(maxsize=256)
def _power(blocks: int) -> torch.Tensor:
    """t^(624 blocks) modulo the characteristic polynomial, as digits of some bits, the lowest first."""
    power = 1
    for bit in f"{blocks:b}":
        power = int(f"{power:b}", 4)  # the square: a zero after every bit
        power = _remainder(power << WORDS if bit == "1" else power)
    return torch.tensor([power >> at & 2**BITS - 1 for at in range(0, power.bit_length(), BITS)])


def _remainder(polynomial: int) -> int:
    """Return the remainder modulo the characteristic polynomial, computed eight bits at a time."""
    multiples = _multiples()
    for at in range(max(0, polynomial.bit_length() - DEGREE) // 8 * 8, -1, -8):
        polynomial ^= multiples[polynomial >> DEGREE + at] << at
    return polynomial


@cache
def _multiples() -> list[int]:
    """Return multiples of the characteristic polynomial, indexed by their bits above its degree."""
    found = [0]
    for bit in range(8):
        found += [multiple ^ _characteristic() << bit for multiple in found]
    return sorted(found, key=lambda multiple: multiple >> DEGREE)


@cache
def _characteristic() -> int:
    """Return the characteristic polynomial (Matsumoto and Nishimura, 1998); bit `i` is the coefficient of `t^i`."""
    polynomial, steps = TWIST >> 31, 1
    for bit in range(30, -2, -1):
        back = 0 if bit == 30 else 1
        steps = steps << WORDS - back ^ steps << MIDDLE - back
        polynomial ^= steps if bit < 0 or TWIST >> bit & 1 else 0
    return polynomial
