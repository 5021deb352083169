"""The columns of sequences in memory, joined: what a value is, and how long it has to be.

Rollouts come from engines and reward functions of all sorts, as arrays, tensors and lists. A thousand are
packed in a millisecond, so what can be done once a column is not done once a value. numpy takes most of what
is wrong without a word (None becomes an object, integers become floats), so each column is looked at as it
is joined.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from padless.runtime.arrays import Array
from padless.runtime.errors import CollateError
from padless.runtime.schema import NONE_IS

_MOST = 2**63 - 1
Blanks = Callable[[np.dtype[Any], tuple[int, ...]], list[Array]]


def rows_of(sequences: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The sequences as a list; CollateError for none, and for what are no dicts."""
    if isinstance(sequences, Mapping):
        raise CollateError(
            f"the sequences are one {type(sequences).__name__}; give a list with a dict for each sequence"
        )
    try:
        rows = list(sequences)
    except TypeError:
        raise CollateError(
            f"the sequences are {type(sequences).__name__}; give a list with a dict for each sequence"
        ) from None
    if not rows:
        raise CollateError("there are no sequences to pack; give at least one")
    _refuse_no_dict(0, rows[0])
    return rows


def _refuse_no_dict(number: int, one: Any) -> None:
    if not isinstance(one, Mapping):
        raise CollateError(
            f"sequence {number} is {type(one).__name__}; give a dict with input_ids, or with prompt_ids and "
            "response_ids"
        )


def column(sequences: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """What the sequences have under a name; CollateError where one has nothing, or is no dict."""
    try:
        return [one[name] for one in sequences]
    except (KeyError, TypeError, IndexError) as problem:
        for number, one in enumerate(sequences):
            _refuse_no_dict(number, one)
            if name not in one:
                raise CollateError(
                    f"a sequence has no {name}, and all have the same names; it has {', '.join(one)}"
                ) from problem
        raise


def token_counts(name: str, values: Sequence[Any]) -> Array:
    """How many ids each sequence has by a name, [sequences] int64; CollateError for what has no length."""
    if isinstance(values[0], torch.Tensor):  # whose len takes seven times as long
        try:
            return np.fromiter(map(torch.Tensor.numel, values), dtype=np.int64, count=len(values))
        except TypeError:  # others among them
            pass
    try:
        return lengths_of(values)
    except TypeError:
        number, value = next(
            (number, value)
            for number, value in enumerate(values)
            if not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0
        )
        raise CollateError(
            f"{name} of sequence {number} is {type(value).__name__}; give its token ids, in one dimension"
        ) from None


def lengths_of(arrays: Sequence[Any]) -> Array:
    """[arrays] int64."""
    return np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))


def interleaved(some: list[Array], others: list[Array]) -> list[Array]:
    """One of each in turn."""
    parts = [*some, *others]
    parts[::2], parts[1::2] = some, others
    return parts


def blanks_of(sizes: Array) -> Blanks:
    """Zeros of these sizes, of the type and shape that is asked for: made once for columns that are alike."""
    most, each = int(sizes.max()), sizes.tolist()

    @cache
    def blanks(kind: np.dtype[Any], shape: tuple[int, ...]) -> list[Array]:
        zeros = np.zeros((most, *shape), dtype=kind)
        return [zeros[:size] for size in each]

    return blanks


def arrays_of(name: str, values: Sequence[Any], numbers: Sequence[int]) -> list[Array]:
    """Each value as numpy has it; CollateError for one that it cannot read, such as a tensor of bfloat16."""
    kinds = set(map(type, values))
    if kinds == {np.ndarray}:
        return list(values)
    if kinds <= {list, tuple} and (of_lists := _of_lists(values)):
        return of_lists
    if kinds == {torch.Tensor} and (of_tensors := _of_tensors(values)):
        return of_tensors
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


def _of_tensors(tensors: Sequence[torch.Tensor]) -> list[Array] | None:
    """Views of their join, at half the time of one after the other; None where it would change their types.

    None too for those without dimensions, elsewhere than in memory, or with a gradient.
    """
    if len({one.dtype for one in tensors}) > 1:
        return None
    try:
        flat = torch.cat(list(tensors)).numpy()
        sizes = [one.shape[0] for one in tensors]
    except (TypeError, RuntimeError, IndexError):
        return None
    return [flat[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _of_lists(lists: Sequence[Sequence[Any]]) -> list[Array] | None:
    """Lists of Python's own numbers through struct, at half the time of numpy.

    int64 where all begin with a whole number, float32 where none does; None for anything else, and for what
    only numpy tells apart.
    """
    kinds = {type(one[0]) for one in lists if one}
    if kinds not in ({int}, {float}):
        return None
    code, kind = ("f", np.float32) if kinds == {float} else ("q", np.int64)
    try:
        packed = [struct.pack(f"{len(one)}{code}", *one) for one in lists]
    except struct.error:  # a number of the other kind, no number, or one too large
        return None
    return [np.frombuffer(one, dtype=kind) for one in packed]


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
    name: str,
    values: list[Any],
    sizes: list[int],
    *,
    before: Blanks | None = None,
    numbers: Sequence[int],
    per: str,
) -> Array:
    """A column by token as one array, [tokens, ...]: of each sequence the zeros of `before`, then the values.

    Raises CollateError where a sequence has not `sizes` of them (`per` names the tokens they go by), or
    values of another kind or shape than the others.
    """
    arrays = arrays_of(name, values, numbers)
    counts = [len(array) if array.ndim else -1 for array in arrays]
    if counts != sizes:
        at = next(at for at, (count, size) in enumerate(zip(counts, sizes, strict=True)) if count != size)
        given = f"{len(arrays[at])} entries" if arrays[at].ndim else "a number"
        raise CollateError(
            f"{name} of sequence {numbers[at]} has {given} for {sizes[at]} {per}: one for each token, "
            "unshifted"
        )
    # An empty list is one of floats to numpy, and says nothing of the column.
    some = arrays if all(sizes) else [array for array in arrays if len(array)] or arrays[:1]
    kind = some[0].dtype
    if isinstance(values[0], list | tuple):
        kind = _as_in_torch(np.result_type(*{array.dtype for array in some}))
    if kind.kind not in "biuf":
        raise CollateError(f"{name} of a sequence holds {kind}; columns by token are numbers")
    if before is not None:
        arrays = interleaved(before(kind, some[0].shape[1:]), arrays)
    if not all(sizes):
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


def _as_in_torch(kind: np.dtype[Any]) -> np.dtype[Any]:
    """Python's floats as torch takes them."""
    return np.dtype(np.float32) if kind == np.float64 else kind
