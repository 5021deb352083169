"""Packs to one batch: everything a padding-free model is told, from the lengths that were stored.

    packs [3 1 | 2]  ->  input_ids     [a a a b | c c]   one row of T = 6 tokens, N = 3 sequences
                         position_ids  [0 1 2 0   0 1]
                         cu_seq_lens   [0 3 4 6]
                         labels        [_ a a _   _ c]   _ is -100, also at each sequence's start

There is no attention mask on purpose: an all-ones mask makes transformers attend across sequences.
At 2,048 tokens a batch the calls cost more than the bytes, so every array is written by one numpy
call, and the tensors are views of these arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from padless.runtime.arrays import Array
from padless.runtime.batch import Pack, derived_labels
from padless.runtime.errors import CollateError
from padless.runtime.format import IGNORE_INDEX
from padless.runtime.reader import PackedReader
from padless.runtime.schema import OWN_COLUMNS, ColumnInfo
from padless.runtime.varlen_batch import VarlenBatch

__all__ = ["VarlenBatch", "collate", "gather", "pack_from_row"]


_MAX_TOKENS = 2**31 - 1
_BLOCK = 1 << 14
_count_up: dict[type, Array] = {kind: np.arange(4096, dtype=kind) for kind in (np.int64, np.int32)}


def collate(packs: Sequence[Pack | Mapping[str, Any]], *, columns: Iterable[ColumnInfo] = ()) -> VarlenBatch:
    """Packs, or rows of `datasets.load_from_disk`, behind each other in one row.

    Rows may hold further columns where `columns` (the manifest's) says at which level each stands.
    Raises CollateError for no packs at all, for a row without boundaries, and for lengths that do
    not add up: a batch with wrong boundaries would train, and train something else.
    """
    if not packs:
        raise CollateError("there are no packs to collate; give at least one")
    levels = {column.name: column.level for column in columns}
    chosen = [pack if isinstance(pack, Pack) else pack_from_row(pack, levels) for pack in packs]
    lengths = _join([pack.seq_lengths for pack in chosen])
    _check(chosen, lengths)
    batch = _assemble(
        ids=[pack.input_ids for pack in chosen],
        labels=[pack.labels for pack in chosen],
        lengths=lengths,
        sequence_ids=[pack.sequence_ids for pack in chosen],
        longest=int(lengths.max()),
        num_targets=sum(pack.num_targets for pack in chosen),
    )
    if chosen[0].extras or len(chosen) > 1:
        batch.update(_extras(chosen))
    return batch


def gather(reader: PackedReader, numbers: Sequence[int]) -> VarlenBatch:
    """`collate([reader[number] for number in numbers])`, straight from the columns.

    The reader has checked its record batches, so that a pack costs some slices here: no Pack is
    made and nothing is checked again. Further columns and packs of a plan take the other way.
    """
    if reader.plan is not None or not numbers:
        return collate([reader[number] for number in numbers])
    ids: list[Array] = []
    labels: list[Array] = []
    lengths: list[Array] = []
    sequence_ids: list[Array] = []
    num_targets = longest = tokens = 0
    for number in numbers:
        batch, row = reader.place(number)
        if batch.extra_levels:
            return collate([reader[number] for number in numbers])
        values, offsets = batch.values, batch.offsets["input_ids"]
        # `item` gives a Python number at once; an element of an array is an object of its own.
        start, end = offsets.item(row), offsets.item(row + 1)
        ids.append(values["input_ids"][start:end])
        if "labels" in values:
            labels.append(values["labels"][start:end])
        tokens += end - start
        offsets = batch.offsets["seq_lengths"]
        start, end = offsets.item(row), offsets.item(row + 1)
        lengths.append(values["seq_lengths"][start:end])
        sequence_ids.append(values["sequence_ids"][start:end])
        num_targets += values["num_targets"].item(row)
        longest = max(longest, values["max_seqlen"].item(row))
    if tokens > _MAX_TOKENS:
        return collate([reader[number] for number in numbers])
    return _assemble(
        ids=ids,
        labels=labels,
        lengths=_join(lengths),
        sequence_ids=sequence_ids,
        longest=longest,
        num_targets=num_targets,
    )


def _assemble(
    *,
    ids: Sequence[Array],
    labels: Sequence[Array],
    lengths: Array,
    sequence_ids: Sequence[Array],
    longest: int,
    num_targets: int,
) -> VarlenBatch:
    """The batch of packs whose boundaries are right; no labels are the ids but for the starts."""
    sequences = len(lengths)
    boundaries = np.zeros(sequences + 1, dtype=np.int64)
    np.add.accumulate(lengths, out=boundaries[1:])
    starts, tokens = boundaries[:-1], boundaries.item(sequences)
    # One block for the long arrays, in sizes that come again: otherwise the allocator gives memory
    # back to the system with every batch, and new pages cost several times what it takes to fill
    # them (8 packs of 8,192 tokens: 190 page faults and 1 ms, now none).
    block = np.empty(-(-3 * tokens // _BLOCK) * _BLOCK, dtype=np.int64)
    input_ids, all_labels = block[:tokens], block[tokens : 2 * tokens]
    position_ids = block[2 * tokens : 3 * tokens]
    _fill(input_ids, ids)
    _fill(all_labels, labels or [input_ids])
    all_labels[starts] = IGNORE_INDEX
    np.subtract(_counting(tokens), starts.repeat(lengths), out=position_ids)
    seq_idx = _counting(sequences, np.int32).repeat(lengths)
    cu_seq_lens = torch.from_numpy(boundaries.astype(np.int32))
    return VarlenBatch(
        input_ids=torch.from_numpy(input_ids[None]),
        labels=torch.from_numpy(all_labels[None]),
        position_ids=torch.from_numpy(position_ids[None]),
        cu_seq_lens_q=cu_seq_lens,
        cu_seq_lens_k=cu_seq_lens,
        max_length_q=longest,
        max_length_k=longest,
        seq_idx=torch.from_numpy(seq_idx[None]),
        sequence_ids=torch.from_numpy(_join(sequence_ids)),
        num_targets=num_targets,
    )


def pack_from_row(row: Mapping[str, Any], levels: Mapping[str, str]) -> Pack:
    """A pack out of a row of lists, arrays or tensors; `levels` are those of further columns.

    Raises CollateError for missing or unknown columns.
    """
    if missing := [name for name in ("input_ids", "seq_lengths", "sequence_ids") if name not in row]:
        raise CollateError(
            f"a row has no {' and no '.join(missing)}, it has {', '.join(row)}: boundaries are never "
            "guessed. A trainer that drops columns needs remove_unused_columns=False"
        )
    if unknown := [name for name in row if name not in OWN_COLUMNS and name not in levels]:
        raise CollateError(
            f"a row has {', '.join(unknown)} and nothing says whether per token, sequence or pack; "
            "give columns=read_manifest(folder).columns, or remove the column from the data set"
        )
    lengths = np.asarray(row["seq_lengths"], dtype=np.int64)
    ids = np.asarray(row["input_ids"])
    if not len(lengths) or lengths.min() < 1 or lengths.sum() != len(ids):
        raise CollateError(
            f"a row's seq_lengths {_few(lengths)} do not add up to its {len(ids)} tokens, each at least 1; "
            "give rows of a packed folder as they are"
        )
    if row.get("labels") is None:
        labels = derived_labels(ids, lengths)
    else:
        labels = np.array(row["labels"], dtype=np.int64)
        if len(labels) == len(ids):
            labels[lengths.cumsum() - lengths] = IGNORE_INDEX
    return Pack(
        input_ids=ids,
        labels=labels,
        seq_lengths=lengths,
        sequence_ids=np.asarray(row["sequence_ids"], dtype=np.int64),
        num_tokens=len(ids),
        num_targets=int(np.count_nonzero(labels != IGNORE_INDEX)),
        max_seqlen=int(lengths.max()),
        attention_cost=int((lengths * lengths).sum()),
        extras={name: np.asarray(row[name]) for name in row if name not in OWN_COLUMNS},
        extra_levels=levels,
    )


def _check(packs: Sequence[Pack], lengths: Array) -> None:
    """See that every pack ends where its lengths say, with labels and numbers of the same count."""
    tokens = sum(len(pack.input_ids) for pack in packs)
    ends = lengths.cumsum()
    if not len(lengths) or lengths.min() < 1:
        raise CollateError(f"seq_lengths {_few(lengths)} hold an empty sequence; each has at least 1 token")
    if tokens > _MAX_TOKENS:
        raise CollateError(
            f"a batch of {tokens} tokens is over {_MAX_TOKENS}, where int32 boundaries end; "
            "put fewer packs in it"
        )
    sequence = token = 0
    for pack in packs:
        sequence += len(pack.seq_lengths)
        token += len(pack.input_ids)
        if not sequence or ends[sequence - 1] != token:
            raise CollateError(
                f"seq_lengths {_few(pack.seq_lengths)} do not add up to "
                f"the pack's {len(pack.input_ids)} tokens"
            )
        if len(pack.labels) != len(pack.input_ids):
            raise CollateError(f"{len(pack.labels)} labels for {len(pack.input_ids)} tokens in a pack")
        if len(pack.sequence_ids) != len(pack.seq_lengths):
            raise CollateError(
                f"{len(pack.sequence_ids)} sequence_ids for {len(pack.seq_lengths)} sequences in a pack"
            )


def _extras(packs: Sequence[Pack]) -> dict[str, Any]:
    """Further columns of all packs, each joined as its level asks."""
    joined: dict[str, Any] = {}
    names = set(packs[0].extras)
    for pack in packs:
        if set(pack.extras) != names:
            raise CollateError(
                f"one pack has the columns {sorted(names)}, another {sorted(pack.extras)}; "
                "packs of one batch come from folders with the same columns"
            )
    for name in packs[0].extras:
        level = packs[0].extra_levels.get(name)
        values = [np.asarray(pack.extras[name]) for pack in packs]
        if level == "pack":
            value = np.stack(values)
        elif level in ("token", "sequence"):
            per_token = level == "token"
            for pack, array in zip(packs, values, strict=True):
                wanted = len(pack.input_ids if per_token else pack.seq_lengths)
                if len(array) != wanted:
                    raise CollateError(f"{name} has {len(array)} values for {wanted} {level}s in a pack")
            value = np.concatenate(values)
            value = value[None] if per_token else value
        else:
            raise CollateError(f"nothing says whether {name} is per token, sequence or pack: {level!r}")
        joined[name] = value.tolist() if value.dtype.kind in "OSU" else torch.from_numpy(value)
    return joined


def _fill(row: Array, arrays: Sequence[Array]) -> None:
    """Write arrays behind each other into a row of int64 that is as long as all of them."""
    if len(arrays) == 1:
        row[:] = arrays[0]
    else:
        np.concatenate(arrays, out=row)


def _counting(count: int, kind: type = np.int64) -> Array:
    """0, 1, 2, ..., read-only: kept from batch to batch, since making it costs a pass."""
    known = _count_up[kind]
    if len(known) < count:
        _count_up[kind] = known = np.arange(2 * count, dtype=kind)
        known.flags.writeable = False
    return known[:count]


def _join(arrays: Sequence[Array]) -> Array:
    """Arrays behind each other as int64, in memory of their own."""
    return arrays[0].astype(np.int64) if len(arrays) == 1 else np.concatenate(arrays, dtype=np.int64)


def _few(values: Array) -> str:
    return str(values[:8].tolist()) + (" ..." if len(values) > 8 else "")
