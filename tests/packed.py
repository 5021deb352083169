"""Writes tiny packed folders for tests: straight from FORMAT.md, not by padless's own writer.

A second, naive writer keeps the readers honest: a mistake shared by writer and reader would pass
every round trip. Everything here is small, slow and spelled out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash


@dataclass
class Seq:
    """One sequence: its tokens, and which of them are trained (all but the first when None)."""

    tokens: list[int]
    trained: list[bool] | None = None
    source: int = 0

    def labels(self) -> list[int]:
        trained = self.trained or [True] * len(self.tokens)
        return [token if place > 0 and trained[place] else -100 for place, token in enumerate(self.tokens)]


@dataclass
class Folder:
    """What to write: packs of sequences, packs a shard, and the like."""

    packs: list[list[Seq]]
    max_length: int = 16
    id_type: str = "uint16"
    labels: bool = True
    packs_per_shard: int = 2
    packs_per_batch: int = 1
    compression: str | None = None
    largest_id: int = 300
    block_bytes: int | None = None
    """Bytes that have a checksum together; None: the manifest has no block checksums."""
    dropped: int = 0
    """Records at the end that are in no pack, five tokens each."""
    extras: dict[str, tuple[str, str, pa.DataType, list[Any]]] = field(default_factory=dict)
    """name -> level, type as in the manifest, Arrow type, a value for each pack."""
    tokenizer: dict[str, bytes] = field(default_factory=lambda: {"tokenizer.json": b"{}\n"})


def xxh3(data: bytes) -> str:
    return "xxh3:" + xxhash.xxh3_128(data).hexdigest()


def count_up(*lengths: int, first: int = 1) -> list[Seq]:
    """Sequences that identify themselves: sequence k is k, k, k, ..."""
    return [Seq([first + number] * length) for number, length in enumerate(lengths)]


def write_folder(path: Path, folder: Folder) -> dict[str, Any]:
    """Write the folder, give its manifest."""
    path.mkdir(parents=True)
    list_of = {"uint16": pa.uint16(), "int32": pa.int32()}[folder.id_type]
    own = [
        ("input_ids", "token", f"list<{folder.id_type}>", pa.list_(list_of)),
        ("labels", "token", "list<int32>", pa.list_(pa.int32())),
        ("seq_lengths", "sequence", "list<int32>", pa.list_(pa.int32())),
        ("sequence_ids", "sequence", "list<int64>", pa.list_(pa.int64())),
        *((name, level, kind, arrow) for name, (level, kind, arrow, _) in folder.extras.items()),
        ("num_tokens", "pack", "int32", pa.int32()),
        ("num_targets", "pack", "int32", pa.int32()),
        ("max_seqlen", "pack", "int32", pa.int32()),
        ("attention_cost", "pack", "int64", pa.int64()),
    ]
    columns = [column for column in own if folder.labels or column[0] != "labels"]
    schema = pa.schema([(name, arrow) for name, _, _, arrow in columns])
    rows: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    for number, pack in enumerate(folder.packs):
        ids = range(len(lines), len(lines) + len(pack))
        offset = 0
        for sequence in pack:
            targets = sum(label != -100 for label in sequence.labels())
            line: dict[str, Any] = {
                "record": len(lines),
                "source": sequence.source,
                "row": len(lines),
                "part": 0,
            }
            line |= {"status": "whole", "reason": None, "start": 0, "cut": 0}
            line |= {"length": len(sequence.tokens), "num_targets": targets}
            lines.append(line | {"pack": number, "offset": offset})
            offset += len(sequence.tokens)
        lengths = [len(sequence.tokens) for sequence in pack]
        labels = [label for sequence in pack for label in sequence.labels()]
        row = {
            "input_ids": [token for sequence in pack for token in sequence.tokens],
            "labels": labels,
            "seq_lengths": lengths,
            "sequence_ids": list(ids),
            "num_tokens": sum(lengths),
            "num_targets": sum(label != -100 for label in labels),
            "max_seqlen": max(lengths),
            "attention_cost": sum(length * length for length in lengths),
        }
        row |= {name: extra[3][number] for name, extra in folder.extras.items()}
        rows.append(row)
    sequences = len(lines)
    for _ in range(folder.dropped):
        line = {"record": len(lines), "source": 0, "row": len(lines), "part": 0, "start": 0}
        line |= {"status": "dropped", "reason": "too long", "length": 0, "num_targets": 0}
        lines.append(line | {"cut": 5, "pack": None, "offset": None})
    shards = [
        _write_shard(path, number, rows[first : first + folder.packs_per_shard], schema, folder)
        for number, first in enumerate(range(0, len(rows), folder.packs_per_shard))
    ]
    table_types = {
        **{"record": pa.int64(), "source": pa.int32(), "row": pa.int64(), "part": pa.int32()},
        **{"status": pa.string(), "reason": pa.string(), "start": pa.int64()},
        **{"length": pa.int32(), "num_targets": pa.int32(), "cut": pa.int64()},
        **{"pack": pa.int64(), "offset": pa.int32()},
    }
    table = pa.Table.from_pylist(lines, schema=pa.schema(list(table_types.items())))
    pq.write_table(table, path / "sequences.parquet")
    (path / "tokenizer").mkdir()
    for name, data in folder.tokenizer.items():
        (path / "tokenizer" / name).write_bytes(data)
    tokens = sum(row["num_tokens"] for row in rows)
    targets = sum(row["num_targets"] for row in rows)
    sources = sorted({line["source"] for line in lines}) or [0]
    manifest = {
        "format": "padless",
        "version": 1,
        "kind": "packs",
        "shards": shards,
        "sequence_tables": [_file(path, "sequences.parquet") | {"lines": len(lines)}],
        "tokenizer": {
            "files": [_file(path, f"tokenizer/{name}") for name in sorted(folder.tokenizer)],
            "fingerprint": "sha256:" + 64 * "0",
            "vocab_size": folder.largest_id + 1,
            "largest_id": folder.largest_id,
        },
        "chat_template": {"checksum": None},
        "columns": [{"name": name, "level": level, "type": kind} for name, level, kind, _ in columns],
        "options": {"max_length": folder.max_length},
        "sources": [
            {
                "path": f"source-{number}.jsonl",
                "bytes": 1,
                "checksum": xxh3(b"x"),
                "records": sum(line["source"] == number for line in lines),
            }
            for number in range(max(sources) + 1)
        ],
        "seed": 0,
        "plan_hash": xxh3(repr([len(pack) for pack in folder.packs]).encode()),
        "statistics": {
            "max_length": folder.max_length,
            "sequences": sequences,
            "packs": len(rows),
            "bound_packs": -(-tokens // folder.max_length),
            "tokens": tokens,
            "trained_tokens": targets,
            "masked_tokens": tokens - targets,
            "cut_tokens": 5 * folder.dropped,
            "empty_replies": 0,
            "records": {
                "in": len(lines),
                "whole": sequences,
                "truncated": 0,
                "split": 0,
                "dropped": folder.dropped,
            },
            "dropped_by_reason": {"too long": folder.dropped} if folder.dropped else {},
            "cut_by_reason": {"too long": 5 * folder.dropped} if folder.dropped else {},
        },
        "padless": "0.1.0",
        "pyarrow": pa.__version__,
    }
    features = {name: {"_type": "Sequence"} for name, *_ in columns}
    (path / "dataset_info.json").write_text(json.dumps({"features": features}))
    state = {
        "_data_files": [{"filename": shard["file"]} for shard in shards],
        "_fingerprint": str(manifest["plan_hash"]).removeprefix("xxh3:"),
    }
    (path / "state.json").write_text(json.dumps(state))
    (path / "manifest.json").write_text(json.dumps(manifest))
    return manifest


def write_numbered(path: Path, packs: int, **layout: Any) -> Path:
    """A folder of packs of one sequence each, whose id is the number of its pack; lengths are 1 to 7."""
    write_folder(path, Folder(packs=[count_up(1 + n % 7, first=n) for n in range(packs)], **layout))
    return path


def write_splits(path: Path, splits: dict[str, Folder]) -> None:
    """A folder of splits."""
    listed = []
    for name, folder in splits.items():
        write_folder(path / name, folder)
        listed.append(_file(path, f"{name}/manifest.json") | {"name": name})
    manifest = {"format": "padless", "version": 1, "kind": "splits", "padless": "0.1.0"}
    (path / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    (path / "manifest.json").write_text(json.dumps(manifest | {"splits": listed}))


def edit_manifest(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest in place."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    edit(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def rewrite_shard(path: Path, number: int, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change a shard's rows and write it again, with a manifest that vouches for the new file."""

    def edit(manifest: dict[str, Any]) -> None:
        shard = manifest["shards"][number]
        with pa.ipc.open_stream(path / shard["file"]) as reader:
            table = reader.read_all()
        rows = table.to_pylist()
        change(rows)
        (path / shard["file"]).unlink()
        folder = Folder(packs=[])
        manifest["shards"][number] = _write_shard(path, number, rows, table.schema, folder)
        for name in ("packs", "sequences", "tokens"):
            manifest["statistics"][name] = sum(shard[name] for shard in manifest["shards"])
        state = {
            "_data_files": [{"filename": shard["file"]} for shard in manifest["shards"]],
            "_fingerprint": manifest["plan_hash"].removeprefix("xxh3:"),
        }
        (path / "state.json").write_text(json.dumps(state))

    edit_manifest(path, edit)


