"""Several data sets in given shares: which examples an epoch takes of each, and in what order.

An epoch has as many examples as all sources hold together. Of each source it takes its share, going on where the epoch
before left off: a source smaller than its share is repeated, newly shuffled each time it begins again, and a larger one
is seen in part. All of it is a function of the seed, the epoch and the number of examples alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from bridge.errors import SpecError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """A source of a mixture: its weight, and how many of its examples are kept."""

    name: str
    weight: float
    examples: int


@dataclass(frozen=True)
class Mixture:
    """Sources that lie end to end in one `Examples`, in this order.

    Raises:
        SpecError: an epoch would have no example of a source.
    """

    shares: tuple[Share, ...]
    seed: int

    def __post_init__(self) -> None:
        starved = [
            f"{share.name}: weight {share.weight:g}"
            for share, quota in zip(self.shares, self.quotas, strict=True)
            if not quota
        ]
        if starved:
            raise SpecError(
                f"data.train: an epoch of {len(self)} examples has none of {len(starved)} source(s)",
                details=starved,
                hint="raise the weight, or leave the source out",
            )

    def __len__(self) -> int:
        return sum(share.examples for share in self.shares)

    @property
    def quotas(self) -> tuple[int, ...]:
        """Examples of each source in an epoch: shares of the whole, rounded by the largest remainder."""
        return largest_remainder(len(self), [share.weight for share in self.shares])

    def order(self, epoch: int) -> Indices:
        """The examples of an epoch, from 0, as indices over all sources, in the order in which they are taken."""
        parts, start = [], 0
        for number, (share, quota) in enumerate(zip(self.shares, self.quotas, strict=True)):
            parts.append(start + self._taken(number, share.examples, epoch * quota, (epoch + 1) * quota))
            start += share.examples
        return np.concatenate(parts)[permutation(len(self), self.seed, len(self.shares), epoch)]

    def _taken(self, number: int, count: int, first: int, stop: int) -> Indices:
        """Places `first` to `stop` of a source's endless sequence of shuffled passes."""
        passes = range(first // count, (stop - 1) // count + 1)
        shuffled = np.concatenate([permutation(count, self.seed, number, index) for index in passes])
        return shuffled[first - passes[0] * count : stop - passes[0] * count]


def permutation(count: int, *seed: int) -> Indices:
    """The numbers below `count` in an order that the seed's numbers decide, the same on every machine (PCG64)."""
    return np.random.Generator(np.random.PCG64(seed)).permutation(count)


def largest_remainder(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportion of the weights that add up to `total`; ties go to the first."""
    exact = [Fraction(weight) for weight in weights]
    shares = [total * weight / sum(exact) for weight in exact]
    found = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: (found[index] - shares[index], index))
    for index in by_remainder[: total - sum(found)]:
        found[index] += 1
    return tuple(found)
