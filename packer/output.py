"""The output folder: whose it is, whether it is finished, and what is swept away.

Only names that a build writes are ever touched; a folder with anything else in it is refused.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection

from padless.packer.errors import InputError
from padless.packer.tokenizer_files import COPIED
from padless.packer.work_folder import WORK_FILES
from padless.runtime.format import MANIFEST, WORK_FOLDER

_FILES = r"sequences(-\d{5,})?\.parquet|dataset_info\.json|state\.json|dataset_dict\.json|manifest\.json"
_OURS = re.compile(
    rf"shard-\d{{5,}}-[0-9a-f]{{8}}\.arrow|{_FILES}|\.(shard-\d{{5,}}(-[0-9a-f]{{8}})?|tokenizer-.*|{_FILES})\.tmp"
)
_SPLITS = "splits.json"
_FREE = ("README.md", "report.html")
"""Ours or the user's additions: they stand beside the data and are left where they are."""


_BELOW = re.compile(
    rf"shard-\d{{5,}}-[0-9a-f]{{8}}\.arrow|{_FILES}|tokenizer/({'|'.join(map(re.escape, COPIED))})"
    r"|plans/[^/]+\.parquet"
)


def is_ours(name: str, splits: Collection[str]) -> bool:
    """Whether it is the name of a file that a build leaves, below its output or in the folder of a split."""
    folder, _, inside = name.partition("/")
    return _BELOW.fullmatch(name) is not None or folder in splits and _BELOW.fullmatch(inside) is not None


def stands_beside(name: str) -> bool:
    """Whether it is an addition that builds leave where it is, there or in the folder of a split."""
    return name.count("/") < 2 and name.rpartition("/")[2] in _FREE


def check_output(output: str) -> None:
    """See that a build may write here. InputError where something lies there that padless did not write."""
    if not os.path.lexists(output):
        return
    if not os.path.isdir(output):
        raise InputError(f"output {output} is a file; give a folder (a new one, best)")
    names = os.listdir(output)
    owned = MANIFEST in names or WORK_FOLDER in names
    stranger = _stranger(output, _splits_in(output)) if owned else next(iter(sorted(names)), None)
    if stranger is not None:
        raise InputError(
            f"output {output} holds {stranger!r}, which padless did not write: give another folder, or "
            "move it away (--force does not touch it either)"
        )


def _is_ours(manifest: str) -> bool:
    """Whether it is one of padless, of any version: web apps and others have a manifest.json too."""
    try:
        with open(manifest, "rb") as file:
            content = json.load(file)
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("format") == "padless"


def remember_splits(output: str, splits: tuple[str, ...]) -> None:
    """Write down in the work folder whose split folders are ours, until all is done or swept away."""
    known = sorted(_splits_in(output) | {name for name in splits if name})
    with open(os.path.join(output, WORK_FOLDER, _SPLITS), "w", encoding="utf-8") as file:
        json.dump(known, file)


def _splits_in(output: str) -> set[str]:
    """The split folders that a build made: those of its manifest, and of the work folder of one under way."""
    found: set[str] = set()
    for path in (os.path.join(output, MANIFEST), os.path.join(output, WORK_FOLDER, _SPLITS)):
        try:
            with open(path, "rb") as file:
                content = json.load(file)
        except (OSError, ValueError):  # there is none, or it was being written
            continue
        if isinstance(content, dict):
            content = [item.get("name") for item in content.get("splits") or () if isinstance(item, dict)]
        if isinstance(content, list):
            found.update(name for name in content if isinstance(name, str))
    return found


def _stranger(folder: str, splits: Collection[str] | None = None) -> str | None:
    """What lies there and is none of ours; without `splits`, in the folder of a split."""
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name == "tokenizer" and os.path.isdir(path):
            other = next(
                (n for n in sorted(os.listdir(path)) if n not in COPIED),
                None,
            )
            if other is not None:
                return f"tokenizer/{other}"
        elif name == WORK_FOLDER and os.path.isdir(path) and splits is not None:
            other = next((n for n in sorted(os.listdir(path)) if n not in WORK_FILES), None)
            if other is not None:
                return f"{WORK_FOLDER}/{other}"
        elif splits and name in splits and os.path.isdir(path):
            inside = _stranger(path)
            if inside is not None:
                return f"{name}/{inside}"
        elif name == MANIFEST and not _is_ours(path):
            return name
        elif name == "plans" and os.path.isdir(path):
            plan = re.compile(r".+\.parquet|\..+\.parquet\.tmp")
            other = next((n for n in sorted(os.listdir(path)) if not plan.fullmatch(n)), None)
            if other is not None:
                return f"plans/{other}"
        elif not _OURS.fullmatch(name) and name not in _FREE:
            return name
    return None


def sweep(folder: str, keep: set[str]) -> None:
    """Remove what an earlier build left, other than the files to keep (paths below the folder)."""
    splits = _splits_in(folder)
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name == "tokenizer" and os.path.isdir(path):
            for inner in os.listdir(path):
                if f"tokenizer/{inner}" not in keep:
                    os.remove(os.path.join(path, inner))
            if not os.listdir(path):
                os.rmdir(path)
        elif name in splits and os.path.isdir(path):
            below = {item.removeprefix(f"{name}/") for item in keep if item.startswith(f"{name}/")}
            sweep(path, below)
            if not os.listdir(path):
                os.rmdir(path)
        elif name == "plans" and os.path.isdir(path):
            shutil.rmtree(path)  # plans over sequences that are gone
        elif _OURS.fullmatch(name) and name not in keep:
            os.remove(path)


def retract(folder: str) -> None:
    """Take back the commit: the manifest first, then what lets other libraries load the folder."""
    for name in (MANIFEST, "state.json", "dataset_dict.json"):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            os.remove(path)


def first_missing(folder: str) -> str | None:
    """The outermost of the folders on the way that does not exist yet."""
    missing = None
    path = os.path.abspath(folder)
    while not os.path.exists(path):
        missing, path = path, os.path.dirname(path)
    return missing


def remove_empty(folder: str, made: str | None) -> None:
    """Remove the folders that this run made, as far as they are empty, from `folder` out to `made`."""
    path = os.path.abspath(folder)
    while made is not None and not os.listdir(path):
        os.rmdir(path)
        if path == made:
            return
        path = os.path.dirname(path)
