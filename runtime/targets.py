"""How many labels of a batch are trained, known on the host, so that nobody waits for a device to count them.

A batch counts its labels when it is copied to a device (`VarlenBatch.to`), and what was counted is remembered
beside the copy, for as long as that tensor lives and is not changed. Where labels come from elsewhere nothing
is known of them. A change by way of `labels.data` is none that torch counts: fewer trained labels do no harm,
and with more of them the fused loss is infinite, since nobody could tell on the host.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from padless.runtime.format import IGNORE_INDEX


class Targets(NamedTuple):
    """Labels of one tensor that are trained."""

    trained: int
    most: int | None
    """How many there are at most in every batch of this shape (`pad_batch`), where that was said."""


_KNOWN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def count_targets(labels: Tensor) -> int:
    """Trained labels of a tensor; waits for a device."""
    return int(torch.count_nonzero(labels != IGNORE_INDEX))


def remember_targets(labels: Tensor, targets: Targets) -> None:
    """Says how many labels on a device are trained."""
    if not labels.is_inference():  # whether it is changed afterwards nobody could tell
        _KNOWN[labels] = (labels._version, targets)


def known_targets(labels: Tensor) -> Targets | None:
    """What was remembered of labels, unless they were changed since."""
    version, targets = _KNOWN.get(labels, (None, None))  # type: ignore[no-untyped-call]
    known = targets is not None and not labels.is_inference() and version == labels._version
    return cast(Targets, targets) if known else None
