"""Packing from a program in one line: `pack(dataset, tokenizer, max_length=...)`, kept by content.

    packs = pack(records, "Qwen/Qwen3-8B", max_length=4096)
    SFTTrainer(..., train_dataset=packs.to_hf())     # with packing=False, padding_free=True

What is packed lies in a cache folder under a name made of the content of data, tokenizer and template and of
the options, so that a second call with the same opens it. The price is that sources are read to be named (but
a `Dataset`, which has a fingerprint), and the files of images to be asked for their times. Nothing there is
ever out of date, what was used longest ago goes by
itself, and all of it may be deleted while nobody uses it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from padless.packer.config import PackConfig
from padless.packer.errors import BusyError, InputError
from padless.packer.identity import version_of
from padless.packer.image_rule import PROCESSOR_FILES
from padless.packer.kept_packs import KeptPacks, limit_bytes
from padless.packer.sources import Choice, digest, resolve_sources
from padless.packer.sources.objects import is_dataset
from padless.packer.sources.splits import are_several
from padless.packer.template import CLASSIC, load_template
from padless.packer.tokenizer_files import COPIED, check_folder, tokenizer_folder
from padless.packer.work_folder import wait_for_build
from padless.runtime import storage
from padless.runtime.format import IMAGES, MANIFEST, checksum_bytes
from padless.runtime.reader import PackedReader

if TYPE_CHECKING:
    from padless.runtime.dataset import PackedDataset

CACHE = "PADLESS_CACHE"
"""The environment variable that says where packs are kept; `~/.cache/padless` where it is not set."""
_OURS = frozenset({"output", "sources", "force"})
"""Options of PackConfig that `pack` decides about."""
_BY_CONTENT = frozenset({*_OURS, "tokenizer", "template", "workers", "progress", "engine", "ray_address"})
"""Fields that do not stand in a name as they are: what they name does, or nothing of it changes the packs."""


def cache_folder() -> Path:
    """Where `pack` keeps what it made."""
    return Path(storage.cache_folder())


def pack(
    data: Any,
    tokenizer: Any,
    *,
    max_length: int | tuple[int, ...],
    cache: str | Path | None = None,
    **options: Any,
) -> PackedDataset:
    """Packs of a data set, made at the first call and opened at the next.

    `data` is a `datasets.Dataset`, a list of records (dicts as they would stand in a JSON file) or what
    PackConfig takes as a source; `tokenizer` a folder, a Hub name or a tokenizer of `transformers`. All
    options of PackConfig are taken but those that make several splits: `strategy="none"` gives one sequence
    a row, which is training without padding but without packing. Of processes that ask for the same at the
    same time one packs, and the others wait for it. A folder in the cache that lacks files is packed anew;
    the cache holds at most PADLESS_PACKS_BYTES (64 GiB), and what living processes use of it.

    Raises InputError for wrong use and for records that cannot be packed, as `build` does.
    """
    from padless.runtime.dataset import PackedDataset

    _check_options(options)
    folder = Path(cache).absolute() if cache is not None else cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(
            f"packs cannot be kept in {folder} ({problem.strerror}); name another folder with cache=, or in "
            f"{CACHE}"
        ) from None
    kept = KeptPacks(folder, limit_bytes())
    config = PackConfig(
        sources=(_source(data, kept),), tokenizer=_tokenizer_folder(tokenizer, kept), max_length=max_length,
        output=str(folder), **options,
    )  # fmt: skip
    name = _name(config)
    output = _made(config, kept, name)
    if (changed := _images_changed(output, _image_folders(config))) is not None:
        output = _made(config, kept, checksum_bytes(f"{name} {changed}".encode()).removeprefix("xxh3:"))
    return PackedDataset(output)


def _made(config: PackConfig, kept: KeptPacks, name: str) -> Path:
    """The packed folder of that name, made where there is none."""
    from padless.packer.pipeline import pack_dataset

    output = kept.hold("packs", name)
    config = replace(config, output=str(output))
    kept.heal(output)
    made = False
    while not (output / MANIFEST).exists():
        try:
            pack_dataset(config)
            made = True
        except BusyError:
            wait_for_build(str(output))
    if made:
        kept.make_room()
    return output


def _image_folders(config: PackConfig) -> list[str]:
    """Where relative paths of images begin; empty where the tokenizer's model sees none."""
    if not any(Path(config.tokenizer, name).is_file() for name in PROCESSOR_FILES):
        return []
    if isinstance(config.image_root, str):
        folders = {config.image_root}
    else:
        choice = Choice(split=config.split, subset=config.subset, revision=config.revision)
        files = resolve_sources(config.sources, text_by=config.text_by, choice=choice)
        folders = {os.path.dirname(file.path) for file in files}
    return sorted(folder if "://" in folder else os.path.abspath(folder) for folder in folders)


def _images_changed(output: Path, folders: list[str]) -> int | None:
    """When the last of a folder's images changed, in ns; None where that was before the folder was made.

    The change of a file's inode counts, which a copy that keeps the old time moves too. Images behind URLs
    and in tables are not looked at.
    """
    reader = PackedReader(output)
    if not folders or all(column.name != IMAGES for column in reader.manifest.columns):
        return None
    texts = {text for batch in reader.batches() for text in batch.flat(IMAGES).tolist() if text}
    newest = 0
    for image in {one["image"] for text in texts for one in json.loads(text)}:
        for folder in folders:
            with suppress(OSError, ValueError):
                newest = max(newest, os.stat(os.path.join(folder, image)).st_ctime_ns)
    return newest if newest > (output / MANIFEST).stat().st_mtime_ns else None


