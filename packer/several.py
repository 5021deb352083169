"""Records that give several sequences: a chosen and a rejected answer, or one for each turn.

While a chunk is worked on, each of these examples goes its own way under a number of its own; `merge` brings
them together under their record again. A pair is kept or dropped as one, and fits a pack together.
Of a record's turns those that fit are kept: what is missing is counted as cut on its first line, as for any
record that was truncated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.config import PackConfig
from padless.packer.formats.examples import Chat, Converted, Example, Preference, Rated, Rollout
from padless.packer.lines import (
    CHOSEN,
    DROPPED,
    NO_VERDICT,
    REJECTED,
    TOO_LONG,
    TRUNCATED,
    UNWANTED,
    WANTED,
    WHOLE,
)
from padless.packer.strategies.constraints import padded_lengths

if TYPE_CHECKING:
    from padless.packer.prepared import Prepared
    from padless.packer.spans import Spanned


def examples_of(found: Converted, config: PackConfig) -> list[tuple[Example, int]]:
    """The examples that a record gives, in the order of their parts, each with its verdict."""
    if isinstance(found, Rollout):
        return [(found.example, NO_VERDICT)]
    if isinstance(found, Preference):
        both: list[tuple[Example, int]] = [(found.chosen, CHOSEN), (found.rejected, REJECTED)]
    elif isinstance(found, Rated):
        both = [(found.example, WANTED if found.label else UNWANTED)]
    else:
        both = [(found, NO_VERDICT)]
    if not config.expand_turns or isinstance(found, Preference):
        return both
    example, verdict = both[0]
    return [(one, verdict) for one in _by_turn(example, config)] if isinstance(example, Chat) else both


def _by_turn(chat: Chat, config: PackConfig) -> list[Chat]:
    """The conversation up to each trained turn of the assistant, with no other turn trained."""
    context = chat.first_trained if config.train_on != "assistant" else 0
    answers = [n for n, turn in enumerate(chat.messages) if turn["role"] == "assistant"]
    found = [
        chat._replace(
            messages=chat.messages[: number + 1],
            first_trained=0,
            untrained=tuple(n for n in answers if n < number),
            weights=tuple(item for item in chat.weights if item[0] == number),
        )
        for number in answers
        if number >= context and number not in chat.untrained
    ]
    return found or [chat]


def with_one_boundary(
    prepared: Prepared, records: NDArray[np.int64], spanned: Spanned, chats: frozenset[int]
) -> Spanned:
    """Spans in which the answers of a pair of strings begin behind the same prompt ids.

    A token over the seam of prompt and answer belongs to the answer, and there may be one on one side alone
    ("Cost: " + "$12"); a chat's template leaves none. Both answers then begin where the two sequences part,
    at the latest where the earlier one begins; the ids stay those of the whole texts (as TRL has it since its
    pull request 1153).
    """
    chosen = [n for n, verdict in enumerate(prepared.verdicts) if verdict == CHOSEN and n not in chats]
    places = np.searchsorted(records, chosen)
    starts = spanned.span_start.copy()
    for place, example in zip(places.tolist(), chosen, strict=True):
        pair = records[place : place + 2].tolist()
        mine = slice(*np.searchsorted(spanned.span_text, [place, place + 2]))
        if pair != [example, example + 1] or spanned.span_text[mine].tolist() != [place, place + 1]:
            continue  # one was refused
        first, second, end = spanned.offsets[place : place + 3].tolist()
        one, two = starts[mine] - (first, second)
        begin = int(min(one, two, second - first, end - second))
        apart = np.flatnonzero(spanned.ids[first : first + begin] != spanned.ids[second : second + begin])
        starts[mine] = (first, second) + np.minimum(begin, apart[0] if len(apart) else begin)
    return spanned._replace(span_start=starts)


def merge(
    prepared: Prepared,
    lines: NDArray[np.void],
    values: NDArray[np.int32],
    weights: NDArray[Any] | None,
    config: PackConfig,
) -> tuple[NDArray[np.void], NDArray[np.int32], NDArray[Any] | None]:
    """Lines by example to lines by record, and the values (and weights) of those that are left.

    A line for each sequence; for a record that gives none, the line of its first example that was dropped.
    A pair that fits no pack together goes by `overflow`: dropped, or a problem.
    """
    number = lines["record"]
    record = np.asarray(prepared.owners, dtype=np.int64)[number]
    lines["verdict"] = np.asarray(prepared.verdicts, dtype=np.uint8)[number]
    if prepared.margins:
        margins = np.zeros(prepared.count, dtype=np.float32)
        margins[list(prepared.margins)] = list(prepared.margins.values())
        lines["margin"] = margins[record]
    count = prepared.count
    gone = lines["length"] == 0
    incomplete = np.bincount(record[gone], minlength=count) > 0
    paired = (lines["verdict"] == CHOSEN) | (lines["verdict"] == REJECTED)
    torn = ~gone & paired & incomplete[record]
    over = ~gone & ~torn & paired
    padded = np.where(over, padded_lengths(lines["length"], config.align), 0)
    together = np.bincount(record, weights=padded, minlength=count).astype(np.int64)
    over &= together[record] > config.longest
    if config.overflow != "drop":
        for one in np.unique(record[over]).tolist():
            prepared.problem(one, _over_together(int(together[one]), config))
    lines["reason"][over] = TOO_LONG
    torn |= over
    if torn.any():
        kept = np.repeat(~torn, lines["length"])
        values, weights = values[kept], weights[kept] if weights is not None else None
        lines["cut"][torn] += lines["length"][torn]
        lines["length"][torn] = lines["targets"][torn] = 0
    cut = np.bincount(record, weights=lines["cut"], minlength=count).astype(np.int64)
    empty_reply = np.bincount(record, weights=lines["empty_reply"], minlength=count) > 0
    lacking = gone | over | (lines["status"] == TRUNCATED)
    why = np.zeros(count, dtype=np.uint8)
    why[record[lacking][::-1]] = lines["reason"][lacking][::-1]  # the first one's stays

    has_any = np.bincount(record[lines["length"] > 0], minlength=count) > 0
    left = (lines["length"] > 0) | (~has_any[record] & _first_of_each(record))
    lines, record = lines[left], record[left]
    first = _first_of_each(record)
    begins = np.flatnonzero(first)
    lines["record"] = record
    lines["part"] = np.arange(len(record)) - np.repeat(begins, np.diff(np.append(begins, len(record))))
    lines["cut"] = np.where(first, cut[record], 0)
    lines["empty_reply"] = first & empty_reply[record]
    nothing = lines["length"] == 0
    lines["status"][nothing] = DROPPED
    lines["start"][nothing] = 0
    short = first & (lines["status"] == WHOLE) & (why[record] > 0)
    lines["status"][short] = TRUNCATED
    lines["reason"] = np.where(nothing | short, why[record], lines["reason"])
    return lines, values, weights


def _over_together(tokens: int, config: PackConfig) -> str:
    padding = f" (padded to multiples of {config.align:,})" if config.align > 1 else ""
    return (
        f"has a pair of {tokens:,} tokens together{padding} and max_length is {config.longest:,}: a pair "
        "shares a pack; raise --max-length, or choose --overflow drop"
    )


def _first_of_each(record: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.append(True, record[1:] != record[:-1])[: len(record)]
