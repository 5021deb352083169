"""The reference tokenizer in a process of its own, for the check that every build begins with.

`tokenizers` takes a third of a second to load a large vocabulary and holds the GIL for most of it, so the
load happens elsewhere: the child gets a sample of the input and answers with its ids.

    child:   python -m padless.packer.reference FOLDER   < length, request   > answer      (both JSON)
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import subprocess


class Answer(NamedTuple):
    """What the reference says: ids of every text asked for, and what it puts around a text."""

    begin_ids: tuple[int, ...]
    lengths: list[list[int]]
    """For each group of texts, each text's number of tokens."""
    ids: list[list[int]]
    """For each group, all tokens, one text after the other."""


class ReferenceProcess:
    """The child; `ask` once, `answer` waits. Where no child can be had, this process does the work."""

    def __init__(self, folder: str) -> None:
        import subprocess  # the child imports this module too, and needs none of what is imported inside

        self._folder = folder
        self._request: list[tuple[bool, list[str]]] = []
        try:
            self._child: subprocess.Popen[bytes] | None = subprocess.Popen(
                [sys.executable, "-P", "-m", "padless.packer.reference", folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            self._child = None

    def ask(self, groups: list[tuple[bool, list[str]]]) -> None:
        """Hand over groups of texts, each with whether special tokens spelled in them stay text."""
        import threading

        import orjson

        self._request = groups
        # The child reads when it has loaded, and a pipe holds less than a sample.
        threading.Thread(target=self._send, args=(orjson.dumps(groups),)).start()

    def _send(self, request: bytes) -> None:
        if self._child is None or self._child.stdin is None:
            return
        try:
            # Its length first: workers may be forked meanwhile, and hold the pipe open for longer.
            self._child.stdin.write(len(request).to_bytes(8, "little") + request)
            self._child.stdin.close()
        except OSError:  # it has ended already: this process will do it
            self._child.kill()

    def answer(self) -> Answer:
        """The ids. Raises InputError where the reference cannot load the tokenizer."""
        import orjson

        if self._child is not None and self._child.stdout is not None:
            out = self._child.stdout.read()
            self._child.wait()
            try:
                begin, lengths, ids = orjson.loads(out)
            except ValueError:  # it was stopped, or could not load: seen again below
                pass
            else:
                return Answer(tuple(begin), lengths, ids)
        return encode_groups(load_reference(self._folder), self._request)

    def stop(self) -> None:
        """End a child that nobody will ask any more."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()


def load_reference(folder: str, data: bytes | None = None) -> Any:
    """The `tokenizers` backend of a tokenizer folder; of `data`, where its tokenizer.json has been read."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import tokenizers

    try:
        if data is None:
            made = tokenizers.Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        else:
            made = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises bare Exception
        from padless.packer.errors import InputError

        raise InputError(f"tokenizers cannot load {folder}/tokenizer.json: {error}") from error
    made.no_truncation()
    made.no_padding()
    return made


def encode_groups(reference: Any, groups: list[tuple[bool, list[str]]]) -> Answer:
    """What `Answer` holds, worked out here."""
    lengths: list[list[int]] = []
    ids: list[list[int]] = []
    for plain, texts in groups:
        reference.encode_special_tokens = plain
        found = [encoding.ids for encoding in reference.encode_batch_fast(texts, add_special_tokens=False)]
        lengths.append([len(item) for item in found])
        ids.append([token for item in found for token in item])
    reference.encode_special_tokens = False
    bare = reference.encode("a", add_special_tokens=False).ids
    full = reference.encode("a", add_special_tokens=True).ids
    places = [n for n in range(len(full) - len(bare) + 1) if full[n : n + len(bare)] == bare]
    return Answer(tuple(full[: places[0]]) if places else (), lengths, ids)


def _main() -> None:
    import orjson

    # Loaded before the request is there: most of the work needs no sample.
    reference = load_reference(sys.argv[1])
    length = int.from_bytes(sys.stdin.buffer.read(8), "little")
    request = orjson.loads(sys.stdin.buffer.read(length))
    sys.stdout.buffer.write(orjson.dumps(list(encode_groups(reference, request))))
    sys.stdout.buffer.flush()
    os._exit(0)  # nothing here needs to be taken apart


if __name__ == "__main__":
    _main()
