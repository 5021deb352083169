"""`pack-dataset push`: a packed folder to a data set on the Hub, as one commit.

Everything is compared with its checksums before the first byte leaves. Shards, tables and manifest go up in
one commit, which also takes away what an earlier push left: whoever loads the data set meanwhile has one
whole folder or the other. `huggingface_hub` does the work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from padless.packer.card import write_card
from padless.packer.errors import InputError
from padless.packer.hub import hub_api, is_hub_id, status_of
from padless.runtime.format import MANIFEST, Manifest, check_file, load_manifest

_OURS = re.compile(
    r"([\w.-]+/)?(shard-\d{5,}-[0-9a-f]{8}\.arrow|sequences(-\d{5,})?\.parquet|dataset_info\.json|state\.json"
    r"|manifest\.json|tokenizer/[\w.-]+|plans/.+\.parquet)|dataset_dict\.json"
)
"""What a push may replace or take away; anything else in the repository stays."""


def push(folder: str | Path, repository: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload a packed folder, or a folder of splits, to ORG/NAME; the address of the commit.

    The repository is made where there is none. A README.md is written into the folder where it has none.
    Raises InputError for wrong use and for what the Hub refuses, and what opening a damaged folder raises.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    root = Path(folder)
    if not is_hub_id(repository):
        raise InputError(f"{repository!r} is no name of a data set on the Hub; it is spelled ORG/NAME")
    files = dict(_files(root))
    if not (root / "README.md").exists():
        write_card(root)
    files["README.md"] = root / "README.md"
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
    folders = [""] if isinstance(manifest, Manifest) else [f"{name}/" for name in manifest.names]
    for below in folders:
        inner = load_manifest(root / below)
        if not isinstance(inner, Manifest):
            raise InputError(f"{root / below} holds splits itself; push it by itself")
        for file in inner.files:
            check_file(root / below / file.file, file.bytes, file.checksum)
            yield below + file.file, root / below / file.file
        extra = [MANIFEST, "dataset_info.json", "state.json"]
        extra += sorted(f"plans/{plan.name}" for plan in (root / below / "plans").glob("*.parquet"))
        yield from ((below + name, root / below / name) for name in extra)
    if folders != [""]:
        yield from ((name, root / name) for name in (MANIFEST, "dataset_dict.json"))


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
