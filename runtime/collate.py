"""Packs to one batch: everything a padding-free model is told, from the lengths that were stored.

    packs [3 1 | 2]  ->  input_ids     [a a a b | c c]   one row of T = 6 tokens, N = 3 sequences
                         position_ids  [0 1 2 0   0 1]
                         cu_seq_lens   [0 3 4 6]
                         labels        [_ a a _   _ c]   _ is -100, also at each sequence's start

There is no attention mask on purpose: an all-ones mask makes transformers attend across sequences.
What comes from anywhere is checked here; a stream's own packs were checked by the reader and take the
short way of `gather`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from padless.runtime.arrays import Array
from padless.runtime.assemble import MAX_TOKENS, assemble, join
from padless.runtime.batch import Pack, derived_labels
from padless.runtime.errors import BatchError, CollateError
from padless.runtime.format import IGNORE_INDEX
from padless.runtime.image_positions import image_positions
from padless.runtime.images import IMAGES, PackedImage, read_images
from padless.runtime.schema import OWN_COLUMNS, ColumnInfo
from padless.runtime.varlen_batch import VarlenBatch

__all__ = ["VarlenBatch", "collate", "pack_from_row"]


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
    lengths = join([pack.seq_lengths for pack in chosen])
    _check(chosen, lengths)
    batch = assemble(
        ids=[pack.input_ids for pack in chosen],
        labels=[pack.labels for pack in chosen],
        lengths=lengths,
        sequence_ids=[pack.sequence_ids for pack in chosen],
        longest=int(lengths.max()),
        num_targets=sum(pack.num_targets for pack in chosen),
    )
    if chosen[0].extras or len(chosen) > 1:
        batch.update(_extras(chosen))
    if isinstance(batch.get(IMAGES), list):
        _add_images(batch, lengths)
    return batch


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
    if tokens > MAX_TOKENS:
        raise CollateError(
            f"a batch of {tokens} tokens is over {MAX_TOKENS}, where int32 boundaries end; "
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


def _add_images(batch: VarlenBatch, lengths: Array) -> None:
    """What the texts of the column tell, in place of them."""
    try:
        images = [read_images(*one) for one in zip(batch[IMAGES], lengths.tolist(), strict=True)]
    except BatchError as problem:
        raise CollateError(str(problem)) from None
    tell_images(batch, lengths, images)


def tell_images(batch: VarlenBatch, lengths: Array, images: Sequence[Sequence[PackedImage]]) -> None:
    """Give the batch positions, grids and references of the images of each of its sequences."""
    flat = [image for mine in images for image in mine]
    batch["position_ids"] = torch.from_numpy(image_positions(lengths, images)[:, None])
    batch["num_images"] = torch.tensor([len(mine) for mine in images], dtype=torch.int32)
    batch["image_grid_thw"] = torch.tensor([image.grid for image in flat], dtype=torch.int64).view(-1, 3)
    batch[IMAGES] = [image.image for image in flat]


def _few(values: Array) -> str:
    return str(values[:8].tolist()) + (" ..." if len(values) > 8 else "")
