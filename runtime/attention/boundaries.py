"""Where the sequences of a packed row begin and end: checked once a batch, used by every layer.

What a backend makes of the boundaries (a block mask, a list of lengths) is kept with them, so that the
first layer pays and the others do not. Values are looked at where that costs nothing, in host memory: a
look at boundaries on a device would wait for it. There only shape and type are checked, unless the copy
they came from is given as well; `collate` has checked the values of its batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from padless.runtime.errors import AttentionError

T = TypeVar("T")


class Boundaries:
    """Checked boundaries of N sequences in a row of T tokens, and what was made of them.

    `cu_seqlens` [N + 1] int32 on the device of q; `max_seqlen` at least the longest sequence's length;
    `tokens` T; `sequences` N. Boundaries equal to T at the end, as `pad_batch` makes them, belong to no
    sequence and are counted in N.
    """

    def __init__(
        self, cu_seqlens: Tensor, max_seqlen: int, tokens: int, *, on_host: Tensor | None = None
    ) -> None:
        """`on_host`: the same boundaries in host memory, where there is such a copy.

        Raises AttentionError for boundaries of another type than int32, that do not begin with 0, do not
        grow, do not end at T; for a max_seqlen that is no int, or shorter than the longest sequence.
        """
        _check_types(cu_seqlens, max_seqlen)
        if on_host is None and cu_seqlens.device.type == "cpu":
            on_host = cu_seqlens
        if on_host is not None and not torch.compiler.is_compiling():
            _check_values(on_host, max_seqlen, tokens)
        self.cu_seqlens = cu_seqlens
        self.max_seqlen = max_seqlen
        self.tokens = tokens
        self.sequences = cu_seqlens.shape[0] - 1
        self.calls: dict[Any, Any] = {}
        """What does calls of attention, by all that tells them apart; kept by `attend`, a batch long."""
        self._on_host = on_host
        self._made: dict[Any, Any] = {}

    def lengths(self) -> list[int]:
        """The sequences' lengths, without empty ones at the end; waits once for a device without a copy."""

        def read() -> list[int]:
            bounds = self.cu_seqlens.cpu() if self._on_host is None else self._on_host
            _check_values(bounds, self.max_seqlen, self.tokens)
            return [length for length in bounds.diff().tolist() if length]

        return self.made("lengths", read)

    def between(self, first: int, last: int) -> Boundaries:
        """Those of sequences `first` up to `last`, as of a row of their own; waits as `lengths` does."""
        lengths = self.lengths()
        begin = sum(lengths[:first])
        bounds = self.cu_seqlens[first : last + 1] - begin
        on_host = None if self._on_host is None else self._on_host[first : last + 1] - begin
        lengths = lengths[first:last]
        return Boundaries(bounds, max(lengths), sum(lengths), on_host=on_host)

    def mean_length(self) -> float | None:
        """Tokens of the sequence that a token lies in, on average; None where only a device knows.

        What a token's queries read grows with it, which the mean of sequences says nothing of where many are
        short and most tokens lie in long ones.
        """
        if self._on_host is None or torch.compiler.is_compiling():
            return None
        lengths = self._on_host.long().diff()
        return int((lengths * lengths).sum()) / max(1, self.tokens)

    def made(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` gives, made once for these boundaries under this key."""
        if key not in self._made:
            self._made[key] = make()
        return cast(T, self._made[key])


_SEEN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_ON_HOST: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def copied_from(cu_seqlens: Tensor, on_host: Tensor) -> None:
    """Says that boundaries on a device are a copy of these, so that nobody need wait for them."""
    if cu_seqlens.is_inference():  # whether it is changed afterwards nobody could tell
        return
    _ON_HOST[cu_seqlens] = (cu_seqlens._version, on_host.clone())


def _copy_of(cu_seqlens: Tensor) -> Tensor | None:
    version, on_host = _ON_HOST.get(cu_seqlens, (None, None))  # type: ignore[no-untyped-call]
    return on_host if version == cu_seqlens._version else None


class _Last(NamedTuple):
    """The last question asked of `boundaries_of`, by weak references, and the answer."""

    cu_seqlens: Callable[[], Tensor | None]
    version: int
    max_seqlen: int
    tokens: int
    boundaries: Callable[[], Boundaries | None]


_last: _Last | None = None


def boundaries_of(cu_seqlens: Tensor, max_seqlen: int, tokens: int) -> Boundaries:
    """Checked boundaries, the same object as long as the same tensor comes back unchanged.

    A model's layers are all handed one tensor, so checks and block masks are made once a batch.
    Raises what `Boundaries` raises.
    """
    global _last
    if torch.compiler.is_compiling():
        return Boundaries(cu_seqlens, max_seqlen, tokens)
    last = _last
    if (
        last is not None and cu_seqlens is not None and cu_seqlens is last.cu_seqlens()
        and cu_seqlens._version == last.version and max_seqlen is last.max_seqlen
        and tokens == last.tokens and (boundaries := last.boundaries()) is not None
    ):  # fmt: skip
        return boundaries
    _check_types(cu_seqlens, max_seqlen)
    if cu_seqlens.is_inference():  # has no version, so each call looks again
        return Boundaries(cu_seqlens, max_seqlen, tokens)
    key = (cu_seqlens._version, max_seqlen, tokens)
    seen = _SEEN.get(cu_seqlens)  # type: ignore[no-untyped-call]
    if seen is None or seen[0] != key:
        # Of the tensor only an alias is kept: otherwise the entry would keep its own key alive.
        seen = (key, Boundaries(cu_seqlens.detach(), max_seqlen, tokens, on_host=_copy_of(cu_seqlens)))
        _SEEN[cu_seqlens] = seen
    boundaries = cast(Boundaries, seen[1])
    _last = _Last(ref(cu_seqlens), cu_seqlens._version, max_seqlen, tokens, ref(boundaries))
    return boundaries


def _check_types(cu_seqlens: Tensor, max_seqlen: int) -> None:
    if not isinstance(cu_seqlens, Tensor):
        raise AttentionError(f"cu_seqlens are {type(cu_seqlens).__name__}; they must be a tensor")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise AttentionError(
            f"cu_seqlens are {cu_seqlens.dtype} {list(cu_seqlens.shape)}; they must be int32 [N + 1], N >= 1"
        )
    if not isinstance(max_seqlen, int | torch.SymInt) or isinstance(max_seqlen, bool):
        raise AttentionError(
            f"max_seqlen is a {type(max_seqlen).__name__}; it must be a Python int, known on the host when "
            "the batch is made (batch['max_length_q']): a tensor would be waited for in every layer"
        )


def _check_values(on_host: Tensor, max_seqlen: int, tokens: int) -> None:
    bounds = on_host.tolist()
    if bounds[0] != 0:
        raise AttentionError(f"cu_seqlens[0] is {bounds[0]}; the first sequence begins at 0")
    if bounds[-1] != tokens:
        raise AttentionError(
            f"cu_seqlens end at {bounds[-1]} and q has {tokens} tokens; every token belongs to a sequence"
        )
    longest = 0
    for index in range(1, len(bounds)):
        length = bounds[index] - bounds[index - 1]
        if length < 0:
            raise AttentionError(
                f"cu_seqlens[{index}] is {bounds[index]}, below {bounds[index - 1]} before it; they must grow"
            )
        if length == 0 and bounds[index] != tokens:
            raise AttentionError(
                f"cu_seqlens[{index}] repeats {bounds[index]}: a sequence without tokens; leave it out "
                f"(only the end, {tokens}, may be repeated)"
            )
        longest = max(longest, length)
    if max_seqlen < longest:
        raise AttentionError(f"max_seqlen is {max_seqlen} and the longest sequence has {longest} tokens")
