"""What `pack-dataset` tells a user who did something it cannot go on with."""

from __future__ import annotations

import errno

from padless.runtime.format import PadlessError


class InputError(PadlessError, ValueError):
    """Wrong use or bad input: the message names the value, the limit and the way out."""


class OptionError(InputError):
    """Options that are wrong in themselves.

    The message calls them by their fields in `PackConfig`, one of them as its first word; the command line
    spells them as its options.
    """


class BusyError(InputError):
    """Another build is writing into the output."""


class CutError(InputError):
    """A piece of a file does not parse by itself: it was cut on trust, and wrongly, or is malformed."""


class DiskFullError(PadlessError, OSError):
    """A write failed for want of space; what was finished before it is kept for the next try."""

    path: str = ""
    """What was being written."""
    missing: int = 0
    """Bytes of it that did not fit."""


class WorkerLostError(PadlessError, RuntimeError):
    """A worker process ended without a word; what was finished is kept for the next try."""


class ClusterError(PadlessError, RuntimeError):
    """A node of a cluster cannot do its part; what was finished is kept for the next try."""


class SourceLostError(PadlessError, OSError):
    """The connection to a remote source broke; what was finished is kept for the next try."""


class RecordError(ValueError):
    """A record that cannot be used as it is; the text says which field and why."""


def disk_full(error: OSError, path: str, missing: int) -> OSError:
    """The error to raise for a failed write: our own where the disk is full; another names the file."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        # A write to a descriptor names none; what else comes here (a source's connection) has other numbers.
        if error.filename is None and error.errno in (errno.EFBIG, errno.EIO, errno.EROFS):
            error.filename = path
        return error
    full = DiskFullError(disk_full_message(path, missing))
    full.path, full.missing = path, missing
    return full


def disk_full_message(path: str, missing: int, *, then: str = "it goes on where it stopped") -> str:
    """What to tell, with the way out; `then` is what the same command does the next time."""
    return (
        f"the disk is full: {path} could not be written ({missing:,} bytes missing). Nothing was "
        f"committed; make room and run the same command again, {then}"
    )
