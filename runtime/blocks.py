"""Checksums of the blocks of a shard, so that bytes are compared when they are first used, and no others.

A whole file's checksum says nothing before all of it is read. Here each MiB has one of its own in the
manifest, and a mapped shard remembers which were compared. The price is 16 bytes of manifest a MiB, and once
a process some tenths of a millisecond for each MiB that is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from padless.runtime.errors import ChecksumError
from padless.runtime.manifest import BLOCK_BYTES, BLOCK_DIGITS, ShardInfo, count_blocks

if TYPE_CHECKING:
    import pyarrow as pa


class BlockHasher:
    """The checksums of a file that is written or read from its start to its end: whole, and by blocks."""

    def __init__(self, *, blocks: bool = True) -> None:
        """Without `blocks` the whole file's alone."""
        import xxhash

        self._has_blocks = blocks
        self._whole = xxhash.xxh3_128()
        self._block = xxhash.xxh3_64()
        self._left = BLOCK_BYTES
        self._done: list[str] = []

    def update(self, data: memoryview) -> None:
        """Go on with the file's next bytes."""
        if not self._has_blocks:
            self._whole.update(data)
            return
        while len(data):  # in few calls: after each a thread waits for its turn among all
            piece = data[: self._left]
            self._whole.update(piece)
            self._block.update(piece)
            self._left -= len(piece)
            if not self._left:
                self._done.append(self._block.hexdigest())
                self._block.reset()
                self._left = BLOCK_BYTES
            data = data[len(piece) :]

    @property
    def checksum(self) -> str:
        """`xxh3:` and the 32 hex digits of all bytes so far."""
        return f"xxh3:{self._whole.hexdigest()}"

    @property
    def block_checksums(self) -> str:
        """16 hex digits of each block, the last one perhaps shorter than the others."""
        last = self._block.hexdigest() if self._left < BLOCK_BYTES else ""
        return "".join(self._done) + last


def hash_file(path: str | Path) -> BlockHasher:
    """Both checksums of a file, in one pass."""
    hasher = BlockHasher()
    piece = memoryview(bytearray(BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(piece):
            hasher.update(piece[:size])
    return hasher


class MappedShard:
    """A shard's bytes, and which of their blocks were compared; may be shared by threads."""

    def __init__(
        self, data: pa.Buffer, shards: Sequence[ShardInfo], number: int, *, path: str, way_out: str
    ) -> None:
        """The `data` of shard `number`; the others are there to tell when two were exchanged.

        A shard without block checksums is taken for one whose blocks were all compared.
        """
        self.data = data
        self._bytes = memoryview(data)
        self._shards, self._number = shards, number
        self._path, self._way_out = path, way_out
        self._told = shards[number].block_checksums
        count = count_blocks(data.size)
        # Threads that compare a block at once both find the same.
        self._is_same = bytearray(count) if self._told is not None else bytearray(b"\1" * count)

    def holds(self, buffer: pa.Buffer) -> bool:
        """Whether a buffer is a view of these bytes, and no copy."""
        begin = self.place(buffer)
        return 0 <= begin and begin + buffer.size <= self.data.size

    def place(self, buffer: pa.Buffer) -> int:
        """Where a view of these bytes begins."""
        found: int = buffer.address - self.data.address
        return found

    def compare(self, start: int, stop: int) -> None:
        """See that the blocks of bytes [start, stop) are as they were written; raises ChecksumError."""
        if start >= stop:
            return
        for block in range(start // BLOCK_BYTES, count_blocks(min(stop, self.data.size))):
            if not self._is_same[block]:
                self._compare(block)

    def compare_but(self, start: int, stop: int, later: Iterable[pa.Buffer]) -> None:
        """The same for [start, stop) without buffers that are compared later, each a view of these bytes."""
        for buffer in sorted(later, key=self.place):
            self.compare(start, self.place(buffer))
            start = self.place(buffer) + buffer.size
        self.compare(start, stop)

    def compare_head(self, at: int) -> None:
        """The same for what says what the Arrow message at a byte is, before anything believes it.

        Its marker and length, 4 bytes each, and the metadata of that length.
        """
        self.compare(at, at + 8)
        self.compare(at, at + 8 + int.from_bytes(self._bytes[at + 4 : at + 8], "little"))

    def trust(self) -> None:
        """Take all blocks for compared: the whole file was."""
        self._is_same[:] = b"\1" * len(self._is_same)

    def _compare(self, block: int) -> None:
        import xxhash

        start = block * BLOCK_BYTES
        data = self._bytes[start : start + BLOCK_BYTES]
        found = xxhash.xxh3_64_hexdigest(data)
        if (wanted := self._told_of(self._shards[self._number], block)) != found:
            raise ChecksumError(
                f"{self._path}, bytes {start:,} to {start + len(data):,}: {self._reason(block, found)} "
                f"(xxh3 {found}, the manifest says {wanted}); {self._way_out}"
            )
        self._is_same[block] = 1

    def _reason(self, block: int, found: str) -> str:
        for info in self._shards:
            if self._told_of(info, block) == found:
                return f"these are the bytes of {info.file}, the files were exchanged"
        return "they are not what was written, the file is changed, damaged or of another data set"

    @staticmethod
    def _told_of(info: ShardInfo, block: int) -> str | None:
        if info.block_checksums is None:
            return None
        return info.block_checksums[BLOCK_DIGITS * block : BLOCK_DIGITS * (block + 1)]
