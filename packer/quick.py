"""Packing from a program in one line: `pack(dataset, tokenizer, max_length=...)`, kept by content.

    packs = pack(records, "Qwen/Qwen3-8B", max_length=4096)
    SFTTrainer(..., train_dataset=packs.to_hf())     # with packing=False, padding_free=True

What is packed lies in a cache folder under a name made of the data, the tokenizer and the options, so that
a second call with the same opens it. Nothing there is ever out of date, and all of it may be deleted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from padless.packer.config import PackConfig
from padless.packer.errors import InputError
from padless.packer.identity import version_of
from padless.packer.sources.objects import is_dataset
from padless.runtime.format import checksum_bytes

if TYPE_CHECKING:
    from padless.runtime.dataset import PackedDataset

CACHE = "PADLESS_CACHE"
"""The environment variable that says where packs are kept; `~/.cache/padless` where it is not set."""


def cache_folder() -> Path:
    """Where `pack` keeps what it made."""
    return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "padless").absolute()


def pack(
    data: Any,
    tokenizer: Any,
    *,
    max_length: int,
    cache: str | Path | None = None,
    **options: Any,
) -> PackedDataset:
    """Packs of a data set, made at the first call and opened at the next.

    `data` is a `datasets.Dataset`, a list of records (dicts as they would stand in a JSON file) or what
    PackConfig takes as a source; `tokenizer` a folder, a Hub name or a tokenizer of `transformers`. All
    options of PackConfig are taken: `strategy="none"` gives one sequence a row, which is training without
    padding but without packing.

    Raises InputError for wrong use and for records that cannot be packed, as `build` does.
    """
    from padless.packer.pipeline import pack_dataset
    from padless.runtime.dataset import PackedDataset

    if taken := {"output", "sources", "force"} & options.keys():
        raise InputError(f"pack() decides about {', '.join(sorted(taken))} itself; use pack_dataset for that")
    kept = Path(cache).absolute() if cache is not None else cache_folder()
    folder = _tokenizer_folder(tokenizer, kept)
    source, stamp = _source(data, kept)
    asked = {
        **options,
        "max_length": max_length,
        "data": stamp or str(data),
        "tokenizer": _fingerprint(folder),
    }
    asked["versions"] = [version_of("padless"), version_of("pyarrow")]
    try:
        name = checksum_bytes(json.dumps(asked, sort_keys=True, default=_plain).encode())
    except TypeError as error:
        raise InputError(
            f"an option is no plain value ({error}); give strings, numbers, lists or dicts"
        ) from None
    output = kept / "packs" / name.removeprefix("xxh3:")
    if stamp is None or not (output / "manifest.json").exists():
        config = PackConfig(
            sources=(source,), tokenizer=folder, max_length=max_length, output=str(output),
            force=stamp is None, **options,
        )  # fmt: skip
        pack_dataset(config)
    return PackedDataset(output)


def _source(data: Any, kept: Path) -> tuple[Any, str | None]:
    """What PackConfig takes, and what names its content; None where nothing does before it is read."""
    if is_dataset(data):
        return data, getattr(data, "_fingerprint", None)
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        if not path.is_file():
            return str(data), None
        from padless.runtime.format import checksum_file

        return str(data), checksum_file(path)
    if not isinstance(data, Sequence) or not all(isinstance(record, Mapping) for record in data):
        raise InputError(
            f"{type(data).__name__} is nothing to pack: give a datasets.Dataset, a list of dicts or a path"
        )
    if not data:
        raise InputError("there are no records to pack: the list is empty")
    import orjson

    try:
        lines = b"".join(orjson.dumps(dict(record)) + b"\n" for record in data)
    except TypeError as error:
        raise InputError(f"a record is nothing that JSON can tell ({error})") from None
    stamp = checksum_bytes(lines)
    path = kept / "records" / f"{stamp.removeprefix('xxh3:')}.jsonl"
    _write_once(path, lines)
    return str(path), stamp


def _tokenizer_folder(tokenizer: Any, kept: Path) -> str:
    """A name or folder as it is; a tokenizer object saved under its content."""
    if isinstance(tokenizer, str | os.PathLike):
        return str(tokenizer)
    if not hasattr(tokenizer, "save_pretrained"):
        raise InputError(
            f"{type(tokenizer).__name__} is no tokenizer: give a folder, a Hub name or one of transformers"
        )
    import shutil
    import tempfile

    (kept / "tokenizers").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept / "tokenizers") as fresh:
        tokenizer.save_pretrained(fresh)
        final = kept / "tokenizers" / _fingerprint(fresh)
        if not final.exists():
            copy = f"{fresh}.whole"
            shutil.copytree(fresh, copy)
            try:
                os.rename(copy, final)
            except OSError:  # another process was faster
                shutil.rmtree(copy)
    return str(final)


def _fingerprint(folder: str) -> str:
    """The content of a folder's files; a Hub name as it is."""
    path = Path(folder)
    if not path.is_dir():
        return folder
    files = sorted(file for file in path.iterdir() if file.is_file())
    parts = b"".join(f.name.encode() + b"\0" + f.read_bytes() for f in files)
    return checksum_bytes(parts).removeprefix("xxh3:")


def _write_once(path: Path, content: bytes) -> None:
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(f".{os.getpid()}.tmp")
    half.write_bytes(content)
    half.replace(path)


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return str(value)
    if isinstance(value, tuple | set | frozenset):
        return sorted(map(str, value))
    raise TypeError(f"{type(value).__name__} {value!r}")