def _check_options(options: Mapping[str, Any]) -> None:
    if taken := _OURS & options.keys():
        raise InputError(f"pack() decides about {', '.join(sorted(taken))} itself; use pack_dataset for that")
    known = {item.name for item in fields(PackConfig)}
    if unknown := sorted(options.keys() - known):
        near = get_close_matches(unknown[0], sorted(known - _OURS), n=1)
        hint = f"; near it: {near[0]}" if near else ""
        raise InputError(
            f"pack() has no option {unknown[0]!r}{hint}; its options are the fields of PackConfig"
        )
    several = [name for name in ("eval_fraction", "eval_sources") if options.get(name)]
    split = options.get("split")
    if isinstance(split, str) and are_several(split):
        several.append(f"split={split!r}")
    if several:
        raise InputError(
            f"pack() gives one split, and {several[0]} makes several: call "
            "pack_dataset, then PackedDataset(folder, split=...), or pack each split by itself"
        )


def _name(config: PackConfig) -> str:
    """Made of the content of all that decides the packs, wherever it lies.

    A source's own name is part of it (the suffix says how a file is read, the manifest tells it), its
    folder is not, unless images may lie there.
    """
    asked = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _BY_CONTENT}
    choice = Choice(split=config.split, subset=config.subset, revision=config.revision)
    asked["sources"] = [
        [file.name, file.split, getattr(file.data, "_fingerprint", None) or digest(file)]
        for file in resolve_sources(config.sources, text_by=config.text_by, choice=choice)
    ]
    asked["image_root"] = _image_folders(config)
    asked["tokenizer"] = _fingerprint(config.tokenizer)
    if config.template is not None and config.template != CLASSIC:
        asked["template"] = load_template(config.template, None)
    else:
        asked["template"] = config.template
    engines = ("padless", "pyarrow", "tokenizers", "jinja2", "minijinja")
    asked["versions"] = [version_of(engine) for engine in engines]
    return checksum_bytes(json.dumps(asked, sort_keys=True).encode()).removeprefix("xxh3:")


def _source(data: Any, kept: KeptPacks) -> Any:
    """What PackConfig takes; records of a list are written down under their content."""
    if is_dataset(data):
        return data
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    if not isinstance(data, Sequence) or not all(isinstance(record, Mapping) for record in data):
        raise InputError(
            f"{type(data).__name__} is nothing to pack: give a datasets.Dataset, a list of dicts or a path"
        )
    if not data:
        raise InputError("there are no records to pack: the list is empty")
    import orjson

    try:
        numpy = orjson.OPT_SERIALIZE_NUMPY
        lines = b"".join(orjson.dumps(dict(record), option=numpy) + b"\n" for record in data)
    except TypeError as error:
        raise InputError(f"a record is nothing that JSON can tell ({error})") from None
    path = kept.hold("records", f"{checksum_bytes(lines).removeprefix('xxh3:')}.jsonl")
    _write_once(path, lines)
    return str(path)


def _tokenizer_folder(tokenizer: Any, kept: KeptPacks) -> str:
    """A folder as it is, that of a Hub name; a tokenizer object saved under its content."""
    if isinstance(tokenizer, str | os.PathLike):
        folder = tokenizer_folder(os.fspath(tokenizer))
        check_folder(folder)
        return folder
    if not hasattr(tokenizer, "save_pretrained"):
        raise InputError(
            f"{type(tokenizer).__name__} is no tokenizer: give a folder, a Hub name or one of transformers"
        )
    import shutil
    import tempfile

    place = kept.folder / "tokenizers"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=".") as fresh:
        tokenizer.save_pretrained(fresh)
        _forget_calls(tokenizer, fresh)
        final = kept.hold("tokenizers", _fingerprint(fresh))
        if not final.exists():
            copy = f"{fresh}.whole"
            shutil.copytree(fresh, copy)
            try:
                os.rename(copy, final)
            except OSError:  # another process was faster
                shutil.rmtree(copy)
    return str(final)


def _forget_calls(tokenizer: Any, folder: str) -> None:
    """Take from what was saved the truncation and padding of the object's last call; they are not its own."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or (backend.truncation is None and backend.padding is None):
        return
    from tokenizers import Tokenizer

    file = os.path.join(folder, "tokenizer.json")
    saved = Tokenizer.from_file(file)
    saved.no_truncation()
    saved.no_padding()
    saved.save(file)


def _fingerprint(folder: str) -> str:
    """The content of a tokenizer's files; whatever else lies in the folder decides nothing."""
    files = [file for name in COPIED if (file := Path(folder, name)).is_file()]
    parts = b"".join(f.name.encode() + b"\0" + checksum_bytes(f.read_bytes()).encode() for f in files)
    return checksum_bytes(parts).removeprefix("xxh3:")


def _write_once(path: Path, content: bytes) -> None:
    if path.exists() and path.stat().st_size == len(content):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    half.write_bytes(content)
    half.replace(path)
