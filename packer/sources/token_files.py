"""Tokens in one long row, with their boundaries and masks in files beside them: OLMo-core's, datatrove's.

    tokens                   where documents end        what is trained, where there is such a file
    token_ids_part_0.npy     token_ids_part_0.csv.gz    labels_mask_part_0.npy      (OLMo-core, open-instruct)
    00000_shuffled.ds        00000_shuffled.ds.index    00000_shuffled.ds.loss      (datatrove)

No file says how wide its tokens are: its size and the last boundary do. Boundaries are read, never looked for
among the tokens, so a file without them is refused. Size and checksum of such a source are of all its files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from padless.packer.errors import InputError
from padless.packer.sources.chunks import Chunk, CutOptions, Piece, Records

MAX_ROWS = 4096
"""Documents of a chunk at most."""
EXTENSIONS = (".npy", ".ds")
_IDS, _MASK = "token_ids", "labels_mask"
_NUMPY_MAGIC = b"\x93NUMPY"
_WIDTHS = {2: "<u2", 4: "<u4"}


def is_tokens(name: str) -> bool:
    """Whether a file's name is that of tokens, and not of what lies beside them."""
    return name.endswith(EXTENSIONS) and not name.startswith(_MASK)


def companions(path: str) -> tuple[str, str]:
    """The files of boundaries and of the mask that belong to a file of tokens."""
    if path.endswith(".ds"):
        return f"{path}.index", f"{path}.loss"
    folder, name = os.path.split(path)
    mask = os.path.join(folder, name.replace(_IDS, _MASK)) if _IDS in name else f"{path}.mask"
    return f"{path.removesuffix('.npy')}.csv.gz", mask


def size_with_companions(path: str) -> int:
    """Bytes of the files of one source; raises InputError where it has no boundaries."""
    bounds, mask = companions(path)
    if not os.path.isfile(bounds):
        raise InputError(
            f"{path} has tokens, and {os.path.basename(bounds)} with their boundaries is not beside it; "
            "padless does not guess them from end tokens: write that file, or give the records as JSON"
        )
    return sum(os.path.getsize(file) for file in (path, bounds, mask) if os.path.isfile(file))


class TokenStream:
    """The files of one source in one pass: boundaries first, then the bytes for the checksum."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.bounds, mask = companions(path)
        self.mask = mask if os.path.isfile(mask) else ""
        """The mask's path; "": everything is trained."""

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        pass

    def documents(self) -> tuple[NDArray[np.int64], str]:
        """Where documents end, in tokens, and the tokens' dtype; raises InputError where files contradict."""
        ends = self._index() if self.path.endswith(".ds") else self._table()
        size, tokens = os.path.getsize(self.path), int(ends[-1]) if len(ends) else 0
        if (np.diff(ends, prepend=0) < 0).any():
            raise InputError(f"{self.bounds}: boundaries do not go up; write it again")
        width = _WIDTHS.get(size // tokens) if tokens and size % tokens == 0 else None
        if width is None:
            raise InputError(
                f"{self.path} has {size:,} bytes for the {tokens:,} tokens of {self.bounds}: neither 2 nor 4 "
                "each; these files do not belong together, or one is not whole"
            )
        if self.mask and os.path.getsize(self.mask) != tokens:
            raise InputError(
                f"{self.mask} has {os.path.getsize(self.mask):,} bytes for {tokens:,} tokens; it has to have "
                "one byte a token"
            )
        return ends, width

    def _index(self) -> NDArray[np.int64]:
        return np.fromfile(self.bounds, dtype="<u8").astype(np.int64)

    def _table(self) -> NDArray[np.int64]:
        import pyarrow as pa
        import pyarrow.csv

        with open(self.path, "rb") as file:
            if file.read(len(_NUMPY_MAGIC)) == _NUMPY_MAGIC:
                raise InputError(
                    f"{self.path} has numpy's header, and OLMo-core's files have none; write it with tofile"
                )
        try:
            options = pa.csv.ReadOptions(autogenerate_column_names=True)
            table = pa.csv.read_csv(self.bounds, options)
            starts: NDArray[np.int64] = table.column(0).to_numpy().astype(np.int64)
            ends: NDArray[np.int64] = table.column(1).to_numpy().astype(np.int64)
        except (pa.ArrowException, OSError, ValueError, IndexError) as error:
            raise InputError(f"{self.bounds} has no rows of start and end ({error})") from None
        if not np.array_equal(starts, np.append(0, ends[:-1])):
            raise InputError(f"{self.bounds}: a document does not begin where the one before it ends")
        return ends

    def finish(self) -> tuple[int, str]:
        """Bytes and checksum of the files, one behind the other."""
        digest, size = xxhash.xxh3_128(), 0
        for path in (self.path, self.bounds, self.mask):
            if path:
                with open(path, "rb", buffering=0) as file:
                    while data := file.read(1 << 20):
                        digest.update(data)
                        size += len(data)
        return size, f"xxh3:{digest.hexdigest()}"


def cut(stream: Any, options: CutOptions) -> Iterator[Piece]:
    """Pieces of whole documents; a payload is their lengths, `args` the dtype, mask and first token."""
    ends, width = stream.documents()
    most = max(1, options.chunk_bytes // int(width[-1]))
    first = token = 0
    while first < len(ends):
        last = int(np.searchsorted(ends, token + most, side="right"))
        last = min(max(last, first + 1), first + MAX_ROWS)
        lengths = np.diff(ends[first:last], prepend=token)
        args = (width, stream.mask, str(token))
        yield Piece(start=first, stop=last, payload=lengths.astype("<i8").tobytes(), args=args)
        first, token = last, int(ends[last - 1])


def read(chunk: Chunk) -> Records:
    """Documents as rows of input_ids and, where there is a mask, loss_mask."""
    assert chunk.payload is not None
    width, mask, token = chunk.args
    lengths = np.frombuffer(chunk.payload, dtype="<i8")
    cuts = np.cumsum(lengths)
    columns = {"input_ids": _numbers(chunk.path, width, int(token), int(cuts[-1]))}
    if mask:
        columns["loss_mask"] = (_numbers(mask, "u1", int(token), int(cuts[-1])) != 0).astype(np.uint8)
    parts = {name: np.split(values, cuts[:-1]) for name, values in columns.items()}
    rows = [{name: parts[name][n].tolist() for name in parts} for n in range(len(lengths))]
    return Records(rows=rows, lines=None)


def _numbers(path: str, dtype: str, start: int, count: int) -> NDArray[Any]:
    found = np.fromfile(path, dtype=dtype, count=count, offset=start * np.dtype(dtype).itemsize)
    if len(found) < count:
        raise InputError(
            f"{path} ended at token {start + len(found):,}, before {start + count:,}, which it had a moment "
            "ago: it changed during the build; build again once it is complete"
        )
    return found
