"""The columns of shards and of the sequence table, and how their types are spelled.

A column's type is written in the manifest in our own short spelling (`list<uint16>`,
`list<fixed_size_list<float32, 8>>`): pyarrow's changed between versions, and a closed list of
types is what lets a reader check a column before it touches one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

LEVELS = ("token", "sequence", "pack")
OWN_COLUMNS = {
    "input_ids": ("token", ("list<uint16>", "list<int32>")),
    "labels": ("token", ("list<int32>",)),
    "seq_lengths": ("sequence", ("list<int32>",)),
    "sequence_ids": ("sequence", ("list<int64>",)),
    "num_tokens": ("pack", ("int32",)),
    "num_targets": ("pack", ("int32",)),
    "max_seqlen": ("pack", ("int32",)),
    "attention_cost": ("pack", ("int64",)),
}
"""The format's own columns in their order: name -> level and the types it may have."""
NONE_IS = {"pair_id": -1, "is_chosen": -1, "label": -1, "group_id": -1}
"""What these sequence-level columns hold where a sequence has none, as one that fills up a batch; else 0."""
ID_LIMITS = {"uint16": 2**16 - 1, "int32": 2**31 - 1}
"""The largest token id that a type of input_ids holds."""

_PRIMITIVE = re.compile(r"u?int(8|16|32|64)|float(16|32|64)|bool|string")
_FIXED = re.compile(r"fixed_size_list<([a-z0-9]+), ([1-9][0-9]{0,5})>")
_LIST = re.compile(r"list<(.+)>")
_SEQUENCE_TABLE = {
    "record": "int64",
    "source": "int32",
    "row": "int64",
    "part": "int32",
    "status": "string",
    "reason": "string",
    "start": "int64",
    "length": "int32",
    "num_targets": "int32",
    "cut": "int64",
    "pack": "int64",
    "offset": "int32",
}
_NULLABLE = ("reason", "pack", "offset")


@dataclass(frozen=True, kw_only=True)
class ColumnInfo:
    """One column of the shards: level is token, sequence or pack; type as `parse_type` reads it."""

    name: str
    level: str
    type: str


def column_problem(column: ColumnInfo) -> str | None:
    """Why this cannot be a column of a shard, or None."""
    if column.level not in LEVELS:
        return f"level must be one of {', '.join(LEVELS)}, is {column.level[:40]!r}"
    level, types = OWN_COLUMNS.get(column.name, (column.level, (column.type,)))
    if column.level != level:
        return f"level of {column.name} must be {level}, is {column.level}"
    inner = column.type
    if column.level != "pack":
        listed = _LIST.fullmatch(inner)
        inner = listed[1] if listed else ""
        if column.level == "token" and (fixed := _FIXED.fullmatch(inner)):
            inner = fixed[1]
    if column.type not in types or not _PRIMITIVE.fullmatch(inner):
        return f"type of {column.name[:40]} cannot be {column.type[:80]!r} at {column.level} level"
    return None


def parse_type(name: str) -> pa.DataType:
    """`int32`, `list<float32>`, `list<fixed_size_list<float32, 8>>` -> the Arrow type.

    Raises ValueError for any other spelling.
    """
    import pyarrow as pa

    if not (listed := _LIST.fullmatch(name)):
        return _primitive(name)
    if fixed := _FIXED.fullmatch(listed[1]):
        return pa.list_(pa.list_(_primitive(fixed[1]), int(fixed[2])))
    return pa.list_(_primitive(listed[1]))


def shard_columns(id_type: str, *, labels: bool, extras: Sequence[ColumnInfo] = ()) -> tuple[ColumnInfo, ...]:
    """The columns of a shard in their order; `id_type` is uint16 or int32."""
    types = {name: types[0] for name, (_, types) in OWN_COLUMNS.items()}
    types["input_ids"] = f"list<{id_type}>"
    own = [
        ColumnInfo(name=name, level=level, type=types[name])
        for name, (level, _) in OWN_COLUMNS.items()
        if labels or name != "labels"
    ]
    lists = [column for column in own if column.level != "pack"]
    return (*lists, *extras, *own[len(lists) :])


def schema_of(columns: Sequence[ColumnInfo]) -> pa.Schema:
    """The Arrow schema of columns."""
    import pyarrow as pa

    return pa.schema([(column.name, parse_type(column.type)) for column in columns])


def shard_schema(id_type: str, *, labels: bool, extras: Sequence[ColumnInfo] = ()) -> pa.Schema:
    """The Arrow schema of a shard; `id_type` is uint16 or int32."""
    return schema_of(shard_columns(id_type, labels=labels, extras=extras))


def sequence_table_schema() -> pa.Schema:
    """The Arrow schema of the sequence table; reason, pack and offset may be null."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field(name, _primitive(kind), nullable=name in _NULLABLE)
            for name, kind in _SEQUENCE_TABLE.items()
        ]
    )


def _primitive(name: str) -> pa.DataType:
    import pyarrow as pa

    if not _PRIMITIVE.fullmatch(name):
        raise ValueError(f"no column type {name[:80]!r}")
    kind: pa.DataType = pa.bool_() if name == "bool" else pa.type_for_alias(name)
    return kind
