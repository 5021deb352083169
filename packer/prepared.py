"""A chunk on its way from records to tokens: what was asked for, and what rendering made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padless.packer.formats.examples import Rollout, Tokens
from padless.packer.lines import MALFORMED, Problem
from padless.packer.marks import Marked
from padless.packer.sources import Chunk
from padless.runtime.format import PackedImage

LONGEST_MESSAGE = 600
"""Characters: a message may quote a record, and a record may be a book."""


class Task(NamedTuple):
    """A chunk and what the parent found out about its source."""

    chunk: Chunk
    format: str
    split: int = 0
    """Number of the split that the source goes to."""
    take: int | None = None
    """Only the first so many records (`limit`)."""
    name: str = ""
    """The source's name in the manifest."""


class Batch(NamedTuple):
    """Records that are encoded together, in the order of `records`."""

    records: list[int]
    parts: Marked
    plain: bool
    """Special tokens spelled in the text stay text."""
    is_chat: bool
    before: NDArray[np.int8] | None = None
    """[texts]: what `Fim` puts before each, where its pieces are the texts; None: a text is a record."""


@dataclass
class Prepared:
    """A chunk rendered; `finish` needs the encoder and this.

    What it calls records by are the numbers of examples, which are those of the records but where a record
    gives several (see packer/several.py).
    """

    task: Task
    count: int
    lines: Sequence[int] | None
    drops_bad: bool = False
    """Malformed records are dropped; otherwise each is a problem."""
    batches: list[Batch] = field(default_factory=list)
    shielded: list[tuple[int, str, str, dict[str, str]]] = field(default_factory=list)
    """(record, marked text, marks, stand-ins): records that spell special tokens inside a chat."""
    tokens: list[tuple[int, Tokens]] = field(default_factory=list)
    dropped: dict[int, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    untrained: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Which of a record's assistant turns (0: the first) are not trained."""
    weights: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """The weights of a record's assistant turns (0: the first), where they are not 1."""
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    images: dict[int, list[PackedImage]] = field(default_factory=dict)
    """Those of an example, in the order of their placeholders."""
    empty_replies: list[int] = field(default_factory=list)
    eval_records: NDArray[np.bool_] | None = None
    """[records]: which go to the evaluation side by their content; None: all go to the task's split."""
    replaced: int = 0
    is_clear: bool = False
    """No text in its records has a control character that JSON must escape, or spells a special token."""
    owners: list[int] | None = None
    """[examples]: the record that each is of; None: every record is one example."""
    verdicts: list[int] = field(default_factory=list)
    """[examples], where there are owners."""
    margins: dict[int, float] = field(default_factory=dict)
    """Of records with pairs, where it is not 0."""

    def record_of(self, example: int) -> int:
        return example if self.owners is None else self.owners[example]

    @property
    def size(self) -> int:
        """Bytes of text held."""
        return sum(int(batch.parts.offsets[-1]) for batch in self.batches)

    def bad(self, record: int, message: str) -> None:
        """Drop a malformed record, or make it a problem, as the policy says."""
        if self.drops_bad:
            self.dropped[record] = MALFORMED
        else:
            self.problem(self.record_of(record), message)

    def problem(self, number: int, message: str) -> None:
        """Say why record `number` (not an example) stops the build."""
        line = self.lines[number] if self.lines is not None else None
        short = message if len(message) <= LONGEST_MESSAGE else message[:LONGEST_MESSAGE] + " ..."
        self.problems.append(Problem(number, line, short))

    def in_halves(self, items: list[Any], render: Callable[[Prepared, list[Any]], None]) -> None:
        """No three marks are free in all of the records together: try with fewer of them."""
        if len(items) == 1:
            self.bad(items[0][0], "it uses nearly every control character; is it binary data?")
            return
        middle = len(items) // 2
        render(self, items[:middle])
        render(self, items[middle:])
