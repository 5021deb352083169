"""The output folder: whose it is, whether it is finished, and what is swept away.

Only names that a build writes are ever touched; a folder with anything else in it is refused.
"""

from __future__ import annotations

import json
import os
import re
import shutil

from padless.packer.errors import InputError
from padless.packer.token_store import WORK_FILES
from padless.packer.tokenizer_files import COPIED
from padless.runtime.format import MANIFEST, WORK_FOLDER

SPLITS = ("train", "validation")

_FILES = r"sequences(-\d{5,})?\.parquet|dataset_info\.json|state\.json|dataset_dict\.json|manifest\.json"
_OURS = re.compile(
    rf"shard-\d{{5,}}-[0-9a-f]{{8}}\.arrow|{_FILES}|\.(shard-\d{{5,}}|tokenizer-.*|{_FILES})\.tmp"
)
_FREE = ("README.md", "report.html")
"""Ours or the user's additions: they stand beside the data and are left where they are."""


def check_output(output: str) -> None:
    """See that a build may write here. InputError where something lies there that padless did not write."""
    if not os.path.lexists(output):
        return
    if not os.path.isdir(output):
        raise InputError(f"output {output} is a file; give a folder (a new one, best)")
    names = os.listdir(output)
    owned = MANIFEST in names or WORK_FOLDER in names
    stranger = _stranger(output, nested=False) if owned else next(iter(sorted(names)), None)
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


def _stranger(folder: str, *, nested: bool) -> str | None:
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name == "tokenizer" and os.path.isdir(path):
            other = next(
                (n for n in sorted(os.listdir(path)) if n not in COPIED),
                None,
            )
            if other is not None:
                return f"tokenizer/{other}"
        elif name == WORK_FOLDER and os.path.isdir(path) and not nested:
            other = next((n for n in sorted(os.listdir(path)) if n not in WORK_FILES), None)
            if other is not None:
                return f"{WORK_FOLDER}/{other}"
        elif name in SPLITS and os.path.isdir(path) and not nested:
            inside = _stranger(path, nested=True)
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
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name == "tokenizer" and os.path.isdir(path):
            for inner in os.listdir(path):
                if f"tokenizer/{inner}" not in keep:
                    os.remove(os.path.join(path, inner))
            if not os.listdir(path):
                os.rmdir(path)
        elif name in SPLITS and os.path.isdir(path):
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
