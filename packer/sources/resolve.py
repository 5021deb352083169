"""From what the user typed (files, globs, folders) to the list of source files.

The list is sorted within each argument and says by names alone what every file is, so that a wrong
path or a stray file is told in milliseconds, before anything is loaded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from padless.packer.errors import InputError
from padless.packer.sources.chunks import SourceFile
from padless.packer.sources.text import begins_record
from padless.runtime.format import MANIFEST, WORK_FOLDER

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
}
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
# What a data set's folder holds about the data; they are read when named one by one.
ABOUT = {"readme", "license", "licence", "notice", "changelog"}


def resolve_sources(
    specs: Sequence[str], *, eval_specs: Sequence[str] = (), text_by: str = "line"
) -> list[SourceFile]:
    """The files that the arguments name, those for the evaluation split last.

    A folder is searched for known extensions; hidden files, and notes such as README.md, are
    skipped there. Raises InputError for whatever cannot be a source.
    """
    begins_record(text_by)
    paths = [(path, False) for spec in specs for path in _expand(spec)]
    paths += [(path, True) for spec in eval_specs for path in _expand(spec)]
    if not paths:
        raise InputError("no source was given; name a file, a glob or a folder")
    seen: dict[str, str] = {}
    for path, _ in paths:
        real = os.path.realpath(path)
        if real in seen:
            other = seen[real]
            also = "" if other == path else f" (also as {other})"
            raise InputError(f"{path} is given twice{also}; name every source once")
        seen[real] = path
    absolute = [os.path.abspath(path) for path, _ in paths]
    root = os.path.commonpath([os.path.dirname(path) for path in absolute])
    files = []
    for (path, is_eval), full in zip(paths, absolute, strict=True):
        kind, compression = _kind(path)
        name = os.path.relpath(full, root).replace(os.sep, "/")
        files.append(SourceFile(path=path, name=name, kind=kind, compression=compression, eval=is_eval))
    return files


def _expand(spec: str) -> list[str]:
    """The files that one argument names, checked to be there and not empty."""
    if os.path.isdir(spec):
        if os.path.isfile(os.path.join(spec, MANIFEST)) and _is_packed(spec):
            raise InputError(
                f"{spec} is a packed folder, its records are tokens already: pack-dataset repack {spec} "
                "--output DIR packs them again, and several folders into one"
            )
        paths = sorted(_in_folder(spec))
        if not paths:
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
    for path in paths:
        _check(path)
    return paths


def _in_folder(folder: str) -> Iterator[str]:
    for place, folders, names in os.walk(folder):
        folders[:] = [
            name for name in folders if not name.startswith(".") and not _is_packed(os.path.join(place, name))
        ]
        for name in names:
            stem, kind, _ = _parts(name)
            about = kind == "text" and os.path.basename(stem).lower() in ABOUT
            if kind and not about and not name.startswith("."):
                yield os.path.join(place, name)


def _is_packed(folder: str) -> bool:
    """Whether a build wrote this folder, or is writing it: its own output is no source."""
    manifest = os.path.join(folder, MANIFEST)
    return os.path.exists(os.path.join(folder, WORK_FOLDER)) or (
        os.path.isfile(manifest) and b'"padless"' in Path(manifest).read_bytes()
    )


def _parts(path: str) -> tuple[str, str | None, str | None]:
    """Stem, kind (None where unknown) and compression (None where plain) by the extensions."""
    stem, extension = os.path.splitext(path)
    compression = COMPRESSIONS.get(extension.lower())
    if compression:
        stem, extension = os.path.splitext(stem)
    kind = KINDS.get(extension.lower())
    # A columnar file is read by seeking, and has its own compression.
    return stem, None if compression and kind == "parquet" else kind, compression


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
