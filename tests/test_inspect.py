"""inspect shows a pack as the model sees it, and nothing in the data can act on the terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from packed import Folder, Seq, write_folder
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from padless.packer.errors import InputError
from padless.packer.inspect import describe_pack, pieces, print_pack, visible
from padless.packer.inspect_page import inspect_page


def byte_tokenizer() -> Tokenizer:
    """A token a byte (id = place in the byte-level alphabet), and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: number for number, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def sequence(*runs: tuple[str, bool], source: int = 0) -> Seq:
    tokens: list[int] = []
    trained: list[bool] = []
    for text, is_trained in runs:
        ids = byte_tokenizer().encode(text).ids
        tokens += ids
        trained += [is_trained] * len(ids)
    return Seq(tokens, trained, source)


def packed(path: Path, *sequences: Seq, tokenizer: bool = True) -> Path:
    files = {"tokenizer.json": byte_tokenizer().to_str().encode()} if tokenizer else {}
    first = [sequence(("first", True))]
    write_folder(path, Folder(packs=[first, list(sequences)], max_length=99, tokenizer=files))
    return path


def shown(pack: dict[str, Any], *, colour: bool = False) -> str:
    file = io.StringIO()
    colours = Console(file=file, width=80, force_terminal=True, color_system="standard")
    print_pack(pack, colours if colour else Console(file=file, width=80, color_system=None))
    return file.getvalue()


def test_a_pack_is_told_sequence_by_sequence(tmp_path: Path) -> None:
    question = sequence(("ask ", False), ("answer<|end|>", True), ("\n", False), source=1)
    path = packed(tmp_path / "packed", question, sequence(("héllo", True)))
    pack = describe_pack(path, 1)
    assert json.loads(json.dumps(pack)) == pack
    assert (pack["pack"], pack["packs"], pack["num_tokens"]) == (1, 2, 18)
    first, second = pack["sequences"]
    assert first["segments"] == [
        {"text": "ask ", "special": [], "trained": False, "tokens": 4},
        {"text": "answer<|end|>", "special": [[6, 13]], "trained": True, "tokens": 7},
        {"text": "\n", "special": [], "trained": False, "tokens": 1},
    ]
    assert first["text"] == "ask answer<|end|>\n"
    assert first["num_targets"] == 7 and pack["num_targets"] == 12
    place = {name: first[name] for name in ("sequence_id", "record", "source", "row", "part")}
    assert place == {
        "sequence_id": 1,
        "record": 1,
        "source": "source-1.jsonl",
        "row": 1,
        "part": 0,
    }
    assert (second["offset"], second["length"], second["status"]) == (12, 6, "whole")
    # The first token of a sequence is never a target, so it is a masked run of its own.
    assert [run["text"] for run in second["segments"]] == ["h", "éllo"]


def test_packs_count_from_the_end_too(tmp_path: Path) -> None:
    path = packed(tmp_path / "packed", sequence(("last", True)))
    assert describe_pack(path, -1)["pack"] == 1
    assert describe_pack(path, -2)["sequences"][0]["text"] == "first"


@pytest.mark.parametrize("index", [2, -3])
def test_a_pack_that_is_not_there_names_those_that_are(tmp_path: Path, index: int) -> None:
    path = packed(tmp_path / "packed", sequence(("x", True)))
    with pytest.raises(InputError, match=rf"no pack {index}: .* holds packs 0 to 1"):
        describe_pack(path, index)


def test_a_folder_without_packs_says_so(tmp_path: Path) -> None:
    write_folder(tmp_path / "packed", Folder(packs=[], dropped=1))
    with pytest.raises(InputError, match="holds no packs"):
        describe_pack(tmp_path / "packed", 0)


def test_without_a_tokenizer_the_ids_are_shown(tmp_path: Path) -> None:
    path = packed(tmp_path / "packed", Seq([5, 6, 7], [False, False, True]), tokenizer=False)
    texts = [run["text"] for run in describe_pack(path, 1)["sequences"][0]["segments"]]
    assert texts == ["5 6", "7"]


def test_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "packed", Folder(packs=[[Seq([1, 2])]]))
    with pytest.raises(InputError, match=r"tokenizer/tokenizer\.json cannot be loaded"):
        describe_pack(tmp_path / "packed", 0)


