"""Splits of the sources and of what comes out: which are taken, and which are to be evaluated on.

A split keeps the name that its source gives it, as the name of its folder. Whether it is for evaluation
(packed with the evaluation strategy) is told by the words in its name, so `test_sft` is and `train_sft` is
not; a name that says neither is trained on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from padless.packer.errors import InputError

TRAIN, VALIDATION, TEST = "train", "validation", "test"
ALL = "all"
WORDS = {
    TRAIN: ("train", "training"),
    VALIDATION: ("validation", "valid", "val", "dev"),
    TEST: ("test", "testing", "eval", "evaluation"),
}
"""The words by which file names and splits tell what they are for."""

_NAME = re.compile(r"\w+([.-]\w+)*")
_TAKEN = frozenset({"tokenizer", "plans", ALL})
"""What lies beside a split's folder, and what is no split's name."""


def named_split(name: str) -> str | None:
    """The split that the words in a name stand for, or None."""
    words = [word.lower() for word in re.split(r"[^a-zA-Z]+", name)]
    return next((split for split, known in WORDS.items() if any(word in known for word in words)), None)


def is_for_evaluation(split: str) -> bool:
    """Whether a split is to be evaluated on; "" is a folder without splits."""
    return named_split(split) in (VALIDATION, TEST)


def are_several(split: str | None) -> bool:
    """Whether `--split` asks for a folder of splits."""
    return split is not None and (split == ALL or "," in split)


def choose_splits(splits: Iterable[str], split: str | None, where: str, is_eval: bool = False) -> list[str]:
    """The splits to take: as asked for, else `train` (for evaluation `validation`, or else `test`).

    Raises InputError, naming those that there are, for one that is missing, given twice or no folder's name.
    """
    names = list(splits)
    if split is None:
        wanted = [VALIDATION, TEST] if is_eval else [TRAIN]
        found = [name for name in wanted if name in names][:1]
        missing = [] if found else wanted[:1]
    else:
        found = names if split == ALL else [name.strip() for name in split.split(",")]
        missing = [name for name in found if name not in names]
    if missing:
        raise InputError(f"{where} has no split {missing[0]!r}; choose with --split: {', '.join(names)}")
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"--split {split} names {twice} twice; name every split once")
    if are_several(split):
        for name in found:
            if not _NAME.fullmatch(name) or name in _TAKEN:
                raise InputError(f"{where}: a split called {name!r} can be no folder; take it by itself")
    return found
