"""A tokenizer folder as it lies on disk, and the background load of its fast backend.

Loading is the floor of a small build (about a second for a vocabulary of 150,000, nearly all of it without
the GIL), so `start_loading` is the first thing a build does, and everything else happens in its shadow.
Nothing heavy is imported here before that thread runs.
"""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from padless.packer.errors import InputError
from padless.packer.reference import ReferenceProcess

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass
class TokenizerFiles:
    """What a build needs to know of a tokenizer without encoding anything."""

    folder: str
    contents: dict[str, bytes] = field(repr=False)
    spec: dict[str, Any] = field(repr=False)
    """tokenizer.json, parsed; its merges as "a b" strings."""
    config: dict[str, Any] = field(repr=False)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of tokenizer.json."""
        return "sha256:" + hashlib.sha256(self.contents["tokenizer.json"]).hexdigest()

    @property
    def added_tokens(self) -> list[dict[str, Any]]:
        return list(self.spec.get("added_tokens") or [])

    @property
    def special_contents(self) -> list[str]:
        """Texts of the special tokens, longest first, as a tokenizer matches them."""
        found = {token["content"] for token in self.added_tokens if token.get("special")}
        return sorted(found, key=lambda text: (-len(text), text))

    @property
    def largest_id(self) -> int:
        vocab = self.spec["model"].get("vocab") or {}
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        return max(max(ids, default=0), max((t["id"] for t in self.added_tokens), default=0))

    @property
    def vocab_size(self) -> int:
        vocab = self.spec["model"].get("vocab") or {}
        known = set(vocab) if isinstance(vocab, dict) else {item[0] for item in vocab}
        return len(known) + sum(t["content"] not in known for t in self.added_tokens)

    def named_tokens(self) -> dict[str, str]:
        """bos_token, eos_token ... -> text, as chat templates see them."""
        found: dict[str, str] = {}
        for name in NAMED_TOKENS:
            value = self.config.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[name] = value
        return found

    def token_id(self, text: str) -> int | None:
        for token in self.added_tokens:
            if token["content"] == text:
                return int(token["id"])
        vocab = self.spec["model"].get("vocab")
        found = vocab.get(text) if isinstance(vocab, dict) else None
        return None if found is None else int(found)

    def own_template(self) -> str | None:
        """The chat template that ships with the tokenizer, the file before the config's entry."""
        if "chat_template.jinja" in self.contents:
            return self.contents["chat_template.jinja"].decode("utf-8")
        template = self.config.get("chat_template")
        if isinstance(template, list):  # several named ones; the one called default is the chat's
            template = {item.get("name"): item.get("template") for item in template}.get("default")
        return template if isinstance(template, str) else None


def check_folder(folder: str) -> None:
    """See that a tokenizer can be there. Raises InputError where not."""
    if not os.path.isdir(folder):
        raise InputError(
            f"no tokenizer folder {folder!r}: give a local folder that holds tokenizer.json "
            "(as written by save_pretrained)"
        )
    if not os.path.isfile(os.path.join(folder, "tokenizer.json")):
        raise InputError(
            f"{folder} has no tokenizer.json: load it once with transformers and save it again, "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(new_folder), then give the new folder"
        )


def read_files(folder: str) -> TokenizerFiles:
    """Read a local tokenizer folder; InputError where it is none."""
    import orjson

    check_folder(folder)
    contents: dict[str, bytes] = {}
    for name in COPIED:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                contents[name] = file.read()
    try:
        spec = orjson.loads(contents["tokenizer.json"])
        config = orjson.loads(contents.get("tokenizer_config.json", b"{}"))
        names = orjson.loads(contents.get("special_tokens_map.json", b"{}"))
        merges = spec["model"].get("merges")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the tokenizer in {folder} cannot be read: {error}") from error
    if merges and isinstance(merges[0], list) and not any(" " in a or " " in b for a, b in merges):
        # The older spelling of the same merges loads a fifth faster.
        spec["model"]["merges"] = [" ".join(pair) for pair in merges]
    return TokenizerFiles(
        folder=folder,
        contents=contents,
        spec=spec,
        config={**names, **config},
    )


@dataclass
class Loading:
    """A tokenizer on its way: `files` comes first, `fast` (a fastokens Tokenizer, or why not) later."""

    files: Future[TokenizerFiles]
    fast: Future[Any]
    reference: Future[ReferenceProcess]
    """The process that checks what `fast` gives."""

    def release(self) -> None:
        """Let go of the fast backend, so that its memory can be freed."""
        self.fast = Future()

    def stop(self) -> None:
        """End what is still waiting for a question."""
        if self.reference.done() and self.reference.exception() is None:
            self.reference.result().stop()


_started: dict[str, Loading] = {}


def start_loading(folder: str) -> Loading:
    """Begin to load a tokenizer folder on a thread of its own; a second call joins the first."""
    key = os.path.abspath(folder)
    if key not in _started:
        loading = Loading(files=Future(), fast=Future(), reference=Future())
        _started[key] = loading
        threading.Thread(target=_load, args=(folder, loading), daemon=True).start()
    return _started[key]


def take_loading(folder: str) -> Loading:
    """The load of this folder, begun now unless it is under way; the next call starts afresh."""
    loading = start_loading(folder)
    _started.pop(os.path.abspath(folder), None)
    return loading


def _load(folder: str, loading: Loading) -> None:
    # One thread a process: workers are the parallelism, and a process without threads forks cleanly.
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
    try:
        check_folder(folder)
        loading.reference.set_result(ReferenceProcess(folder))
        files = read_files(folder)
        loading.files.set_result(files)
    except BaseException as error:  # handed to whoever waits
        loading.files.set_exception(error)
        loading.fast.set_exception(error)
        if not loading.reference.done():
            loading.reference.set_exception(error)
        return
    try:
        import fastokens
        import orjson

        loading.fast.set_result(fastokens.Tokenizer.from_json_str(orjson.dumps(files.spec).decode("utf-8")))
    except Exception as error:  # not installed here, or a kind of tokenizer it does not know
        loading.fast.set_exception(error)