def test_boundaries_origin_and_specials_are_shown(tmp_path: Path) -> None:
    one = sequence(("ask ", False), ("answer<|end|>", True))
    text = shown(describe_pack(packed(tmp_path / "packed", one, one), 1))
    assert "pack 1 of 2: 2 sequences, 22 of 99 tokens, 14 trained" in text
    assert text.count("ask answer<|end|>") == 2
    assert "source-0.jsonl row 1, sequence 1, tokens 0 to 10, 7 trained" in text
    assert "source-0.jsonl row 2, sequence 2, tokens 11 to 21, 7 trained" in text


def test_trained_text_is_coloured(tmp_path: Path) -> None:
    one = sequence(("ask ", False), ("answer", True))
    text = shown(describe_pack(packed(tmp_path / "packed", one), 1), colour=True)
    assert "\x1b[2mask \x1b[0m\x1b[1;32manswer\x1b[0m" in text


def test_special_tokens_are_marked_and_text_that_spells_the_same_is_not(tmp_path: Path) -> None:
    spelled = byte_tokenizer()
    spelled.encode_special_tokens = True
    end = byte_tokenizer().token_to_id("<|end|>")
    ids = [*spelled.encode("é<|end|>", add_special_tokens=False).ids, end, end, *spelled.encode("x").ids]
    path = packed(tmp_path / "packed", Seq(ids, [False] * len(ids)))
    pack = describe_pack(path, 1)
    (run,) = pack["sequences"][0]["segments"]
    assert run["text"] == "é<|end|><|end|><|end|>x"
    assert run["special"] == [[8, 15], [15, 22]]
    assert list(pieces(run)) == [("é<|end|>", False), ("<|end|>", True), ("<|end|>", True), ("x", False)]
    assert list(pieces(run, 9, 20)) == [("|end|>", True), ("<|end", True)]
    coloured = shown(pack, colour=True)
    assert "\x1b[2mé<|end|>\x1b[0m\x1b[2;7m<|end|>\x1b[0m\x1b[2;7m<|end|>\x1b[0m\x1b[2mx\x1b[0m" in coloured
    page = inspect_page([pack])
    assert '<span class="masked">é&lt;|end|&gt;<b>&lt;|end|&gt;</b><b>&lt;|end|&gt;</b>x</span>' in page


@pytest.mark.shared
@pytest.mark.parametrize("family", ["qwen3", "llama3.1", "mistral-sp", "gpt2"])
def test_special_tokens_of_real_tokenizers_are_where_they_stand(
    tmp_path: Path, shared: Path, family: str
) -> None:
    """SentencePiece drops a space where a piece begins, so pieces are not the whole there."""
    content = (shared / "tokenizers" / family / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_str(content.decode())
    added = tokenizer.get_added_tokens_decoder()
    number, name = next((n, token.content) for n, token in added.items() if token.special)
    words = tokenizer.encode("Hello there, 日本 👩‍💻 ", add_special_tokens=False).ids
    ids = [number, *words, number, number, *words]
    files = {"tokenizer.json": content}
    packs = [[Seq(ids, [False] * len(ids))]]
    folder = Folder(packs=packs, max_length=99, tokenizer=files, id_type="int32", largest_id=2**18)
    write_folder(tmp_path / "packed", folder)
    (run,) = describe_pack(tmp_path / "packed", 0)["sequences"][0]["segments"]
    assert [text for text, is_special in pieces(run) if is_special] == [name] * 3
    assert run["special"][0][0] == 0 and run["special"][1][1] == run["special"][2][0]


def test_data_is_neither_markup_nor_terminal_commands(tmp_path: Path) -> None:
    nasty = "[bold]x[/bold] \x1b[2J\x07 :smile: \u202eabc"
    text = shown(describe_pack(packed(tmp_path / "packed", sequence((nasty, False))), 1))
    assert r"[bold]x[/bold] \x1b[2J\x07 :smile: \u202eabc" in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_only_newlines_stay_of_what_cannot_be_seen() -> None:
    assert visible("a\nb\tc\rd\u200b") == "a\nb\\tc\\rd\\u200b"
    assert visible("日本 é 👩\u200d💻 क्\u200cष") == "日本 é 👩\u200d💻 क्\u200cष"
