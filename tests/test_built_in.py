"""The templates that come along, against the published ones and the answers located in those."""

from __future__ import annotations

from pathlib import Path

import pytest
from chats import files_of, marks_for, plain_chats, rich_chats, template_of
from hypothesis import given, settings

from padless.packer.errors import RecordError
from padless.packer.formats.examples import Chat
from padless.packer.locate import located
from padless.packer.template import BUILT_IN, ChatTemplate, built_in

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL = ("<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>", "<|end|>", "<｜end▁of▁sentence｜>")

PUBLISHED = {"llama3": "llama3", "gemma": "gemma3", "phi": "phi3", "deepseek": "deepseekv3"}
"""Built-in name -> the file among TRL's templates."""


def ours(name: str) -> ChatTemplate:
    return ChatTemplate(built_in(name), TOKENS, name)


def check_equal(mine: ChatTemplate, other: ChatTemplate, chat: Chat) -> None:
    """The same text with the same spans."""
    marks = marks_for(other, chat)
    assert mine.render(chat, marks) == other.render(chat, marks)


@pytest.mark.parametrize("name", PUBLISHED)
def test_text_and_spans_are_those_of_the_published_template(name: str) -> None:
    trl = pytest.importorskip("trl")
    path = Path(trl.__file__).parent / "chat_templates" / f"{PUBLISHED[name]}.jinja"
    published = located(ChatTemplate(path.read_text(encoding="utf-8"), TOKENS, name), SPECIAL)
    assert published is not None and published.has_marks, published and published.why_unmarked
    mine = ours(name)

    @settings(max_examples=60, deadline=None)
    @given(chat=plain_chats())
    def same(chat: Chat) -> None:
        if name == "deepseek" and any("</think>" in turn["content"] for turn in chat.messages):
            return  # the published one drops reasoning, also what is to be learnt
        check_equal(mine, published, chat)

    same()


@pytest.mark.shared
@pytest.mark.parametrize(("name", "tokenizer"), [("qwen", "qwen3"), ("mistral", "mistral-sp")])
def test_text_and_spans_are_those_of_the_models_own_template(shared: Path, name: str, tokenizer: str) -> None:
    own = template_of(shared, f"{tokenizer}/chat_template.generation.jinja")
    mine = ChatTemplate(built_in(name), files_of(shared, tokenizer).named_tokens(), name)

    @settings(max_examples=80, deadline=None)
    @given(chat=rich_chats() if name == "qwen" else plain_chats())
    def same(chat: Chat) -> None:
        turns = [turn for turn in chat.messages if turn["role"] != "tool" and "tool_calls" not in turn]
        check_equal(mine, own, Chat(turns))

    same()


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_answer_is_marked_and_the_prompt_for_one_is_its_beginning(name: str) -> None:
    question, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
    chat = Chat([question, answer, question, answer])
    template = ours(name)
    text = template.render(chat, "\x01\x02\x03")
    assert text.count("\x01") == text.count("\x02") == 2
    prompt = template.generation_prompt(Chat([question]))
    assert all(before.endswith(prompt) for before in text.split("\x01")[:-1])
    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>"}
    end |= {"phi": "<|end|>", "qwen": "<|im_end|>", "deepseek": "<｜end▁of▁sentence｜>"}
    assert text.split("\x02")[0].endswith("So." + end[name])


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "chatml"])
def test_turns_of_tools_are_refused_by_name(name: str) -> None:
    chat = Chat([{"role": "user", "content": "Why?"}, {"role": "tool", "content": "42"}])
    with pytest.raises(RecordError, match=f"built-in template {name}"):
        ours(name).render(chat, "\x01\x02\x03")


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_fast_engine_takes_them(name: str) -> None:
    pytest.importorskip("minijinja")
    chat = Chat([{"role": "user", "content": " Why? "}, {"role": "assistant", "content": "\nSo. "}])
    assert ours(name).enable_fast([chat], "\x01\x02\x03")
