"""Texts rearranged for filling in the middle are whole when put back, and the same wherever that is done."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from building import built, files_of, pack, sequences_of, workers_in, write_lines
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from toys import EOS, byte_tokenizer, packed, refused, word_tokenizer

from padless.packer.fim import KNOWN, Fim
from padless.packer.spans import Spanned

ROWS = [{"text": f"document {n}: " + "äbc def " * (n % 7)} for n in range(120)]
NAMES = KNOWN[0]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return byte_tokenizer(tmp_path / "bytes", ("d", "e"), added=NAMES)


def slow_ids(tokenizer: Path, text: str, rate: float, spm_rate: float, seed: int) -> list[int]:
    """What a document becomes, by the paper's formulas and the plain library."""
    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def ids(part: str) -> list[int]:
        return list(library.encode(part, add_special_tokens=False).ids)

    pre, suf, mid = (library.token_to_id(name) for name in NAMES)
    drawn = random.Random(xxhash.xxh3_64_intdigest(text.encode(), seed=seed))
    if drawn.random() >= rate:
        return [*ids(text), EOS]
    is_spm = drawn.random() < spm_rate
    a, b = sorted(int(drawn.random() * (len(text) + 1)) for _ in range(2))
    first, middle, last = ids(text[:a]), ids(text[a:b]), ids(text[b:])
    if is_spm:
        return [pre, suf, *last, mid, *first, *middle, EOS]
    return [pre, *first, suf, *last, mid, *middle, EOS]


@pytest.mark.parametrize(("rate", "spm_rate", "seed"), [(1, 0, 0), (1, 1, 0), (0.5, 0.5, 3)])
def test_documents_become_what_the_formulas_say_and_all_of_them_is_trained(
    rate: float, spm_rate: float, seed: int, tokenizer: Path, tmp_path: Path
) -> None:
    options = ("--fim-rate", rate, "--fim-spm-rate", spm_rate, "--seed", seed, "--labels", "always")
    found = packed(tmp_path, ROWS, tokenizer, "--max-length", 128, *options)
    assert [ids for ids, _ in found] == [slow_ids(tokenizer, r["text"], rate, spm_rate, seed) for r in ROWS]
    assert all(labels == [-100, *ids[1:]] for ids, labels in found)


def test_a_rate_of_nought_leaves_the_bytes_as_they_are(tokenizer: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", ROWS)
    for name, options in (("one", ()), ("two", ("--fim-rate", 0))):
        built(source, tmp_path / name, "--tokenizer", tokenizer, *options)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_the_share_is_the_rate_and_half_of_it_begins_with_the_last_part() -> None:
    fim = Fim(0.25, 0.5, 0, NAMES, (1, 2, 3))
    _, before = fim.cut([f"text number {number}" for number in range(4000)])
    assert abs(int((before == 1).sum()) - 500) < 100 and abs(int((before == 4).sum()) - 500) < 100


@pytest.mark.parametrize("way", ["threads", "processes"])
def test_workers_neighbours_and_places_change_no_document(way: str, tokenizer: Path, tmp_path: Path) -> None:
    options = ("--tokenizer", tokenizer, "--fim-rate", 0.7, "--max-length", 128)
    source = write_lines(tmp_path / "rows.jsonl", ROWS * 40)
    with workers_in(way):
        for workers in (1, 3):
            built(source, tmp_path / f"{way}{workers}", *options, "--workers", workers)
    assert files_of(tmp_path / f"{way}1") == files_of(tmp_path / f"{way}3")
    other = write_lines(tmp_path / "reversed.jsonl", ROWS[::-1])
    built(other, tmp_path / "reversed", *options)
    found = [ids for _, (ids, _) in sorted(sequences_of(tmp_path / "reversed").items())]
    here = [ids for _, (ids, _) in sorted(sequences_of(tmp_path / f"{way}1").items())]
    assert found[::-1] == here[: len(ROWS)]


TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=1, max_size=12)


