"""What a build does at the edges: odd tokenizers, odd options, odd terminals, and what must survive them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from building import DEMO, TOKENIZER, build, built, pack, sequences_of
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from padless.packer import PackConfig, pack_dataset
from padless.packer.reference import load_reference
from padless.packer.template import ChatTemplate
from padless.runtime.reader import PackedReader

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ ' yes' if loud else ' no' }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}: "
    "{% endif %}{% endfor %}"
)


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_a_fast_backend_that_fails_on_a_text_gives_way_to_the_reference(tmp_path: Path) -> None:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # No initial alphabet: bytes that the training text lacks have no token.
    trained.train_from_iterator(
        ["plain words only"] * 9, trainers.BpeTrainer(vocab_size=60, special_tokens=["<|end|>"])
    )
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    trained.save(str(folder / "tokenizer.json"))
    texts = ["plain words", "日本 plain", "only words"]
    source = write(tmp_path / "t.jsonl", *({"text": text} for text in texts))
    pack_dataset(
        PackConfig(
            sources=(str(source),),
            tokenizer=str(folder),
            max_length=64,
            output=str(tmp_path / "o"),
            eos="none",
        )
    )
    reference = load_reference(str(folder))
    expected = sorted(reference.encode(text, add_special_tokens=False).ids for text in texts)
    assert sorted(found[0] for found in sequences_of(tmp_path / "o").values()) == expected


@pytest.mark.parametrize(("value", "word"), [("false", " no"), ("true", " yes"), ("0", " no"), ("x", " yes")])
def test_a_template_argument_is_what_json_says_it_is(tmp_path: Path, value: str, word: str) -> None:
    source = write(
        tmp_path / "c.jsonl",
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    )
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    built(source, tmp_path / "o", "--template", tmp_path / "t.jinja", "--template-arg", f"loud={value}")
    ids = PackedReader(tmp_path / "o")[0].input_ids.tolist()
    text = load_reference(str(TOKENIZER)).decode(ids, skip_special_tokens=False)
    assert text == f"a: b{word}<|im_end|>"


def test_the_classic_prompts_are_no_template_for_chats(tmp_path: Path) -> None:
    source = write(tmp_path / "c.jsonl", {"messages": [{"role": "assistant", "content": "b"}]})
    run = build(source, tmp_path / "o", "--template", "alpaca")
    assert run.code == 2 and "--template alpaca is two prompts for alpaca records" in run.err


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "padless_open"])
def test_a_template_argument_sets_nothing_that_padless_gives_the_template(tmp_path: Path, name: str) -> None:
    run = build(DEMO, tmp_path / "o", "--template-arg", f"{name}=1")
    assert run.code == 2 and f"--template-arg sets '{name}', which padless gives" in run.err


@pytest.mark.parametrize("option", ["--max-length", "--max-sequences-per-pack"])
def test_a_number_that_the_folder_cannot_hold_is_refused(tmp_path: Path, option: str) -> None:
    run = build(DEMO, tmp_path / "o", option, 2**31)
    assert run.code == 2 and "2,147,483,647" in run.err
    assert not (tmp_path / "o").exists()


def test_integers_of_any_size_reach_the_text_as_they_are(tmp_path: Path) -> None:
    number = 12345678901234567890123
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"id": number}}}]
    record = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
    }
    lines = write(tmp_path / "c.jsonl", record)
    array = tmp_path / "c.json"
    array.write_text(json.dumps([record]))
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m.content }}{% for c in m.tool_calls %}"
        "{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% endgeneration %}{% endfor %}"
    )
    for source in (lines, array):
        output = tmp_path / source.suffix[1:]
        built(source, output, "--template", tmp_path / "t.jinja", "--train-on", "all")
        ids = PackedReader(output)[0].input_ids.tolist()
        assert f'{{"id": {number}}}' in load_reference(str(TOKENIZER)).decode(ids)


@pytest.mark.parametrize("stranger", ["plans/thesis.txt", "tokenizer/.git/HEAD", "tokenizer/notes.txt"])
def test_force_refuses_a_folder_that_holds_a_users_file(tmp_path: Path, stranger: str) -> None:
    built(DEMO, tmp_path / "o")
    path = tmp_path / "o" / stranger
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    manifest = (tmp_path / "o" / "manifest.json").read_bytes()
    run = build(DEMO, tmp_path / "o", "--seed", 1, "--force")
    assert run.code == 2 and "which padless did not write" in run.err
    assert path.read_text() == "mine"
    assert (tmp_path / "o" / "manifest.json").read_bytes() == manifest


def test_a_first_record_that_is_malformed_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a')
    run = build(tmp_path / "t.jsonl", tmp_path / "o")
    assert run.code == 2 and "line 1" in run.err and "not valid JSON" in run.err


def test_a_terminal_that_knows_no_unicode_is_no_error(tmp_path: Path) -> None:
    source = write(tmp_path / "ünï.jsonl", {"text": "ünï → 日本"})
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = Path(sys.executable).with_name("pack-dataset")
    output = str(tmp_path / "o")
    arguments = ["--tokenizer", str(TOKENIZER), "--max-length", "64", "--output", output]
    for words in (
        ["build", str(source), *arguments],
        ["report", output],
        ["inspect", output],
        ["inspect", output, "--json"],
        ["build", str(source), *arguments, "--json"],
    ):
        run = subprocess.run([str(command), *words], capture_output=True, env=environment)
        assert run.returncode == 0, (words, run.stderr.decode())
        assert run.stdout.isascii()


def test_a_validation_split_is_not_told_that_its_packs_are_loose(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "o", "--eval-fraction", 0.3)
    warnings = pack("report", tmp_path / "o", "--split", "validation", "--json").json["warnings"]
    assert not [warning for warning in warnings if "full" in warning]
    assert PackedReader(tmp_path / "o", split="validation").manifest.options["packed_with"] == "none"


def test_a_role_that_no_format_has_is_refused(tmp_path: Path) -> None:
    run = build(DEMO, tmp_path / "o", "--column", "completon=output")
    assert run.code == 2 and "'completon'" in run.err and "completion" in run.err


def test_a_set_without_a_target_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "t.jsonl", {"text": "one two three"})
    run = build(source, tmp_path / "o", "--max-length", 1, "--overflow", "split")
    assert run.code == 2 and "nothing to train on" in run.err
    assert not (tmp_path / "o").exists()


def test_an_end_token_that_is_there_is_not_doubled(tmp_path: Path) -> None:
    source = write(tmp_path / "t.jsonl", {"text": "one<|im_end|>"}, {"text": "one"})
    built(source, tmp_path / "o", "--allow-special")
    first, second = (found[0] for found in sequences_of(tmp_path / "o").values())
    assert first == second
    assert first.count(load_reference(str(TOKENIZER)).token_to_id("<|im_end|>")) == 1


def test_a_chunk_that_the_fast_engine_renders_otherwise_goes_through_jinja2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(DEMO, tmp_path / "right")
    true_render = ChatTemplate.render_fast
    calls = 0

    def off(self: ChatTemplate, chats: list[object], marks: str, opened: tuple[str, ...] = ()) -> str:
        nonlocal calls
        calls += 1
        found = true_render(self, chats, marks, opened)  # type: ignore[arg-type]
        return found if calls == 1 else "x" + found  # the sample's render is right, the chunk's is not

    monkeypatch.setattr(ChatTemplate, "render_fast", off)
    built(DEMO, tmp_path / "found")
    assert calls > 1
    assert sequences_of(tmp_path / "found") == sequences_of(tmp_path / "right")


def test_every_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    named: list[tuple[str, bool]] = []
    true_sync, true_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        true_sync(descriptor)

    def replace(source: str, target: str) -> None:
        named.append((os.path.basename(target), os.stat(source).st_ino in synced))
        true_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    built(DEMO, tmp_path / "o")
    assert {"manifest.json", "state.json", "sequences.parquet"} <= {name for name, _ in named}
    assert all(on_disk for _, on_disk in named), named
    assert named[-1][0] == "manifest.json"


def test_a_line_of_100_mb_is_a_record_like_any_other(tmp_path: Path) -> None:
    text = ("lorem ipsum dolor sit amet " * 4_000_000)[:100_000_000]
    data = tmp_path / "huge.jsonl"
    data.write_text("".join(json.dumps({"text": words}) + "\n" for words in ("a short one", text, "another")))
    words = (data, "--tokenizer", TOKENIZER, "--max-length", 1024, "--output", tmp_path / "out")
    refused = pack("build", *words)
    assert refused.code == 2 and "line 2" in refused.err and "--overflow" in refused.err
    assert not (tmp_path / "out").exists()
    run = pack("build", *words, "--overflow", "drop", "--max-drop-share", 1, "--json")
    assert run.code == 0, run.err
    assert (run.json["records"], run.json["dropped_by_reason"]) == (3, {"too-long": 1})
    assert run.json["cut_tokens"] > 10**7
