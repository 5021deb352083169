"""Files of a folder put behind a URL and taken away there: what builds and exports do alike.

A file is put whole and then asked for, so that one which arrived short is told at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from padless.runtime.format import RemoteError
from padless.runtime.storage import Stamp, Storage

AT_ONCE = 4
"""Files uploaded at a time; a driver sends the parts of each side by side as well."""


def send(storage: Storage, path: str, name: str) -> Stamp:
    """Put a file of this machine under a name; the store's mark of it. Raises RemoteError."""
    storage.ask(name, lambda system, to: system.put_file(path, to), doing="written")
    stamp, size = storage.stamp(name), os.path.getsize(path)
    if stamp.size != size:
        raise RemoteError(
            f"{storage.where(name)} has {stamp.size} bytes where {size} were written: the same command sends "
            "it again"
        )
    return stamp


def send_all(names: Iterable[str], send_one: Callable[[str], None]) -> None:
    """Send files side by side; where one fails, those that wait are left out, and its error is raised."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(send_one, names):  # which takes back what waits
            pass


def remove(storage: Storage, names: Iterable[str]) -> None:
    """Take objects away, one after the other; those that are not there are no matter."""

    def taken(system: Any, path: str) -> None:
        if system.exists(path):
            system.rm_file(path)

    for name in names:
        storage.ask(name, taken, doing="removed")
