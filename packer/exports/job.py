"""One export under way: where its files go, and the writers that targets share.

Files are hashed as they are written. Everything goes to a folder beside the output, which is renamed
to the output when it is complete, so that a trainer never finds half an export.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from padless.packer.durable import DurableFile
from padless.packer.errors import InputError
from padless.packer.exports.rows import Array, Rows, rows_of
from padless.packer.extra_columns import WEIGHTS
from padless.packer.hf_folder import dataset_info, state
from padless.packer.tokenizer_files import TokenizerFiles, read_files
from padless.runtime.format import IGNORE_INDEX, IMAGES, FileInfo, check_file
from padless.runtime.reader import PackedReader

Convert = Callable[[Rows], Mapping[str, pa.Array]]
"""Packs to the columns of a target, all of one number of rows."""
JUDGED = ("is_chosen", "label", "advantages")
"""Further columns that turn the training of an answer into its opposite."""
WASTEFUL = 0.5
"""The share of tokens in rows of one length below which the user is told."""


@dataclass(kw_only=True)
class Job:
    """What a target is given, and what it has written so far."""

    reader: PackedReader
    folder: str
    """Where files go; the folder is empty."""
    shard_bytes: int
    further_columns: bool
    """Whether the form takes the folder's further columns along."""
    progress: Callable[[int], None]
    """Told how many packs went by."""
    files: list[FileInfo] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"packs": 0, "sequences": 0, "tokens": 0})
    notes: list[str] = field(default_factory=list)
    """What a user should know about this data in this form; goes into the README and the result."""

    @property
    def max_length(self) -> int:
        """Tokens of the longest pack there may be."""
        return self.reader.buckets[-1].max_length

    def width(self) -> int:
        """The length that all rows are filled up to; notes where shorter packs are among them."""
        shorter = [bucket for bucket in self.reader.buckets[:-1] if bucket.packs]
        if shorter:
            count, lengths = sum(b.packs for b in shorter), " and ".join(f"{b.max_length:,}" for b in shorter)
            self.notes.append(
                f"{count:,} packs of {lengths} tokens are filled up to {self.max_length:,}, since all rows "
                "of this form are of one length; `pack-dataset repack --max-length` with one spares that."
            )
        return self.max_length

    @property
    def id_dtype(self) -> np.dtype[Any]:
        """uint16 or int32, as the folder stores ids."""
        kind = next(c.type for c in self.reader.manifest.columns if c.name == "input_ids")
        return np.dtype(kind.removeprefix("list<").removesuffix(">"))

    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer that the folder was built with; raises what a file that was changed raises."""
        for file in self.reader.manifest.tokenizer_files:
            check_file(self.reader.path / file.file, file.bytes, file.checksum)
        return read_files(str(self.reader.path / "tokenizer"))

    def pad_id(self) -> int:
        """What stands where a row is filled up: the tokenizer's pad token, else its eos, else 0."""
        tokenizer = self.tokenizer()
        for name in ("pad_token", "eos_token"):
            if (found := tokenizer.named_token_id(name)) is not None:
                return found
        return 0

    def rows(self, *, flat: bool = False, width: int | None = None) -> Iterator[Rows]:
        """The folder's packs, counted; `flat`: a little at a time, for files without rows.

        `width`: as many at a time as may be filled up to it.

        Raises InputError for what would train differently in this form.
        """
        if not self.further_columns:
            self.refuse_what_is_lost()
        for rows in rows_of(self.reader, flat=flat, width=width):
            if not self.further_columns:
                self._check_weights(rows)
            yield rows
            self.counts["packs"] += len(rows.sequences)
            self.counts["sequences"] += len(rows.seq_lengths)
            self.counts["tokens"] += len(rows.input_ids)
            self.progress(len(rows.sequences))

    def _check_weights(self, rows: Rows) -> None:
        """See that labels say what the weights do: 1 where a token is trained."""
        weights = rows.extras.get(WEIGHTS.name)
        if weights is None:
            return
        others = weights[(rows.labels != IGNORE_INDEX) & (weights != 1)]
        if len(others):
            raise InputError(
                f"{self.reader.path} has trained tokens whose loss weighs {others[0]:g}, and this form has "
                "no place for weights: they would be trained at 1. Export to unpacked, parquet or axolotl, "
                "which keep the column, or build from records without weights"
            )

    def refuse_what_is_lost(self) -> None:
        """InputError where tokens mean something else without a column that the trainer would not look at."""
        names = [column.name for column in self.reader.manifest.extras]
        if IMAGES in names:
            raise InputError(
                f"{self.reader.path} has images, and this form has no place to say which: their placeholders "
                "would be all that is left. Export to unpacked or parquet, which keep the column"
            )
        if judged := [name for name in JUDGED if name in names]:
            raise InputError(
                f"{self.reader.path} has answers of which `{judged[0]}` says how good they are, which the "
                "trainer of this form would not look at: bad ones would be trained like good ones. Export to "
                "unpacked or parquet, which keep the column, or build from the good answers alone"
            )

    def left_behind(self) -> str | None:
        """A note that names the further columns which the form has no place for."""
        # Labels say what is left of the weights.
        left = [column.name for column in self.reader.manifest.extras if column != WEIGHTS]
        if self.further_columns or not left:
            return None
        named = ", ".join(f"`{name}`" for name in left)
        return f"left behind, since this form has no place for further columns: {named}."

    def open(self, name: str, *, direct: bool = False) -> DurableFile:
        """A new file, to be kept with `keep`; `direct` for large ones (see DurableFile)."""
        return DurableFile(self.folder, name, direct=direct)

    def keep(self, file: DurableFile, name: str) -> None:
        """The file is complete."""
        self.files.append(file.commit(lambda checksum: name))

    def text(self, name: str, content: str) -> None:
        """A small file whole."""
        self.bytes(name, content.encode())

    def bytes(self, name: str, content: bytes) -> None:
        """The same of bytes."""
        with self.open(name) as file:
            file.write(content)
            self.keep(file, name)

    def arrow(self, convert: Convert, *, width: int | None = None) -> None:
        """A folder for `datasets.load_from_disk`: Arrow stream files with one row a list.

        `width`: what `convert` fills packs up to, if it does.
        """
        self._tables(convert, "data-{:05d}.arrow", pa.ipc.new_stream, width)
        share = self.counts["tokens"] / (self.counts["packs"] * (width or 1))
        if width is not None and share < WASTEFUL:
            self.notes.append(
                f"{share:.1%} of the rows are tokens, the rest fills packs up to {width:,}; "
                "`pack-dataset repack` to a shorter --max-length, or with another --strategy, spares it."
            )
        types = {field.name: field.type for field in self._schema}
        files = [file.file for file in self.files if file.file.endswith(".arrow")]
        self.bytes("dataset_info.json", dataset_info(types))
        self.bytes("state.json", state(files, self.reader.manifest.plan_hash, "train"))

    def parquet(self, convert: Convert, name: str = "data-{:05d}.parquet") -> None:
        """Parquet files with one row a list; `name` has a place for their number."""
        import pyarrow.parquet as pq

        self._tables(convert, name, lambda sink, schema: pq.ParquetWriter(sink, schema, compression="zstd"))

    def _tables(
        self,
        convert: Convert,
        name: str,
        start: Callable[[Any, pa.Schema], Any],
        width: int | None = None,
    ) -> None:
        """Files of at most `shard_bytes`, cut between batches; one file where there is nothing to write."""
        number = 0
        with ExitStack() as stack:
            opened: tuple[DurableFile, Any] | None = None

            def finish() -> None:
                assert opened is not None
                file, writer = opened
                writer.close()
                self.keep(file, name.format(number))
                stack.close()

            try:
                for rows in self.rows(width=width):
                    columns = convert(rows)
                    batch = pa.RecordBatch.from_arrays([*columns.values()], names=[*columns])
                    if opened is not None and opened[0].size + batch.nbytes > self.shard_bytes:
                        finish()
                        opened, number = None, number + 1
                    if opened is None:
                        self._schema = batch.schema
                        file = stack.enter_context(self.open(name.format(number), direct=True))
                        opened = file, start(pa.PythonFile(file, mode="w"), batch.schema)
                    opened[1].write_batch(batch)
            except BaseException:
                if opened is not None:  # while there is a file: it would be closed when it is collected
                    with suppress(Exception):
                        opened[1].close()
                raise
            if opened is None:
                raise InputError(f"{self.reader.path} has no packs: there is nothing to export")
            finish()

    def raw(self, name: str) -> Raw:
        """A file of numbers one after the other, without a header."""
        return Raw(self, name)


class Raw:
    """Numbers one after the other; a context manager, complete at its end."""

    def __init__(self, job: Job, name: str) -> None:
        self._job, self._name = job, name
        self._file = job.open(name, direct=True)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self._job.keep(self._file, self._name)
        self._file.__exit__(kind, error, trace)

    def add(self, values: Array) -> None:
        """Append an array's bytes, little-endian."""
        self._file.write(np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).view(np.uint8))

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._file.size


def remove_tree(folder: str) -> None:
    """Remove an unfinished export; a file that is gone already is no matter."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    if os.path.exists(folder):
        raise InputError(f"{folder} cannot be removed; remove it and run the same command again")
