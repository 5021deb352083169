"""Where the tokens of a split's sequences come from, as the writer of shards sees it.

A pack's tokens are gathered by one `take` over a binary array laid on the mapped store, an element a
sequence: a copy per sequence, no index per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from padless.runtime.format import IGNORE_INDEX, IMAGES

if TYPE_CHECKING:
    import pyarrow as pa

WEIGHT = np.dtype("<f4")
"""What most folders store beside a token: its weight in the loss."""
LOSS_WEIGHT = "loss_weight"


def has_weight(kind: np.dtype[Any]) -> bool:
    """Whether what is stored beside tokens has their weight."""
    return kind.names is None or LOSS_WEIGHT in kind.names


class BatchGather(Protocol):
    """Where the tokens of a record batch's sequences come from; all are numbered as in their split."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """[sequences]: their tokens."""

    @property
    def ids(self) -> NDArray[Any] | None:
        """[sequences]: each one's line of the sequence table; None: its own number."""

    def tokens(self, sequences: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The ids of these sequences, one after the other, and the targets of each."""

    def labels(self, sequences: NDArray[Any]) -> NDArray[np.int32]:
        """Their labels likewise."""

    def extra(self, name: str, sequences: NDArray[Any]) -> NDArray[Any]:
        """An extra column of these sequences: [sequences], or the values of all their tokens."""


class Gather(Protocol):
    """Where the tokens of a split's sequences come from, one record batch at a time."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """[sequences]: their tokens."""

    @property
    def is_weighted(self) -> bool:
        """Whether the tokens have weights, some of which are not 1."""

    def of_batch(self, first: int, sequences: NDArray[Any]) -> BatchGather:
        """What gives the tokens of these sequences: one record batch's, whose first pack is `first`."""


@dataclass(frozen=True)
class StoreGather:
    """Sequences as elements of a binary array over the mapped token store."""

    binary: pa.Array
    elements: NDArray[np.int32]
    """[sequences]: the element that holds each."""
    lengths: NDArray[np.int32]
    ids: NDArray[Any] | None
    """[sequences]: each one's line of the sequence table; None: its own number."""
    weights: pa.Array | None = None
    """The weights of the tokens, in elements like theirs."""
    extras: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Sequence-level columns, [sequences] each."""
    cut: bool = False
    """Fragments, of which all but the first token is trained, whatever the store says."""
    kind: np.dtype[Any] = WEIGHT
    """What `weights` have for a token: a number, or several columns (of rollouts, of a teacher)."""
    images: pa.Array | None = None
    """What is told of images, by the elements that `extras` has for them; None: it has the texts."""
    let_go: Callable[[], None] = lambda: None
    """Takes what is mapped of the store out of this process's memory until it is touched again."""

    def of_batch(self, first: int, sequences: NDArray[Any]) -> BatchGather:
        return self

    def tokens(self, sequences: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        ids, trained, starts = self._signed(sequences)
        counts: NDArray[np.int64] = -np.add.reduceat(trained, starts, dtype=np.int64)
        return ids, counts

    def labels(self, sequences: NDArray[Any]) -> NDArray[np.int32]:
        ids, trained, _ = self._signed(sequences)
        ids -= IGNORE_INDEX
        ids &= trained
        ids += IGNORE_INDEX
        return ids

    def _signed(
        self, sequences: NDArray[Any]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
        """Their ids, all ones where a token is trained, and where each sequence begins."""
        values = self.values(sequences)
        lengths = self.lengths[sequences]
        starts: NDArray[np.int64] = np.cumsum(lengths, dtype=np.int64) - lengths
        # Ten times as fast as np.where: all ones where trained, and -1 - t is ~t.
        trained = values >> 31
        ids = values ^ trained
        if self.cut:  # elsewhere than in the store, so the starts marked there are not these
            trained[:] = -1
            trained[starts] = 0
        return ids, trained, starts

    def values(self, sequences: NDArray[Any]) -> NDArray[np.int32]:
        """The stored tokens of these sequences, one after the other."""
        return np.frombuffer(self._taken(self.binary, sequences), dtype="<i4")

    def stored_weights(self, sequences: NDArray[Any]) -> NDArray[Any]:
        """What is stored beside their tokens, of `kind` each."""
        return np.frombuffer(self._taken(self.weights, sequences, self.kind.itemsize), dtype=self.kind)

    @property
    def is_weighted(self) -> bool:
        return self.weights is not None and has_weight(self.kind)

    def extra(self, name: str, sequences: NDArray[Any]) -> NDArray[Any]:
        if name in self.extras:
            column: NDArray[Any] = self.extras[name][sequences]
            return self._texts(column) if name == IMAGES and self.images is not None else column
        stored = self.stored_weights(sequences)
        if self.kind.names is not None and name != LOSS_WEIGHT:
            return np.ascontiguousarray(stored[name])
        found: NDArray[np.float32] = (stored if self.kind.names is None else stored[LOSS_WEIGHT]).copy()
        found[found == 0] = 1  # the record gives none
        trained = self.values(sequences) < 0
        if self.cut:  # as in `fill`
            lengths = self.lengths[sequences]
            trained[:] = True
            trained[np.cumsum(lengths, dtype=np.int64) - lengths] = False
        found[~trained] = 0
        return found

    def _texts(self, elements: NDArray[Any]) -> NDArray[Any]:
        """What is told of the images of these elements: [elements] str."""
        import pyarrow as pa

        assert self.images is not None
        indexes = pa.Array.from_buffers(pa.int32(), len(elements), [None, pa.py_buffer(elements)])
        found = np.full(len(elements), "", dtype=object)
        found[:] = [item.as_py().decode("ascii") for item in self.images.take(indexes)]
        return found

    def _elements(self, sequences: NDArray[Any]) -> NDArray[np.int32]:
        found: NDArray[np.int32] = self.elements[sequences]
        return found

    def _taken(self, binary: pa.Array, sequences: NDArray[Any], size: int = 4) -> pa.Buffer:
        import pyarrow as pa

        elements = self._elements(sequences)
        indexes = pa.Array.from_buffers(pa.int32(), len(elements), [None, pa.py_buffer(elements)])
        taken = binary.take(indexes)
        tokens = int(self.lengths[sequences].sum(dtype=np.int64))
        return taken.buffers()[2].slice(0, tokens * size)
