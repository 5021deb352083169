"""Folders as `datasets.Dataset.save_to_disk` writes them, read with pyarrow alone.

state.json lists the Arrow files in the order of the rows; a folder of splits has dataset_dict.json and such
a folder for each. `datasets` itself is never loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from padless.packer.errors import InputError
from padless.packer.sources.splits import choose_splits

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def is_saved(folder: str) -> bool:
    """Whether the folder is one of `save_to_disk`, or meant to be."""
    names = set(os.listdir(folder))
    arrow = any(name.endswith(".arrow") for name in names)
    return SPLITS in names or (INFO in names and (STATE in names or arrow))


def saved_files(folder: str, split: str | None, *, is_eval: bool) -> Iterator[tuple[str, str]]:
    """(split, Arrow file) of a saved data set ("": it has no splits), in the order of their rows.

    Raises InputError where the folder is not whole, or rearranged by indices.
    """
    if os.path.isfile(os.path.join(folder, SPLITS)):
        names = _read(folder, SPLITS).get("splits")
        if not isinstance(names, list) or not all(_is_name(name) for name in names):
            raise InputError(f"{folder}/{SPLITS} does not list its splits; save it again")
        for name in choose_splits(names, split, folder, is_eval):
            for path in _files_of_one(os.path.join(folder, name)):
                yield name, path
        return
    if split:
        raise InputError(f"{folder} holds one data set without splits, so --split {split} does not apply")
    for path in _files_of_one(folder):
        yield "", path


def _files_of_one(folder: str) -> list[str]:
    state = _read(folder, STATE)
    if any(state.get(key) for key in ("_indices_data_files", "_indices_files")):
        raise InputError(
            f"{folder} was saved with an order of rows beside it (by an older version of datasets): load it, "
            "call .flatten_indices(), and save it again"
        )
    files = state.get("_data_files")
    listed = [item.get("filename") if isinstance(item, dict) else None for item in files or ()]
    if not listed or not all(_is_name(name) for name in listed):
        raise InputError(
            f"{folder}/{STATE} lists no Arrow files (_data_files): it is no folder of save_to_disk, or of a "
            "version that padless does not know; save it as Parquet, or name the files"
        )
    _read(folder, INFO)
    return [os.path.join(folder, str(name)) for name in listed]


def _is_name(value: Any) -> bool:
    """Whether it is a name within its folder, and no path out of it."""
    return isinstance(value, str) and os.path.basename(value) == value and value not in ("", ".", "..")


def _read(folder: str, name: str) -> dict[str, Any]:
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            content = json.load(file)
    except FileNotFoundError:
        raise InputError(
            f"{folder} looks like a folder of save_to_disk but has no {name}: it was not saved to the end, "
            "or is a cache of datasets; save it again, or name its Arrow files themselves"
        ) from None
    except ValueError as error:
        raise InputError(f"{path} is broken ({error}); save the data set again") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} is broken (no object); save the data set again")
    return content
