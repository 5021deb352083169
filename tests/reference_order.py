"""The order of packs the slow, obvious way, in Python's whole numbers: what streams must equal.

Independent of `padless.runtime.order` by design, one pack at a time.
"""

from __future__ import annotations

BITS = 2**64 - 1
WINDOW = 256


def mix(number: int) -> int:
    """SplitMix64's finalizer."""
    number = (number + 0x9E3779B97F4A7C15) & BITS
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & BITS
    return number ^ (number >> 31)


def order_of(size: int, seed: int, epoch: int) -> list[int]:
    """All packs in the order of an epoch: a Feistel network of four rounds, walked until inside the size."""
    bits = max(size - 1, 1).bit_length()
    low = bits // 2
    high = bits - low
    base = mix((mix(seed) + epoch) & BITS)
    keys = [mix((base + number) & BITS) for number in range(8)]
    order = []
    for number in range(size):
        while True:
            left, right = number >> low, number % 2**low
            for place in range(0, 8, 2):
                left ^= mix(right ^ keys[place]) % 2**high
                right ^= mix(left ^ keys[place + 1]) % 2**low
            number = left * 2**low + right
            if number < size:
                break
        order.append(number)
    return order


def balanced_order_of(costs: list[int], group: int, seed: int, epoch: int) -> list[int]:
    """The order in which steps of `group` packs of like cost come, window after window."""
    order = order_of(len(costs), seed, epoch)
    size = max(1, WINDOW // group) * group
    balanced = []
    for start in range(0, len(order), size):
        packs = sorted(order[start : start + size], key=lambda pack: -costs[pack])
        whole = len(packs) // group
        for step in order_of(whole, seed + start, epoch) if whole else ():
            balanced += packs[step * group : (step + 1) * group]
        balanced += packs[whole * group :]
    return balanced
