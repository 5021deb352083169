"""Planning strategies by name: lengths in, plan out.

A new one is one file with one pure function and one line in STRATEGIES; the command line's
choices, the tests and the benchmark read the dict.
"""

from __future__ import annotations

from typing import Protocol

from numpy.typing import ArrayLike

from padless.packer.plan import PackPlan
from padless.packer.strategies.bfd import bfd
from padless.packer.strategies.none import none


class Strategy(Protocol):
    """Plans `seq_lengths`, [N] in tokens, into packs of at most `max_length` tokens.

    The same arguments give the same plan. Raises InputError for what no plan can hold.
    """

    def __call__(
        self,
        seq_lengths: ArrayLike,
        max_length: int,
        *,
        max_sequences_per_pack: int | None = None,
        seed: int = 0,
    ) -> PackPlan: ...


STRATEGIES: dict[str, Strategy] = {"bfd": bfd, "none": none}
