"""A tokenizer folder as it lies on disk, and the background load of its fast backend.

Loading is the floor of a small build (about a second for a vocabulary of 150,000, nearly all of it without
the GIL), so `start_loading` is the first thing a build does, and everything else happens in its shadow.
That is why this module imports next to nothing before the load runs, and not even its own errors.
"""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from padless.packer.errors import InputError
    from padless.packer.reference import ReferenceProcess

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
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
    """tokenizer.json, parsed; its merges may be left out."""
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

    @cached_property
    def largest_id(self) -> int:
        vocab = self.spec["model"].get("vocab") or {}
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        return max(max(ids, default=0), max((t["id"] for t in self.added_tokens), default=0))

    @cached_property
    def vocab_size(self) -> int:
        vocab = self.spec["model"].get("vocab") or {}
        known = vocab if isinstance(vocab, dict) else {item[0] for item in vocab}
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

    def named_token_id(self, name: str) -> int | None:
        """The id of eos_token, pad_token ...; None where the tokenizer names none."""
        text = self.named_tokens().get(name)
        return None if text is None else self.token_id(text)

    def own_template(self) -> str | None:
        """The chat template that ships with the tokenizer, the file before the config's entry."""
        if "chat_template.jinja" in self.contents:
            return self.contents["chat_template.jinja"].decode("utf-8")
        template = self.config.get("chat_template")
        if isinstance(template, list):  # several named ones; the one called default is the chat's
            template = {item.get("name"): item.get("template") for item in template}.get("default")
        return template if isinstance(template, str) else None


def tokenizer_folder(name: str) -> str:
    """The folder that `--tokenizer` names: a path, or else a model on the Hub, fetched into its cache.

    Raises InputError where the Hub does not give it.
    """
    if os.path.lexists(name):
        return name
    from padless.packer.hub import fetch_tokenizer, is_hub_id

    return fetch_tokenizer(name) if is_hub_id(name) else name


def check_folder(folder: str) -> None:
    """See that a tokenizer can be there. Raises InputError where not."""
    if not os.path.isdir(folder):
        raise _input_error(
            f"no tokenizer folder {folder!r}: give a local folder that holds tokenizer.json "
            "(as written by save_pretrained), or a model's name on the Hub (ORG/NAME)"
        )
    if not os.path.isfile(os.path.join(folder, "tokenizer.json")):
        raise _input_error(
            f"{folder} has no tokenizer.json: load it once with transformers and save it again, "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(new_folder), then give the new folder"
        )


def _input_error(message: str) -> InputError:
    from padless.packer.errors import InputError

    return InputError(message)


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
        data = contents["tokenizer.json"]
        merges = _merges(data)
        spec = orjson.loads(data if merges is None else data[: merges.start] + b"[]" + data[merges.stop :])
        config = orjson.loads(contents.get("tokenizer_config.json", b"{}"))
        names = orjson.loads(contents.get("special_tokens_map.json", b"{}"))
        spec["model"].get("vocab")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _input_error(f"the tokenizer in {folder} cannot be read: {error}") from error
    return TokenizerFiles(folder=folder, contents=contents, spec=spec, config={**names, **config})


def _merges(data: bytes) -> slice | None:
    """Where the merges' array lies in a tokenizer.json, if it is the file's last entry.

    It is half of a large file, and nobody needs it as Python objects.
    """
    key = b'"merges": ['
    start, end = data.find(key) + len(key) - 1, data.rfind(b"]")
    if start < len(key) or data[end + 1 :].translate(None, b" \t\r\n") != b"}}":
        return None
    return slice(start, end + 1)


def respell(data: bytes) -> bytes:
    """A tokenizer.json with its merges in the older spelling, "a b" for ["a", "b"]: it loads a fifth faster.

    A line break cannot stand in a JSON string, so on a file that `save_pretrained` has indented that is
    three replacements. A file of any other form is given back as it is.
    """
    where = _merges(data)
    if where is None:
        return data
    merges = data[where]
    pairs, more = divmod(merges.count(b"\n") - 1, 4)
    if more or merges.count(b" ") != 28 * pairs + 4:
        return data  # spelled in another way, or a half has a space in it
    lines = merges.translate(None, b" ")
    joined = lines.replace(b'",\n"', b" ")
    if len(lines) - len(joined) != 3 * pairs:
        return data
    joined = joined.replace(b'"\n],\n[\n"', b'","').replace(b'[\n[\n"', b'["').replace(b'"\n]\n]', b'"]')
    return b"".join((data[: where.start], joined, data[where.stop :]))


class Loading:
    """A tokenizer on its way: the fast backend on a thread, the reference in a process, the files here."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.begun = threading.Event()
        """Set when the fast backend's load no longer needs the GIL, or there is none."""
        self.fast: Future[Any] = Future()
        """A fastokens Tokenizer, or why there is none."""
        # The process's end waits for it: a thread of native code that comes back into a Python that is
        # being taken down aborts the process.
        threading.Thread(target=_load, args=(self,)).start()

    @cached_property
    def files(self) -> TokenizerFiles:
        """The tokenizer's files. Raises InputError where there is no tokenizer."""
        return read_files(self.folder)

    @cached_property
    def reference(self) -> ReferenceProcess:
        """The process that checks what `fast` gives."""
        from padless.packer.reference import ReferenceProcess

        return ReferenceProcess(self.folder)

    def release(self) -> None:
        """Let go of the fast backend, so that its memory can be freed."""
        self.fast = Future()

    def stop(self) -> None:
        """End what is still waiting for a question."""
        if "reference" in self.__dict__:
            self.reference.stop()


_started: dict[str, Loading] = {}


def start_loading(folder: str) -> Loading:
    """Begin to load a tokenizer folder on a thread of its own; a second call joins the first."""
    key = os.path.abspath(folder)
    if key not in _started:
        _started[key] = Loading(folder)
    return _started[key]


def take_loading(folder: str) -> Loading:
    """The load of this folder, begun now unless it is under way; the next call starts afresh."""
    loading = start_loading(folder)
    _started.pop(os.path.abspath(folder), None)
    return loading


ONE_THREAD = ("FASTOKENS_BPE_THREADS", "1")
"""For the environment: workers are the parallelism, and a process without threads forks cleanly."""


def load_fast(data: bytes) -> Any:
    """The fast backend of a tokenizer.json, at once; raises whatever it does where it cannot."""
    os.environ.setdefault(*ONE_THREAD)
    import fastokens

    return fastokens.Tokenizer.from_json_str(respell(data).decode("utf-8"))


def _load(loading: Loading) -> None:
    os.environ.setdefault(*ONE_THREAD)
    try:
        import fastokens

        with open(os.path.join(loading.folder, "tokenizer.json"), "rb") as file:
            text = respell(file.read()).decode("utf-8")
        loading.begun.set()
        loading.fast.set_result(fastokens.Tokenizer.from_json_str(text))
    except Exception as error:  # no file, not installed here, or a kind of tokenizer it does not know
        loading.begun.set()
        loading.fast.set_exception(error)
