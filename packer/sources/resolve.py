"""From what the user gave (files, globs, folders, URLs, Hub ids, objects) to the list of source files.

The list is sorted within each argument and says by names alone what every file is, so that a wrong
path or a stray file is told in milliseconds, before anything is loaded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from padless.packer.errors import InputError
from padless.packer.hub import PREFIX, is_hub_id
from padless.packer.sources.chunks import SourceFile
from padless.packer.sources.hub_data import hub_files, hub_paths
from padless.packer.sources.objects import is_dataset, object_files
from padless.packer.sources.packed import is_packed, refuse_packed, refuse_packed_below
from padless.packer.sources.saved import is_saved, saved_files
from padless.packer.sources.splits import TRAIN, VALIDATION, are_several
from padless.packer.sources.text import begins_record
from padless.packer.sources.token_files import EXTENSIONS, companions, is_tokens, size_with_companions
from padless.packer.sources.urls import url_files
from padless.runtime.storage import is_url

KINDS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "parquet",
    ".feather": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".md": "text",
    ".text": "text",
    **dict.fromkeys(EXTENSIONS, "tokens"),
}
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
# What a data set's folder holds about the data; they are read when named one by one.
ABOUT = {"readme", "license", "licence", "notice", "changelog"}
EXPORT_RECORD = "export.json"
"""In a folder that `pack-dataset export` wrote; JSON there is about the data."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which part of a source that has parts to take; fields as in `PackConfig`."""

    split: str | None = None
    subset: str | None = None
    revision: str | None = None


def resolve_sources(
    specs: Sequence[Any],
    *,
    eval_specs: Sequence[Any] = (),
    text_by: str = "line",
    choice: Choice | None = None,
) -> list[SourceFile]:
    """The files that the arguments name, those for the evaluation split last.

    A folder is searched for known extensions; hidden files, and notes such as README.md, are
    skipped there. A folder of `save_to_disk` gives its Arrow files, a Hub id (unless there is such a path)
    the files of its splits that are asked for. Raises InputError for whatever cannot be a source.
    """
    begins_record(text_by)
    choice = choice or Choice()
    taken: set[str] = set()
    files: list[SourceFile] = []
    for is_eval, group in ((False, specs), (True, eval_specs)):
        for argument, spec in enumerate(group, len(specs) if is_eval else 0):
            # What was asked for is for training; of a set to evaluate on, the usual split is taken.
            chosen, told = (Choice(), set()) if is_eval else (choice, taken)
            for file in _files(spec, len(files), chosen, is_eval, told):
                file.argument = argument
                if eval_specs:
                    file.split = VALIDATION if is_eval else TRAIN
                elif not are_several(choice.split):
                    file.split = ""
                files.append(file)
    if not files:
        raise InputError("no source was given; name a file, a glob or a folder")
    _refuse_idle(choice, taken)
    if are_several(choice.split) and (whole := next((file for file in files if not file.split), None)):
        raise InputError(
            f"{whole.path} has no splits, so --split {choice.split} does not say where it goes: build it by "
            "itself, or give it as --eval-source"
        )
    seen: dict[Any, str] = {}
    for file in files:
        key: Any = file.path if is_url(file.path) else os.path.realpath(file.path)
        if file.data is not None:
            key = id(file.data)
        if key in seen:
            other = seen[key]
            also = "" if other == file.path else f" (also as {other})"
            raise InputError(f"{file.path} is given twice{also}; name every source once")
        seen[key] = file.path
    local = [file for file in files if not file.name]
    if local:
        root = os.path.commonpath([os.path.dirname(os.path.abspath(file.path)) for file in local])
        for file in local:
            file.name = os.path.relpath(os.path.abspath(file.path), root).replace(os.sep, "/")
    return files


def _files(spec: Any, number: int, choice: Choice, is_eval: bool, taken: set[str]) -> Iterator[SourceFile]:
    """The files of one source; local ones have no name yet. `taken` gets the options that applied."""
    if is_dataset(spec):
        if isinstance(spec, dict):
            taken.add("split")
        yield from object_files(spec, number, choice.split, is_eval=is_eval)
        return
    spec = spec.removeprefix("file://")
    if spec.startswith(PREFIX):
        yield from hub_paths(spec, _kind_of_data)
        return
    if is_url(spec):
        yield from url_files(spec, _kind, _kind_of_data)
        return
    if _is_on_hub(spec):
        taken.update(("split", "subset", "revision"))
        yield from hub_files(
            spec,
            _kind_of_data,
            split=choice.split,
            subset=choice.subset,
            revision=choice.revision,
            is_eval=is_eval,
        )
        return
    if os.path.isdir(spec) and not is_packed(spec) and is_saved(spec):
        taken.add("split")
        for split, path in saved_files(spec, choice.split, is_eval=is_eval):
            if not os.path.lexists(path):
                raise InputError(
                    f"{path} is missing, which its state.json lists; copy or save the folder again"
                )
            _check(path)
            size = os.path.getsize(path)
            yield SourceFile(path=path, name="", kind="parquet", split=split, size=size)
        return
    for path in _expand(spec):
        kind, compression = _kind(path)
        size = size_with_companions(path) if kind == "tokens" else os.path.getsize(path)
        yield SourceFile(path=path, name="", kind=kind, compression=compression, size=size)


