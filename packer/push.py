"""`pack-dataset push`: a packed folder to a data set on the Hub, as one commit.

Before the first byte leaves, shards, tables and tokenizer files are compared with their checksums, each plan
with its hash, and what `datasets` reads (dataset_info.json, state.json) with the manifest's shards and
columns; the manifest itself has a checksum only where it is that of one of several splits. All goes up in one
commit, which also takes away what an earlier push left: whoever loads the data set meanwhile has one whole
folder or the other. `huggingface_hub` does the work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from padless.packer.card import has_room_for_card, write_card
from padless.packer.errors import InputError
from padless.packer.hub import hub_api, is_hub_id, status_of
from padless.runtime.format import MANIFEST, Manifest, check_file, load_manifest
from padless.runtime.reader import PackedReader
from padless.runtime.storage import is_url

_OURS = re.compile(
    r"([\w.-]+/)?(shard-\d{5,}-[0-9a-f]{8}\.arrow|sequences(-\d{5,})?\.parquet|dataset_info\.json|state\.json"
    r"|manifest\.json|tokenizer/[\w.-]+|plans/.+\.parquet)|dataset_dict\.json"
)
"""What a push may replace or take away; anything else in the repository stays."""
_WAY_OUT = "copy the folder again or rebuild it with pack-dataset build --force"


def push(folder: str | Path, repository: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload a packed folder, or a folder of splits, to ORG/NAME; the address of the commit.

    The repository is made where there is none. The card, README.md, is written anew into the folder unless
    somebody else wrote the one that is there, or edited it.
    Raises InputError for wrong use and for what the Hub refuses, and what opening a damaged folder raises.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    if is_url(folder):
        raise InputError(f"push reads a folder, and {folder} is a URL: copy it here")
    root = Path(folder)
    if not is_hub_id(repository):
        raise InputError(f"{repository!r} is no name of a data set on the Hub; it is spelled ORG/NAME")
    files = dict(_files(root))
    files["README.md"] = root / "README.md"
    if has_room_for_card(root):
        write_card(root)
    api = hub_api()
    try:
        api.create_repo(repository, repo_type="dataset", private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, repo_type="dataset", exist_ok=True)
        there = api.list_repo_files(repository, repo_type="dataset", revision=revision)
        stale = [name for name in there if _OURS.fullmatch(name) and name not in files]
        operations: list[Any] = [CommitOperationDelete(path_in_repo=name) for name in stale]
        operations += [CommitOperationAdd(path_in_repo=n, path_or_fileobj=p) for n, p in files.items()]
        commit = api.create_commit(
            repository, operations, commit_message="Packed sequences", repo_type="dataset", revision=revision
        )
    except Exception as error:
        raise _refused(error, repository) from error
    return str(commit.commit_url)


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    """Name in the repository and path of every file, each found as its manifest says."""
    manifest = load_manifest(root)
    if isinstance(manifest, Manifest):
        yield from _files_of_split(root, "", manifest)
        return
    for split in manifest.splits:
        folder = root / split.name
        check_file(folder / MANIFEST, split.bytes, split.checksum)
        inner = load_manifest(folder)
        if not isinstance(inner, Manifest):
            raise InputError(f"{folder} holds splits itself; push it by itself")
        yield from _files_of_split(folder, f"{split.name}/", inner)
    if _content(root / "dataset_dict.json") != {"splits": [*manifest.names]}:
        raise InputError(f"{root / 'dataset_dict.json'} names other splits than the manifest; {_WAY_OUT}")
    yield from ((name, root / name) for name in (MANIFEST, "dataset_dict.json"))


def _files_of_split(folder: Path, prefix: str, manifest: Manifest) -> Iterator[tuple[str, Path]]:
    for file in manifest.files:
        check_file(folder / file.file, file.bytes, file.checksum)
        yield prefix + file.file, folder / file.file
    # What lets other libraries load the folder, as they look at it.
    shards = [{"filename": shard.file} for shard in manifest.shards]
    columns = sorted(column.name for column in manifest.columns)
    for name, key, wanted in (
        ("state.json", "_data_files", shards),
        ("dataset_info.json", "features", columns),
    ):
        found = _content(folder / name).get(key)
        if (sorted(found) if isinstance(found, dict) else found) != wanted:
            raise InputError(f"{folder / name} has other {key} than the manifest; {_WAY_OUT}")
    for plan in sorted((folder / "plans").glob("*.parquet")):
        PackedReader(folder, plan=plan.stem)  # which compares it with its hash
        yield f"{prefix}plans/{plan.name}", plan
    yield from ((prefix + name, folder / name) for name in (MANIFEST, "dataset_info.json", "state.json"))


def _content(path: Path) -> dict[str, Any]:
    """A small file of JSON that is an object."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); {_WAY_OUT}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} is no JSON object; {_WAY_OUT}")
    return found


def _refused(error: Exception, repository: str) -> InputError:
    status = status_of(error)
    if status in (401, 403):
        way = "log in with `hf auth login`, or set HF_TOKEN to a token that may write there"
    elif status == 404:
        way = "see how the name is spelled, and that the branch exists"
    else:
        way = "see the network and HF_ENDPOINT; the same command again sends what is missing"
    words = " ".join(str(error).split())[:300] or type(error).__name__
    return InputError(f"{repository} could not be written ({words}): {way}")
