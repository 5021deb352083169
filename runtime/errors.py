"""What padless raises on purpose: a class for each way a packed folder, or its use, can be bad."""

from __future__ import annotations


class PadlessError(Exception):
    """Everything padless raises on purpose; the message is for people."""


class FormatError(PadlessError, ValueError):
    """A packed folder that is not as FORMAT.md says."""


class NotPackedError(FormatError):
    """There is no manifest: not a packed folder, or one that was never finished."""


class ManifestError(FormatError):
    """The manifest is there and cannot be understood."""


class VersionError(FormatError):
    """The folder was written by a later version of the format."""


class MissingFileError(FormatError):
    """A file that the manifest lists is not there."""


class TruncatedFileError(FormatError):
    """A file is shorter or longer than the manifest says."""


class ChecksumError(FormatError):
    """A file has the right size and other bytes."""


class ForeignFileError(FormatError):
    """A file under the right name from another folder: its schema is not the manifest's."""


class BatchError(FormatError):
    """A record batch that cannot be read or contradicts itself or the manifest."""


class SplitError(FormatError):
    """A folder of splits where one split is needed, or a split that is not there."""


class PlanError(FormatError):
    """A plan that is not there, or was not made for this folder."""


class RemoteError(FormatError):
    """A file behind a URL that cannot be read for a reason of its file system: network, rights, no driver."""

    may_pass: bool = False
    """Whether it was tried several times, and might go well another time."""


class CollateError(PadlessError, ValueError):
    """What should become a batch is no pack, or contradicts itself."""


class ModelError(PadlessError, ValueError):
    """A model, or a call of one, in which packed sequences would not stay apart."""


class IsolationError(ModelError):
    """A model in which a packed sequence was seen to depend on its neighbours."""


class StreamError(PadlessError, ValueError):
    """A stream that is set up or used so that ranks would not see each pack once."""


class StateError(PadlessError, ValueError):
    """A saved position that belongs to another data set, seed or version."""


class AttentionError(PadlessError, ValueError):
    """A call of attention that contradicts itself, or boundaries that do not fit its tokens."""


class BackendError(AttentionError):
    """An attention backend that was asked for and cannot do the call."""


class StepClockError(PadlessError, ValueError):
    """Ranks timed different steps, or none."""
