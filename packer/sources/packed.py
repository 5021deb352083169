"""Packed folders among the sources: never read as records, since their rows are packs.

One that is asked for is refused with the way to pack it again; one that lies beside data is passed over, so
a data set may hold its own packed folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from padless.packer.errors import InputError
from padless.runtime.format import MANIFEST, WORK_FOLDER


def is_packed(folder: str) -> bool:
    """Whether a build wrote this folder, or is writing it: its own output is no source."""
    manifest = os.path.join(folder, MANIFEST)
    return os.path.exists(os.path.join(folder, WORK_FOLDER)) or (
        os.path.isfile(manifest) and b'"padless"' in Path(manifest).read_bytes()
    )


def refuse_packed(folder: str) -> None:
    """InputError where the folder is a packed one, of one split or of several."""
    if not is_packed(folder):
        return
    if not os.path.isfile(os.path.join(folder, MANIFEST)):
        raise InputError(
            f"{folder} is a packed folder that was never finished: run the build that writes it again, then "
            "pack-dataset repack packs its tokens anew"
        )
    raise InputError(f"{folder} is a packed folder, {_way_out(folder)}")


def refuse_packed_below(folder: str) -> None:
    """InputError where the folder, which has nothing to read, has packed folders in it."""
    found = sorted(place for place, _, _ in os.walk(folder) if is_packed(place))
    if found:
        raise InputError(f"the folder {folder} holds a packed folder, {found[0]}, {_way_out(found[0])}")


def _way_out(folder: str) -> str:
    return (
        f"its records are tokens already: pack-dataset repack {folder} --output DIR packs them again, and "
        "several folders into one"
    )