def rewrite_table(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change the sequence table's lines, with a manifest that vouches for the new file."""

    def edit(manifest: dict[str, Any]) -> None:
        table = pq.read_table(path / "sequences.parquet")
        lines = table.to_pylist()
        change(lines)
        new = pa.Table.from_pylist(lines, schema=table.schema)
        pq.write_table(new, path / "sequences.parquet")
        manifest["sequence_tables"] = [_file(path, "sequences.parquet") | {"lines": len(lines)}]

    edit_manifest(path, edit)


def _write_shard(
    path: Path, number: int, rows: Sequence[dict[str, Any]], schema: pa.Schema, folder: Folder
) -> dict[str, Any]:
    options = pa.ipc.IpcWriteOptions(compression=folder.compression)
    sink = pa.BufferOutputStream()
    batches = []
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        # pyarrow writes the schema together with the first batch.
        header = schema.serialize().size
        for first in range(0, len(rows), folder.packs_per_batch):
            some = rows[first : first + folder.packs_per_batch]
            batches.append([max(sink.tell(), header), len(some)])
            writer.write_batch(pa.RecordBatch.from_pylist(list(some), schema=schema))
    data = sink.getvalue().to_pybytes()
    name = f"shard-{number:05d}-{xxhash.xxh3_128(data).hexdigest()[:8]}.arrow"
    (path / name).write_bytes(data)
    lengths = [length for row in rows for length in row["seq_lengths"]]
    blocks = {}
    if folder.block_bytes is not None:
        starts = range(0, len(data), folder.block_bytes)
        parts = [xxhash.xxh3_64(data[start : start + folder.block_bytes]).hexdigest() for start in starts]
        blocks["block_checksums"] = "".join(parts)
    return (
        _file(path, name)
        | blocks
        | {
            "packs": len(rows),
            "sequences": len(lengths),
            "tokens": sum(len(row["input_ids"] or ()) for row in rows),
            "batches": batches,
        }
    )


def _file(path: Path, name: str) -> dict[str, Any]:
    data = (path / name).read_bytes()
    return {"file": name, "bytes": len(data), "checksum": xxh3(data)}
