"""The Hugging Face Hub as padless uses it: which revision, which files, their bytes as a stream.

`huggingface_hub` comes with `tokenizers`, so this needs no extra, and no code of a repository is ever run.
The library is imported inside the functions: a build on local files never loads it. What it raises
becomes one sentence that says what to do.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, NoReturn

from padless.packer.errors import InputError, SourceLostError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PREFIX = "hf://"
_ID = re.compile(r"[\w.-]+/[\w.-]+")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)


def is_hub_id(text: str) -> bool:
    """Whether it is spelled like one, ORG/NAME; a path that exists goes before."""
    parts = text.split("/")
    return bool(_ID.fullmatch(text)) and not any(part.startswith(".") or ".." in part for part in parts)


def hub_api() -> HfApi:
    """The client of the Hub that HF_ENDPOINT names."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


def fetch_tokenizer(name: str) -> str:
    """The folder, in the Hub's cache, that holds a model's tokenizer; what is cached is not fetched again.

    Nothing but the tokenizer's few files is taken. With HF_HUB_OFFLINE only the cache is looked at. Raises
    InputError where the Hub does not give the files.
    """
    import huggingface_hub.utils

    bars: Any = huggingface_hub.utils
    shown = not bars.are_progress_bars_disabled()
    bars.disable_progress_bars()
    try:
        folder = hub_api().snapshot_download(name, allow_patterns=list(_TOKENIZER_FILES))
    except Exception as error:
        refuse(error, f"the tokenizer {name}", f"https://huggingface.co/{name}", f"hf download {name}")
    finally:
        if shown:
            bars.enable_progress_bars()
    return str(folder)


def open_stream(url: str) -> Any:
    """A file of a repository, from its first byte to its last; a broken connection is made once again."""
    return _file_system().open(url, "rb", block_size=0)


def open_random(url: str) -> Any:
    """A file of a repository for reading anywhere in it, one request a read."""
    return _file_system().open(url, "rb", cache_type="none")


def lost(url: str, error: Exception) -> InputError | SourceLostError:
    """What to raise where a file's bytes do not come, or stop coming."""
    name = url.removeprefix(f"{PREFIX}datasets/").partition("@")[0]
    if status_of(error) in (401, 403, 404):
        return _explained(error, f"the data set {name}", f"https://huggingface.co/datasets/{name}", "")
    return SourceLostError(
        f"{url} stopped coming ({_one_line(error)}); what was finished is kept: the same command goes on"
    )


def refuse(error: Exception, what: str, page: str, download: str) -> NoReturn:
    """Raise InputError for what the client raised when it was asked for `what`."""
    raise _explained(error, what, page, download) from error


def _explained(error: Exception, what: str, page: str, download: str) -> InputError:
    from huggingface_hub import errors

    offline = isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError)
    status = status_of(error)
    if offline and _is_offline():
        message = (
            f"{what} is not on this machine (nor is there such a path), and HF_HUB_OFFLINE forbids to "
            "fetch it: unset it, or fetch it where there is a network "
            f"({download} --local-dir FOLDER) and give the folder"
        )
    elif isinstance(error, errors.GatedRepoError) or status == 403:
        message = (
            f"{what} is gated: ask for access on {page}, then log in with `hf auth login` or set HF_TOKEN"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        message = f"{what} does not exist: branches, tags and commits are listed on {page}"
    elif isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        message = (
            f"there is no path of that name here, and {what} is not on the Hub; see how it is spelled "
            "(if it is private: log in with `hf auth login`, or set HF_TOKEN)"
        )
    else:
        message = (
            f"there is no path of that name here, and {what} could not be fetched from the Hub "
            f"({_one_line(error)}): see the network, and HF_ENDPOINT"
        )
    return InputError(message)


def status_of(error: Exception) -> int | None:
    """The status of the answer that an error came of."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _file_system() -> Any:
    from huggingface_hub import HfFileSystem

    return HfFileSystem(endpoint=os.environ.get("HF_ENDPOINT"))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
