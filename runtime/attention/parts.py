"""A row cut in two where its long sequences end: each part by the library that is fastest at it.

Packs of `bfd`, `ffd` and `optimal` have their longest sequences first, so that a part is a slice of q, k and
v. Rows in which long and short ones alternate stay whole: they would have to be gathered. The price is a
copy of the result and of each gradient, to have both parts of it in one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from padless.runtime.attention.backend import Forward, Options
from padless.runtime.attention.boundaries import Boundaries


def cut(boundaries: Boundaries, longest: int) -> tuple[Boundaries, Boundaries] | None:
    """The row's two parts in order, one of sequences of at most `longest` tokens, the other of longer ones.

    None where sequences of a kind do not stand together, or all are of one. Waits for a device where only
    that knows the boundaries.
    """
    long = [length > longest for length in boundaries.lengths()]
    changes = [at for at in range(1, len(long)) if long[at] != long[at - 1]]
    if len(changes) != 1:
        return None
    return boundaries.between(0, changes[0]), boundaries.between(changes[0], len(long))


def attend_in_parts(
    parts: Sequence[tuple[Boundaries, Forward]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    boundaries: Boundaries,
    options: Options,
) -> Tensor:
    """What backends give for each part of the row, one part behind the other."""
    sizes = [part.tokens for part, _ in parts]
    qs, ks, vs = (torch.split(x, sizes) for x in (q, k, v))
    return torch.cat(
        [forward(q, k, v, part, options) for (part, forward), q, k, v in zip(parts, qs, ks, vs, strict=True)]
    )
