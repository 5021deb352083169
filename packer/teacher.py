"""A teacher's best candidates for each token, from tokenized records to columns of the shards.

    {"input_ids": [T], "teacher_ids": [T][K], "teacher_logprobs": [T][K]}    row t is about token t

They become `teacher_ids` (int32) and `teacher_logprobs` (float32), K for each token, in all records.
While chunks are worked on they lie in the file that otherwise has weights, with each token's weight: 8 K + 4
bytes a token of disk, which no other data pay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.errors import InputError, RecordError
from padless.runtime.format import ColumnInfo

if TYPE_CHECKING:
    from padless.packer.formats.examples import Columns, Tokens
    from padless.packer.prepared import Prepared
    from padless.packer.sources import SourceFile
    from padless.packer.tables import SplitLines
    from padless.packer.token_store import ChunkStore

IDS, LOGPROBS = "teacher_ids", "teacher_logprobs"
WEIGHT = "loss_weight"
_MOST_LOGPROB = 1e-3
"""Logarithms of probabilities are 0 or less, but for rounding."""
_MOST_IN_ALL = 1.05
"""What the candidates of a token add up to is 1 or less, but for rounding: bfloat16 has three digits."""


def kind_of(candidates: int) -> np.dtype[Any]:
    """What is stored for a token with so many candidates."""
    return np.dtype([(WEIGHT, "<f4"), (IDS, "<i4", (candidates,)), (LOGPROBS, "<f4", (candidates,))])


def read(row: Mapping[str, Any], columns: Columns, labels: Sequence[int]) -> NDArray[np.void] | None:
    """[tokens] of `kind_of`, weights 0; None where the record has no teacher. Raises RecordError.

    `labels` [tokens], below 0 where not trained: there many have nothing, and write zeros.
    """
    tokens = len(labels)
    names = [columns.find(row, name) for name in (IDS, LOGPROBS)]
    given = [None if name is None else row[name] for name in names]
    if given == [None, None]:
        return None
    if None in given:
        there, missing = (IDS, LOGPROBS) if given[1] is None else (LOGPROBS, IDS)
        raise RecordError(f"it has {there} and no {missing}: give both, or neither")
    ids, logprobs = (_table(value, name, tokens) for value, name in zip(given, (IDS, LOGPROBS), strict=True))
    if ids.dtype.kind not in "iu":
        raise RecordError(f"{IDS} must be whole numbers")
    if ids.shape != logprobs.shape:
        raise RecordError(f"{IDS} has {ids.shape[1]} candidates a token and {LOGPROBS} {logprobs.shape[1]}")
    if not np.isfinite(logprobs).all() or logprobs.max(initial=0) > _MOST_LOGPROB:
        raise RecordError(f"{LOGPROBS} must be logarithms of probabilities: finite, and 0 or less")
    in_all = np.exp(logprobs.astype(np.float64)).sum(axis=1)
    in_all[:1] = 0  # nothing predicts the first token
    if (places := np.flatnonzero((in_all > _MOST_IN_ALL) & (np.asarray(labels) >= 0))).size:
        raise RecordError(
            f"{LOGPROBS} of token {places[0]} add up to a probability of {in_all[places[0]]:.4g}, and all "
            "there are make 1: give log_softmax of the teacher's logits, of candidates that are different"
        )
    found = np.zeros(tokens, dtype=kind_of(ids.shape[1]))
    if ids.min(initial=0) < 0 or ids.max(initial=0) > np.iinfo(np.int32).max:
        raise RecordError(f"{IDS} has {ids.min()} to {ids.max()}, which are no ids of tokens")
    found[IDS], found[LOGPROBS] = ids, logprobs
    return found


def _table(value: Any, name: str, tokens: int) -> NDArray[Any]:
    """[tokens, K]; nothing predicts the first token, so its row may be null."""
    if not isinstance(value, list) or len(value) != tokens:
        size = f"{len(value)} entries" if isinstance(value, list) else type(value).__name__
        raise RecordError(f"{name} has {size} for {tokens} input_ids: a list of candidates for each token")
    if value and value[0] is None:
        value = [[0] * len(value[1]) if len(value) > 1 and isinstance(value[1], list) else [0], *value[1:]]
    try:
        found = np.array(value)
    except (ValueError, OverflowError):
        found = np.empty(0, dtype=object)
    if value and (found.ndim != 2 or not found.shape[1] or found.dtype.kind not in "iuf"):
        raise RecordError(f"{name} must be lists of equally many numbers, one list for each token")
    return found.reshape(tokens, -1) if value else np.zeros((0, 1), dtype=np.int64)


def check_chunk(found: Prepared) -> None:
    """See that all tokenized records of a chunk have a teacher of as many candidates, or none has one."""
    kinds = [(n, None if one.teacher is None else one.teacher.dtype) for n, one in found.tokens]
    first = next((kind for _, kind in kinds if kind is not None), None)
    for number, kind in kinds:
        if kind != first and first is not None:
            found.problem(
                found.record_of(number),
                f"it has {_said(kind)} and others {_said(first)}: give as many for all records, or none",
            )


def values_of(
    given: Sequence[tuple[int, Tokens]],
    records: NDArray[np.int64],
    offsets: NDArray[np.int64],
    weights: NDArray[np.float32] | None,
) -> NDArray[np.void] | None:
    """[tokens] of `kind_of`: the candidates of a chunk's records and the weights of their tokens, 0: none."""
    kind = next((one.teacher.dtype for _, one in given if one.teacher is not None), None)
    if kind is None:
        return None
    found = np.zeros(int(offsets[-1]), dtype=kind)
    for record, one in given:
        at = int(np.searchsorted(records, record))
        if (
            at < len(records)
            and records[at] == record
            and one.teacher is not None
            and one.teacher.dtype == kind
        ):
            found[offsets[at] : offsets[at + 1]] = one.teacher
    if weights is not None:
        found[WEIGHT] = weights
    return found


def enter(store: ChunkStore, splits: Sequence[SplitLines], files: Sequence[SourceFile]) -> None:
    """Give the splits the teacher's columns, where there are any. InputError where only some records have."""
    sizes = {entry.weighted: files[entry.source].name for entry in store.entries.values() if entry.tokens}
    size = max(sizes, default=0)
    if size <= 4:
        return
    for other, name in sizes.items():
        if other != size:
            kinds = [None if one <= 4 else kind_of((one - 4) // 8) for one in (other, size)]
            raise InputError(
                f"{name} has records with {_said(kinds[0])}, and {sizes[size]} some with {_said(kinds[1])}: "
                "give as many for all records, or pack them into folders of their own"
            )
    candidates = (size - 4) // 8
    for split in splits:
        split.kind = kind_of(candidates)
        split.is_weighted = store.weighs
        split.token_extras = tuple(
            ColumnInfo(name=name, level="token", type=f"list<fixed_size_list<{kind}, {candidates}>>")
            for name, kind in ((IDS, "int32"), (LOGPROBS, "float32"))
        )


def _said(kind: np.dtype[Any] | None) -> str:
    return (
        "no teacher's candidates" if kind is None else f"{kind[IDS].shape[0]} candidates of a teacher a token"
    )
