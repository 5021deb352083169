"""The columns of sequences in memory, joined: what a value is, how long it has to be, what is refused.

Rollouts come from engines and reward functions of all sorts, as arrays, tensors and lists. numpy takes most
of what is wrong with them without a word (None becomes an object, integers become floats), so each column is
looked at once as it is joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from padless.runtime.arrays import Array
from padless.runtime.errors import CollateError
from padless.runtime.format import IGNORE_INDEX
from padless.runtime.schema import NONE_IS

_MOST = 2**63 - 1


def column(sequences: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """What the sequences have under a name; CollateError where one has nothing."""
    try:
        return [one[name] for one in sequences]
    except KeyError:
        at = next(place for place, one in enumerate(sequences) if name not in one)
        raise CollateError(
            f"a sequence has no {name}, and all have the same names; it has {', '.join(sequences[at])}"
        ) from None


def refuse_further(sequences: Sequence[Mapping[str, Any]], *, but: Sequence[str]) -> None:
    """CollateError for a name that the first sequence lacks: what it has would be left out in silence."""
    first = sequences[0]
    if max(map(len, sequences)) <= len(first) and not but:
        return
    for number, one in enumerate(sequences):
        if more := [name for name in one if name not in first and name not in but]:
            raise CollateError(f"sequence {number} has {more[0]}, and sequence 0 has none: give all or none")


def lengths_of(arrays: Sequence[Any]) -> Array:
    """[arrays] int64."""
    return np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))


def interleaved(some: list[Array], others: list[Array]) -> list[Array]:
    """One of each in turn."""
    return [part for pair in zip(some, others, strict=True) for part in pair]


def arrays_of(name: str, values: Sequence[Any], numbers: Sequence[int]) -> list[Array]:
    """Each value as numpy has it; CollateError for one that it cannot read, such as a tensor of bfloat16."""
    found = []
    for number, value in zip(numbers, values, strict=True):
        try:
            found.append(np.asarray(value))
        except (ValueError, TypeError, RuntimeError) as problem:
            raise CollateError(
                f"{name} of sequence {number} cannot be read: {problem}; give lists or arrays of numbers, "
                "and tensors as tensor.detach().float().cpu() makes them"
            ) from None
    return found


def ids_of(sequences: Sequence[Mapping[str, Any]], name: str, numbers: Sequence[int]) -> list[Array]:
    """A column of token ids, [tokens] of whole numbers each."""
    arrays = arrays_of(name, column(sequences, name), numbers)
    for at, array in enumerate(arrays):
        if array.ndim == 1 and array.dtype.kind in "iu":
            continue
        if array.ndim != 1 or len(array):
            raise CollateError(
                f"{name} of sequence {numbers[at]} is {array.dtype} {[*array.shape]}; ids are whole numbers "
                "in one dimension"
            )
        arrays[at] = array.astype(np.int64)  # an empty list is one of floats to numpy
    return arrays


def by_token(
    name: str, values: list[Any], sizes: Array, before: Array, *, numbers: Sequence[int], per: str
) -> Array:
    """A column by token as one array, [sum of sizes and before, ...]: `before` zeros, then the values.

    Raises CollateError where a sequence has not `sizes` of them (`per` names the tokens they go by), or
    values of another kind or shape than the others.
    """
    arrays = arrays_of(name, values, numbers)
    try:
        wrong = np.flatnonzero(lengths_of(arrays) != sizes)
    except TypeError:  # a number, which has no length
        wrong = np.flatnonzero([array.ndim == 0 for array in arrays])
    if wrong.size:
        at = int(wrong[0])
        given = f"{len(arrays[at])} entries" if arrays[at].ndim else "a number"
        raise CollateError(
            f"{name} of sequence {numbers[at]} has {given} for {sizes[at]} {per}: one for each token, "
            "unshifted"
        )
    some = [array for array in arrays if len(array)] or arrays[:1]
    kind = some[0].dtype
    if isinstance(values[0], list | tuple):
        kind = _as_in_torch(np.result_type(*{array.dtype for array in some}))
    if kind.kind not in "biuf":
        raise CollateError(f"{name} of a sequence holds {kind}; columns by token are numbers")
    if before.any():
        zeros = np.zeros((int(before.max()), *some[0].shape[1:]), dtype=kind)
        arrays = interleaved([zeros[:size] for size in before.tolist()], arrays)
    arrays = [array for array in arrays if len(array)] or some
    try:
        return np.concatenate(arrays, dtype=kind, casting="same_kind")
    except (ValueError, TypeError) as problem:
        raise CollateError(f"{name} is not alike in all sequences: {problem}") from None


def by_sequence(name: str, values: list[Any]) -> list[str] | Array:
    """A column by sequence: numbers as an array [sequences], strings as they are; CollateError for others.

    A column that says with -1 that there is nothing is of a type that has it: true and false become 1 and 0.
    """
    if all(isinstance(value, str) for value in values):
        return values
    try:
        found = np.asarray(values)
    except (ValueError, TypeError, RuntimeError):  # arrays among them, or tensors that numpy cannot read
        found = np.empty(0, dtype=object)
    if found.ndim != 1 or found.dtype.kind not in "biuf":
        kinds = sorted({type(value).__name__ for value in values})
        raise CollateError(
            f"{name} is {' and '.join(kinds)} in the sequences; numbers or strings go by sequence, arrays by "
            "token, alike in all"
        )
    if found.dtype.kind == "u" and int(found.max(initial=0)) > _MOST:
        raise CollateError(f"{name} is {found.max()} in a sequence; whole numbers go up to {_MOST}")
    kind = _as_in_torch(found.dtype)
    if name in NONE_IS and kind.kind in "bu":
        kind = np.dtype(np.int8 if kind.kind == "b" else np.int64)
    return found.astype(kind, copy=False)


def refuse_nan(name: str, values: Array, labels: Array, lengths: Array, numbers: Sequence[int]) -> None:
    """CollateError where a trained token has NaN, which would make the gradient of the whole step NaN.

    `values` [tokens, ...], or [sequences], each of which is that of all its tokens.
    """
    if values.dtype.kind != "f" or not (bad := np.isnan(values)).any():
        return
    of_tokens = bad.reshape(len(bad), -1).any(axis=1)
    if len(values) == len(lengths) != len(labels):
        of_tokens = of_tokens.repeat(lengths)
    if (places := np.flatnonzero(of_tokens & (labels != IGNORE_INDEX))).size:
        raise CollateError(
            f"{name} of sequence {whose(places, lengths, numbers)} has NaN at a trained token: leave the "
            "sequence out, or mask the token (response_mask)"
        )


def refuse_ids(ids: Array, lengths: Array, numbers: Sequence[int]) -> None:
    """CollateError for ids below 0, such as those that fill up rows; so are ids over int64 by now."""
    if ids.min(initial=0) < 0:
        places = np.flatnonzero(ids < 0)
        raise CollateError(
            f"sequence {whose(places, lengths, numbers)} has the id {ids[places[0]]}, which is no token's: "
            "give its tokens alone, without padding"
        )


def refuse_labels(labels: Array, ids: Array, lengths: Array, numbers: Sequence[int]) -> None:
    """CollateError for labels that are neither the token itself nor -100, such as shifted ones."""
    if (places := np.flatnonzero((labels != ids) & (labels != IGNORE_INDEX))).size:
        raise CollateError(
            f"labels of sequence {whose(places, lengths, numbers)} have {labels[places[0]]} where its ids "
            f"have {ids[places[0]]}: labels are unshifted, each the token itself or {IGNORE_INDEX}"
        )


def refuse_mask(name: str, mask: Array, lengths: Array, numbers: Sequence[int]) -> None:
    """CollateError for a mask of anything but 0 and 1."""
    if (places := np.flatnonzero((mask != 0) & (mask != 1))).size:
        raise CollateError(
            f"{name} of sequence {whose(places, lengths, numbers)} has {mask[places[0]]}; it is 0 or 1 (or "
            "false and true) for each token"
        )


def refuse_padding(masks: list[Any], numbers: Sequence[int]) -> None:
    """CollateError for an attention mask that leaves out tokens: those would be trained like any others."""
    for number, mask in zip(numbers, arrays_of("attention_mask", masks, numbers), strict=True):
        if not (mask == 1).all():
            raise CollateError(
                f"attention_mask of sequence {number} is not 1 for all its tokens: give them alone, without "
                "padding"
            )


def whose(places: Array, lengths: Array, numbers: Sequence[int]) -> int:
    """The number of the sequence in which the first of these places among all tokens lies."""
    return numbers[int(np.searchsorted(np.cumsum(lengths), places[0], side="right"))]


def _as_in_torch(kind: np.dtype[Any]) -> np.dtype[Any]:
    """Python's floats as torch takes them."""
    return np.dtype(np.float32) if kind == np.float64 else kind
