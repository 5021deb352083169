"""The folder that an export becomes: made beside it under a hidden name, locked, renamed when it is complete.

So a trainer never finds half an export, and two exports to one folder are kept apart. The price is that the
output is replaced as a whole: links are followed to what they mean, and a folder that cannot be replaced
(somebody's current one, a mount) is refused before any work is done.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from padless.packer.durable import sync_folder
from padless.packer.errors import InputError
from padless.packer.exports.job import remove_tree
from padless.packer.sources.packed import is_packed
from padless.runtime.format import MANIFEST


def place_of(output: str) -> str:
    """Where the output lies, links followed; InputError where no folder can be put or ought to be."""
    place = os.path.realpath(output)
    if os.path.isdir(place) and (os.path.ismount(place) or os.path.samefile(place, os.curdir)):
        what = "where a disk is mounted" if os.path.ismount(place) else "the current folder"
        raise InputError(
            f"--output {output} is {what}, and an export takes the place of its folder as a whole: give a "
            f"new folder in it, such as {os.path.join(output, 'rows')}"
        )
    above = os.path.dirname(place)
    while above != os.path.dirname(above):
        if os.path.isfile(os.path.join(above, MANIFEST)) and is_packed(above):
            raise InputError(
                f"--output {output} lies in the packed folder {above}, which holds what builds write and "
                f"nothing else: give a folder beside it, such as {above}-{os.path.basename(place)}"
            )
        above = os.path.dirname(above)
    return place


@contextmanager
def beside(output: str, told: str) -> Iterator[str]:
    """An empty folder beside the output, this process's alone; gone at the end unless it was renamed.

    `told` is what messages call the output.
    """
    parent, name = os.path.split(os.path.abspath(output))
    os.makedirs(parent, exist_ok=True)
    folder = os.path.join(parent, f".{name}.export")
    descriptor = _locked(folder, told)
    try:
        for left in os.listdir(folder):  # by a run that was killed
            path = os.path.join(folder, left)
            remove_tree(path) if os.path.isdir(path) else os.remove(path)
        try:
            yield folder
        finally:
            if _is_open_at(descriptor, folder):  # else it was renamed, and this may be the next one's
                remove_tree(folder)
    finally:
        os.close(descriptor)


def _locked(folder: str, output: str) -> int:
    """The folder, made where there is none, open and locked."""
    while True:
        os.makedirs(folder, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # renamed or removed by who is done
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_open_at(descriptor, folder):
                return descriptor
        except OSError:
            os.close(descriptor)
            raise InputError(
                f"another export writes to {output}; wait for it, or give another folder"
            ) from None
        os.close(descriptor)  # of what is the output now


def _is_open_at(descriptor: int, path: str) -> bool:
    """Whether the path still leads to what is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def put_in_place(folder: str, output: str) -> None:
    """Rename; what lay there before goes only when the new one has its name."""
    old = f"{folder}.old"
    if os.path.isdir(old):
        remove_tree(old)
    if os.path.isdir(output):
        os.rename(output, old)
    os.rename(folder, output)
    sync_folder(os.path.dirname(os.path.abspath(output)))
    if os.path.isdir(old):
        remove_tree(old)
