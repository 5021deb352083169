"""Text to token ids: the fast backend where it is proven on the input at hand, else the reference.

`tokenizers` is the reference. `fastokens` is 7 to 11 times faster; what it encoded is kept only where it
gave the same ids on a sample of the real input and on `hard_strings()`, which every build checks before it
plans. The reference gives character offsets too, for the few texts whose tokens cannot be counted in bytes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.reference import Answer, ReferenceProcess, encode_groups, load_reference
from padless.packer.tokenizer_files import Loading, TokenizerFiles, load_fast

Ids = NDArray[np.int32]


def hard_strings(specials: Sequence[str]) -> list[str]:
    """Some 300 short texts on which tokenizers are known to part ways; the same at every call."""
    pick = random.Random(20240607)
    pools = (
        " \t\n\r\x0b\x0c\xa0\u2003\u200b\u3000",
        "".join(map(chr, range(0x20, 0x7F))),
        "áéñüßøÅŁİıſΩжЖіЇאבשמرحب٣٤हिन्दीไทย한국어日本語中文漢字",
        "e\u0301a\u0308o\u0302\u0327\u0958\u1100\u1161\u11a8\u0f71\u0f72",
        "😀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪☃️①½²Ⅷ",
        "\x00\x01\x1c\x1d\x1e\x1f\x7f\x85\u2028\u2029\ufeff\ufffd\ufffe\U0010ffff",
        "'s'S't'Re'vE'm'LL'd",
        '0123456789.,:;-_/\\(){}[]<>|=+*&^%$#@!~`"?',
    )
    found = [
        "",
        " ",
        "  a",
        "a  ",
        "\n\n",
        "\r\n",
        "don't DON'T 'll",
        "1234567 3.14",
        "a" * 300,
        "=" * 77,
    ]
    for length in range(1, 31):
        for pool in pools:
            found.append("".join(pick.choice(pool) for _ in range(length)))
        mixed = "".join(pools)
        found.append("".join(pick.choice(mixed) for _ in range(2 * length)))
    for text in list(specials)[:12]:
        found += [text, f"a{text}b", f" {text} {text}\n", text[:-1], f"é{text}\u0301"]
    return found


def byte_lengths(files: TokenizerFiles) -> NDArray[np.int32] | None:
    """UTF-8 bytes that each id stands for, [largest id + 1]; None unless the vocabulary is byte-level.

    Only for models whose tokens, put together, are exactly the bytes of the text (after NFC at most).
    """
    spec = files.spec
    model = spec["model"]
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    normalizer = spec.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        return None
    pre = spec.get("pre_tokenizer") or {}
    parts = pre.get("pretokenizers", [pre])
    if not any(p.get("type") == "ByteLevel" and not p.get("add_prefix_space") for p in parts):
        return None
    if any(p.get("type") not in ("ByteLevel", "Split", "Digits") for p in parts):
        return None
    vocab = model["vocab"]
    lengths = np.zeros(files.largest_id + 1, dtype=np.int32)
    ids = np.fromiter(vocab.values(), dtype=np.int64, count=len(vocab))
    lengths[ids] = np.fromiter(map(len, vocab), dtype=np.int32, count=len(vocab))
    for token in files.added_tokens:
        lengths[token["id"]] = len(token["content"].encode("utf-8"))
    return lengths


class Encoder:
    """Encodes batches of texts; made once per process tree, before workers are forked.

    Special tokens spelled in a text become special ids unless `plain` is asked for; added tokens that are
    not special stay tokens either way. Nothing is added in front or behind.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self.files = files
        self.byte_lengths = byte_lengths(files)
        self.normalizes = files.spec.get("normalizer") is not None
        self.largest_id = files.largest_id
        self.vocab_size = files.vocab_size
        self.fast: Any = None
        self.why_not_fast = "not tried"
        self._lock = threading.Lock()
        self._groups: list[tuple[bool, list[str]]] = []
        self._process: ReferenceProcess | None = None

    @cached_property
    def reference(self) -> Any:
        """The `tokenizers` backend in this process, loaded when first needed."""
        return load_reference(self.files.folder, self.files.contents["tokenizer.json"])

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that shares no memory: the file's bytes, and whether the fast backend is in use."""
        model = {**self.files.spec["model"], "vocab": {}, "merges": []}
        contents = {"tokenizer.json": self.files.contents["tokenizer.json"]}
        files = replace(self.files, contents=contents, spec={**self.files.spec, "model": model})
        kept = ("byte_lengths", "normalizes", "largest_id", "vocab_size")
        return {**{name: self.__dict__[name] for name in kept}, "files": files, "fast": self.fast is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _groups=[], _process=None, why_not_fast="")
        self.fast = load_fast(self.files.contents["tokenizer.json"]) if state["fast"] else None

    def drop_vocabulary(self) -> None:
        """Free the parsed vocabulary and merges; the counts and the added tokens stay."""
        self.files.spec["model"]["vocab"] = {}
        self.files.spec["model"]["merges"] = []

    def prepare_check(
        self, loading: Loading, sample: Sequence[str], plains: Iterable[bool], *, at_once: bool
    ) -> None:
        """Have the reference encode the sample and the hard strings, for `was_right`.

        `at_once`: while the fast backend loads, for a build that will wait for the answer. Otherwise
        afterwards: on two cores a third load would only hold up the other two.
        """
        self._groups = [
            (plain, [*(() if number else sample), *hard_strings(self.files.special_contents)])
            for number, plain in enumerate(plains)
        ]
        if at_once:
            self._ask(loading)

    def _ask(self, loading: Loading) -> None:
        if self._process is None:  # a build that starts again asks the same
            self._process = loading.reference
            self._process.ask(self._groups)

    def take_fast(self, loading: Loading) -> None:
        """Use the fast backend where there is one, on trust until `was_right` has been asked."""
        try:
            self.fast = loading.fast.result()
            self._ask(loading)
        except Exception as error:
            self.why_not_fast = str(error).splitlines()[0] if str(error) else type(error).__name__

    @cached_property
    def _answer(self) -> Answer:
        if self._process is None:  # there is no fast backend to check
            return encode_groups(self.reference, self._groups)
        return self._process.answer()

    def was_right(self) -> bool:
        """Whether the fast backend gives the reference's ids on the sample and the hard strings.

        Where it does not, it is put away, and what was encoded with it must be encoded again.
        """
        if self.fast is None:
            return True
        for (plain, texts), lengths, expected in zip(
            self._groups, self._answer.lengths, self._answer.ids, strict=True
        ):
            try:
                ids, offsets = _flat_fast(self.fast, texts, plain)
            except Exception as error:
                self.why_not_fast = str(error).splitlines()[0] if str(error) else type(error).__name__
                self.fast = None
                return False
            if not np.array_equal(ids, expected) or not np.array_equal(np.diff(offsets), lengths):
                self.why_not_fast = "its ids differ from tokenizers' on this input"
                self.fast = None
                return False
        return True

    @property
    def backend(self) -> str:
        return "fastokens" if self.fast is not None else "tokenizers"

    def flat(self, texts: list[str], *, plain: bool) -> tuple[Ids, NDArray[np.int64]]:
        """All ids in one array, and where each text's begin: int32 [T], int64 [len(texts) + 1]."""
        if self.fast is not None:
            try:
                return _flat_fast(self.fast, texts, plain)
            except Exception:  # an id that it misses, say; for these texts the reference speaks
                pass
        return self._flat_reference(texts, plain)

    def with_offsets(self, text: str, *, plain: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of one text and the characters [start, end) that each covers."""
        with self._lock:
            self.reference.encode_special_tokens = plain
            encoding = self.reference.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def _flat_reference(self, texts: Sequence[str], plain: bool) -> tuple[Ids, NDArray[np.int64]]:
        with self._lock:  # the switch belongs to the tokenizer, not to the call
            self.reference.encode_special_tokens = plain
            encodings = self.reference.encode_batch_fast(list(texts), add_special_tokens=False)
        offsets = np.zeros(len(encodings) + 1, dtype=np.int64)
        np.cumsum([len(e.ids) for e in encodings], out=offsets[1:])
        ids = np.empty(int(offsets[-1]), dtype=np.int32)
        for encoding, start, stop in zip(encodings, offsets, offsets[1:], strict=False):
            ids[start:stop] = encoding.ids
        return ids, offsets

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """What the tokenizer's own post-processor puts before a text; waits for the reference."""
        return self._answer.begin_ids


def _flat_fast(fast: Any, texts: list[str], plain: bool) -> tuple[Ids, NDArray[np.int64]]:
    ids, offsets = fast.encode_batch_flat(texts, False, plain)
    return np.frombuffer(ids, dtype="<i4"), np.frombuffer(offsets, dtype="<i8")
