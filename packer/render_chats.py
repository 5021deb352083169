"""Chats through the chat template to marked text, each in one render.

What the fast engine may see goes through it, a chunk at once; other chats, what a template refuses and what
spells special tokens go through jinja2, one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from padless.packer.config import PackConfig
from padless.packer.encode import Encoder
from padless.packer.errors import InputError, RecordError
from padless.packer.formats.examples import Chat
from padless.packer.image_rule import ImageRule, rule_of
from padless.packer.images import images_in
from padless.packer.locate import located
from padless.packer.marks import choose_marks, leaves, split_marked
from padless.packer.prepared import Batch, Prepared
from padless.packer.refusals import KnownRoles, lost_calls, unclear_turns, unknown_role
from padless.packer.sealed import TRIMMED_DIFFERENTLY, sealed, trims_alike
from padless.packer.spans import Shield, check_no_stand_ins
from padless.packer.template import CLASSIC, ChatTemplate
from padless.packer.template_limits import TooSlowError


class Seen(NamedTuple):
    """Chats for the fast engine, what it sees of them, and what it opened."""

    chats: list[tuple[int, Chat]]
    views: list[Chat]
    opened: list[str]


class ChatRenderer:
    """The template with what rendering by it needs, the same from chunk to chunk."""

    def __init__(
        self, config: PackConfig, template: ChatTemplate | None, encoder: Encoder, shield: Shield
    ) -> None:
        self.config = config
        if config.train_on != "all" or config.overflow == "truncate":  # else turns do not matter
            template = located(template, encoder.files.special_contents)
        self.template = template
        self._roles = KnownRoles(template)
        self._shield = shield
        self._folder = encoder.files.folder
        self._normalizes = encoder.normalizes
        self._images = rule_of(encoder.files)

    def render(self, found: Prepared, chats: list[tuple[int, Chat]]) -> None:
        """Put the chats into `found` as marked text.

        Raises InputError where there is no template, or none that tells what to train on.
        """
        if not chats:
            return
        template = self.template
        if template is None:
            lacking = f"the tokenizer in {self._folder} has no chat template"
            if self.config.template == CLASSIC:
                lacking = f"--template {CLASSIC} is two prompts for alpaca records and no chat template"
            raise InputError(
                f"{lacking}, and these records are chats: give one with --template FILE or --template chatml"
            )
        if not template.has_marks and self.config.train_on != "all":
            raise InputError(
                f"what to train on cannot be told from the chat template {template.name}: "
                f"{template.why_unmarked}; give one that marks the assistant's turns with "
                "{% generation %} blocks (--template FILE, or a built-in one such as chatml), or "
                "--train-on all"
            )
        roles = {turn["role"] for _, chat in chats for turn in chat.messages}
        if not roles <= self._roles.known:
            self._roles.look_at(roles)
            chats = self._allowed(found, chats, lambda chat: unknown_role(chat, self._roles))
        joined, plain = _joined(chats, clear=found.is_clear)
        joined += self.config.system or ""  # which is no record's
        if not plain:
            chats = self._allowed(
                found, chats, lambda chat: lost_calls(chat, template.source) or self._unread_images(chat)
            )
        marks = choose_marks([template.fixed_text, joined])
        if marks is None:
            found.in_halves(chats, self.render)
            return
        if not self.config.allow_special and self._shield.may_be_spelled_in(joined):
            kept: list[tuple[int, Chat]] = []
            for record, chat in chats:
                content = leaves(chat)
                if self._shield.spelled_in(content):
                    self._render_shielded(found, record, chat, content, marks)
                else:
                    kept.append((record, chat))
            chats = kept
        seen, unseen = self._for_fast(chats, joined, plain=plain)
        self._render_slow(found, unseen, marks, template)
        if not self._render_fast(found, seen, marks, template):
            self._render_slow(found, seen.chats, marks, template)

    def _for_fast(
        self, chats: list[tuple[int, Chat]], joined: str, *, plain: bool
    ) -> tuple[Seen, list[tuple[int, Chat]]]:
        """The chats that the fast engine may see, and the others."""
        tricky = any(character in joined for character in TRIMMED_DIFFERENTLY)
        if plain and not tricky:
            return Seen(chats, [chat for _, chat in chats], []), []
        assert self.template is not None
        seen, unseen = Seen([], [], []), []
        for item in chats:
            view = sealed(item[1], seen.opened)
            allowed = view is item[1] or self.template.fast_takes_calls
            if view is not None and allowed and not (tricky and not trims_alike(item[1])):
                seen.chats.append(item)
                seen.views.append(view)
            else:
                unseen.append(item)
        return seen, unseen

    def _unread_images(self, chat: Chat) -> str | None:
        if isinstance(self._images, ImageRule) or not any(images_in(turn) for turn in chat.messages):
            return None
        return f"it has images, and {self._images}"

    def _allowed(
        self, found: Prepared, chats: list[tuple[int, Chat]], refusal: Callable[[Chat], str | None]
    ) -> list[tuple[int, Chat]]:
        """The chats but for those that there is a reason to refuse."""
        kept: list[tuple[int, Chat]] = []
        for record, chat in chats:
            reason = refusal(chat)
            if reason is None:
                kept.append((record, chat))
            else:
                found.bad(record, reason)
        return kept

    def _render_fast(self, found: Prepared, seen: Seen, marks: str, template: ChatTemplate) -> bool:
        """Render chats at once; False where that cannot be done or is not what jinja2 gives."""
        chats, views, opened = seen
        if template.fast is None or not chats:
            return not chats
        try:
            marked = template.render_fast(views, marks, opened)
            # The second guard: of every chunk one record, and one with calls, against the reference.
            calling = next((n for n, view in enumerate(views) if view is not chats[n][1]), 0)
            for number in {0, calling}:
                text = marked.split(marks[2], number + 1)[number] + marks[2]
                if text != template.render(chats[number][1], marks):
                    return False
            self._add(found, chats, marked, marks)
        except Exception:  # a record that the template refuses: the reference finds it
            return False
        return True

    def _render_slow(
        self, found: Prepared, chats: list[tuple[int, Chat]], marks: str, template: ChatTemplate
    ) -> None:
        pieces: list[str] = []
        kept: list[tuple[int, Chat]] = []
        for record, chat in chats:
            try:
                pieces.append(template.render(chat, marks))
                kept.append((record, chat))
            except RecordError as error:
                pictured = any(images_in(turn) for turn in chat.messages)
                hint = "; it has images: give the model's own template (--template FILE)" if pictured else ""
                found.bad(record, f"{error}{hint}")
            except TooSlowError as error:
                raise _located(found, record, error) from None
        if kept:
            try:
                self._add(found, kept, "".join(pieces), marks)
            except RecordError as error:
                raise InputError(f"chat template {template.name}: {error}") from error

    def _add(self, found: Prepared, chats: list[tuple[int, Chat]], marked: str, marks: str) -> None:
        if found.untrained or found.weights or self.config.train_on == "last":
            rendered = zip(chats, marked.split(marks[2])[:-1], strict=True)
            kept = [
                (item, text) for item, text in rendered if self._turns_are_told(found, *item, text, marks)
            ]
            chats, marked = [item for item, _ in kept], "".join(text + marks[2] for _, text in kept)
        parts = split_marked(marked, marks, normalizes=self._normalizes)
        found.batches.append(Batch([record for record, _ in chats], parts, plain=False, is_chat=True))

    def _turns_are_told(self, found: Prepared, record: int, chat: Chat, marked: str, marks: str) -> bool:
        """Whether each of the assistant's turns is one span, where some are trained and others not."""
        by_turn = record in found.untrained or record in found.weights
        if not by_turn and self.config.train_on != "last":
            return True
        reason = unclear_turns(chat, marked.count(marks[0]))
        if reason is not None:
            found.bad(record, reason)
        return reason is None

    def _render_shielded(
        self, found: Prepared, record: int, chat: Chat, content: list[str], marks: str
    ) -> None:
        assert self.template is not None
        try:
            check_no_stand_ins(content)
            stand_ins: dict[str, str] = {}
            content_of: Any = self._shield.cover([chat.messages, chat.tools, chat.variables], stand_ins)
            messages, tools, variables = content_of
            covered = chat._replace(messages=messages, tools=tools, variables=variables)
            marked = self.template.render(covered, marks)
        except TooSlowError as error:
            raise _located(found, record, error) from None
        except RecordError as error:
            found.bad(record, str(error))
        else:
            if self._turns_are_told(found, record, chat, marked, marks):
                found.shielded.append((record, marked, marks, stand_ins))


def _located(found: Prepared, record: int, error: TooSlowError) -> TooSlowError:
    return TooSlowError(f"{found.task.name}, record {found.task.chunk.start + record:,}: {error}")


def _joined(chats: list[tuple[int, Chat]], *, clear: bool) -> tuple[str, bool]:
    """All texts of the chats in one, and whether every chat is turns of strings and nothing else.

    `clear`: nothing that a text is searched for is in them, so those of other chats need not be collected.
    """
    if not any(chat.tools is not None or chat.variables for _, chat in chats):
        try:
            return "\n".join(
                [value for _, chat in chats for turn in chat.messages for value in turn.values()]
            ), True
        except TypeError:
            pass
    return "" if clear else "\n".join([leaf for _, chat in chats for leaf in leaves(chat)]), False