@given(TEXTS, st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_put_back_in_order_every_document_is_itself(texts: list[str], rate: float, spm_rate: float) -> None:
    fim = Fim(rate, spm_rate, 1, NAMES, (-1, -2, -3))
    pieces, before = fim.cut(texts)
    ids = [np.array([ord(c) for c in piece], dtype=np.int32) for piece in pieces]
    offsets = np.cumsum([0, *map(len, ids)])
    every = np.arange(len(pieces))
    spanned = Spanned(np.concatenate(ids), offsets, every, offsets[:-1], offsets[1:])
    found = fim.put_together(spanned, before)
    assert len(found.offsets) == len(texts) + 1
    for text, start, end in zip(texts, found.offsets, found.offsets[1:], strict=False):
        assert restored(found.ids[start:end].tolist()) == text
    assert np.array_equal(found.span_start, found.offsets[:-1])
    assert np.array_equal(found.span_end, found.offsets[1:])


def restored(ids: list[int]) -> str:
    """A PSM document's text; of SPM, in which first part and middle stand together."""
    if -1 not in ids:
        return "".join(map(chr, ids))
    assert ids[0] == -1
    suffix, middle = ids.index(-2), ids.index(-3)
    return "".join(map(chr, [*ids[1:suffix], *ids[middle + 1 :], *ids[suffix + 1 : middle]]))


def test_a_document_that_spells_one_of_the_tokens_stays_in_order(tokenizer: Path, tmp_path: Path) -> None:
    text = f"a page about {NAMES[1]} and others"
    [(ids, _)] = packed(tmp_path, [{"text": text}], tokenizer, "--fim-rate", 1)
    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    assert ids == [*library.encode(text).ids, EOS]


def test_tokens_can_be_named(tmp_path: Path) -> None:
    names = ("[P]", "[S]", "[M]")
    tokenizer = byte_tokenizer(tmp_path / "bytes", added=names)
    options = ("--fim-rate", 1, "--fim-spm-rate", 0, "--fim-tokens", ",".join(names))
    [(ids, _)] = packed(tmp_path, [{"text": "abcdefgh"}], tokenizer, *options)
    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    assert [t for t in ids if t in [library.token_to_id(n) for n in names]] == [
        library.token_to_id(n) for n in names
    ]


TEXT = [{"text": "abc"}]


@pytest.mark.parametrize(
    ("added", "rows", "options", "message"),
    [
        ((), TEXT, (), "has no tokens for filling in the middle"),
        (NAMES, TEXT, ("--fim-tokens", "<a>,<b>,<c>"), "'<a>' is no token"),
        (NAMES, TEXT, ("--fim-tokens", "<a>,<b>"), "--fim-tokens must be three tokens"),
        (NAMES, TEXT, ("--eos", "none"), "needs an end token"),
        (NAMES, TEXT, ("--overflow", "truncate"), "where overflow truncate cuts it off"),
        (NAMES, TEXT, ("--fim-rate", 1.5), "--fim-rate must be a share"),
        (NAMES, [{"prompt": "a", "completion": "b"}], (), "--fim-rate 1 is for text"),
    ],
)
def test_what_cannot_be_rearranged_is_refused(
    added: tuple[str, ...], rows: list[Any], options: tuple[object, ...], message: str, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer(tmp_path / "bytes", added=added)
    assert message in " ".join(refused(tmp_path, rows, tokenizer, "--fim-rate", 1, *options).split())


def test_a_tokenizer_that_does_not_spell_bytes_is_refused(tmp_path: Path) -> None:
    """Parts encoded apart would get a space in front of each."""
    tokenizer = word_tokenizer(tmp_path / "words")
    told = refused(tmp_path, TEXT, tokenizer, "--fim-rate", 1, "--fim-tokens", "w10,w11,w12")
    assert "does not spell texts byte by byte" in told


@pytest.mark.parametrize("options", [("--strategy", "wrapped"), ("--overflow", "split")])
def test_a_repack_is_what_a_build_gives_and_another_seed_is_refused(
    options: tuple[object, ...], tokenizer: Path, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "rows.jsonl", ROWS)
    fim = ("--tokenizer", tokenizer, "--fim-rate", 0.5)
    built(source, tmp_path / "long", *fim)
    shorter = ("--max-length", 40, "--overflow", "split", *options)
    built(source, tmp_path / "short", *fim, *shorter)
    again = pack("repack", tmp_path / "long", "--output", tmp_path / "again", *shorter)
    assert again.code == 0, again.err
    assert files_of(tmp_path / "again") == files_of(tmp_path / "short")
    other = pack("repack", tmp_path / "long", "--output", tmp_path / "other", "--seed", 1)
    assert other.code == 2 and "rearrange other texts" in other.err


@pytest.mark.shared
def test_qwens_tokenizer_has_its_own_tokens(shared: Path, tmp_path: Path) -> None:
    text = "def add(a, b):\n    return a + b\n" * 3
    tokenizer = shared / "tokenizers" / "qwen3"
    [(ids, _)] = packed(tmp_path, [{"text": text}], tokenizer, "--fim-rate", 1, "--fim-spm-rate", 0)
    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    pre, suf, mid = (ids.index(library.token_to_id(name)) for name in NAMES)
    parts = [library.decode(ids[a:b]) for a, b in ((pre + 1, suf), (mid + 1, len(ids) - 1), (suf + 1, mid))]
    assert "".join(parts) == text


def test_an_estimate_counts_the_tokens_that_a_build_gives(tokenizer: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", ROWS)
    options = ("--tokenizer", tokenizer, "--max-length", 256, "--fim-rate", 0.5, "--fim-spm-rate", 0.3)
    options += ("--fim-tokens", ",".join(NAMES))
    found = pack("estimate", source, *options, "--json").json
    build = pack("build", source, *options, "--output", tmp_path / "packed", "--json").json
    plain = pack("estimate", source, *options[:4], "--json").json
    assert found["tokens"] == build["tokens"] > plain["tokens"]