def _is_on_hub(spec: str) -> bool:
    """Whether to ask the Hub: for no path that there is, and none that looks mistyped."""
    is_path = os.path.lexists(spec) or _parts(spec)[1] is not None
    return not is_path and is_hub_id(spec) and not _near(spec).startswith("; near")


def _refuse_idle(choice: Choice, taken: set[str]) -> None:
    for name in ("split", "subset", "revision"):
        value = getattr(choice, name)
        if value is not None and name not in taken:
            has = "a Hub id" if name != "split" else "a Hub id or a folder of save_to_disk with splits"
            raise InputError(f"--{name} {value} does not apply: no source is {has}; a file is taken whole")


def _expand(spec: str) -> list[str]:
    """The files that one argument names, checked to be there and not empty."""
    if os.path.isdir(spec):
        refuse_packed(spec)
        paths = sorted(_in_folder(spec))
        if not paths:
            refuse_packed_below(spec)
            raise InputError(f"the folder {spec} holds no file to read; known extensions: {_known()}")
    elif os.path.lexists(spec):
        paths = [spec]
    elif any(mark in spec for mark in "*?["):
        import glob

        paths = sorted(path for path in glob.glob(spec, recursive=True) if os.path.isfile(path))
        if not paths:
            raise InputError(f"nothing matches {spec}; see the folder, and quote the pattern")
    else:
        raise InputError(f"there is no file {spec}{_near(spec)}")
    if not os.path.isdir(spec):
        for folder in sorted({os.path.dirname(path) or "." for path in paths}):
            refuse_packed(folder)
    for path in paths:
        _check(path)
    return paths


def _in_folder(folder: str) -> Iterator[str]:
    for place, folders, names in os.walk(folder):
        folders[:] = [
            name for name in folders if not name.startswith(".") and not is_packed(os.path.join(place, name))
        ]
        tokens = {name for name in names if is_tokens(name) and companions(name)[0] in names}
        beside = {file for name in tokens for file in companions(name)}
        if EXPORT_RECORD in names:
            beside.update(name for name in names if name.endswith(".json"))
        for name in names:
            known = name in tokens or _kind_of_data(name)[0]
            if known and name not in beside and not name.startswith("."):
                yield os.path.join(place, name)


def _parts(path: str) -> tuple[str, str | None, str | None]:
    """Stem, kind (None where unknown) and compression (None where plain) by the extensions."""
    stem, extension = os.path.splitext(path)
    compression = COMPRESSIONS.get(extension.lower())
    if compression:
        stem, extension = os.path.splitext(stem)
    kind = KINDS.get(extension.lower())
    # A columnar file is read by seeking, and has its own compression; tokens are read by places.
    return stem, None if compression and kind in ("parquet", "tokens") else kind, compression


def _kind_of_data(path: str) -> tuple[str | None, str | None]:
    """Kind and compression; None where it is unknown, of notes about the data, or needs files beside it."""
    stem, kind, compression = _parts(path)
    if kind == "tokens":
        return None, None
    about = kind == "text" and os.path.basename(stem).lower() in ABOUT
    return None if about else kind, compression


def _kind(path: str) -> tuple[str, str | None]:
    _, kind, compression = _parts(path)
    if kind is None:
        raise InputError(
            f"{path}: what kind of file this is cannot be told from its extension; "
            f"rename it to one of {_known()}"
        )
    return kind, compression


def _check(path: str) -> None:
    """Raises InputError unless the path is a file that can be read and holds something."""
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        raise InputError(f"{path} is a link to a file that is not there") from None
    if not stat.S_ISREG(facts.st_mode):
        raise InputError(f"{path} is no regular file, and sources are read twice; save it first")
    if not os.access(path, os.R_OK):
        raise InputError(f"{path} may not be read; change its permissions")
    if facts.st_size == 0:
        raise InputError(f"{path} is empty (0 bytes); leave it out, or fetch it again")


def _near(spec: str) -> str:
    """Names close to a missing one, to be put behind a message."""
    import difflib

    folder, name = os.path.split(spec)
    if not os.path.isdir(folder or "."):
        return f": the folder {folder} is missing too"
    near = difflib.get_close_matches(name, sorted(os.listdir(folder or ".")), cutoff=0.6)
    return f"; near it: {', '.join(os.path.join(folder, other) for other in near)}" if near else ""


def _known() -> str:
    compressed = ", ".join(COMPRESSIONS)
    return f"{', '.join(KINDS)} (text, CSV and JSON also with {compressed} behind)"
