"""The kinds of records in the demo set, each a function of a source of choices.

Everything here was written for padless, so the demo set may ship with it. A record is made from
word lists and sentence patterns; what counts is not wisdom but the spread of lengths (a few tokens
to about a thousand, as in real instruction sets) and that it reads as what it is when a pack is
looked at. `scripts/make_demo.py` decides how many records of each kind there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from demo_words import (
    ENDINGS,
    GREETINGS,
    GROUPS,
    NAMES,
    PLACES,
    PYTHON,
    SAYINGS,
    SCENES,
    TOPICS,
    UNITS,
    VERBS,
    WEATHER,
)

Record = dict[str, str]
Kind = Callable[["Dice"], Record]
T = TypeVar("T")


class Dice:
    """Seeded choices made from `Random.random` alone.

    Python promises the same numbers from `random()` for ever, and no such thing of `choice` or
    `sample`; the committed demo set must come out the same from any Python.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def number(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int(self._random.random() * (high - low + 1))

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.number(0, len(items) - 1)]

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different items, in random order."""
        rest = list(items)
        return [rest.pop(self.number(0, len(rest) - 1)) for _ in range(count)]


def record(instruction: str, output: str, input: str = "") -> Record:
    return {"instruction": instruction, "input": input, "output": output}


def convert(dice: Dice) -> Record:
    large, small, factor = dice.pick(UNITS)
    count = dice.number(2, 60)
    if dice.number(0, 1):
        return record(f"How many {small} are {count} {large}?", f"{count * factor:,} {small}.")
    return record(
        f"Convert {count} {large} to {small} and show the calculation.",
        f"There are {factor:,} {small} to each of the {large}, so {count} {large} are "
        f"{count} × {factor:,} = {count * factor:,} {small}.",
    )


def arithmetic(dice: Dice) -> Record:
    seller, buyer = dice.some(NAMES, 2)
    goods, price = dice.pick(GROUPS["fruit"]), dice.number(2, 9)
    boxes, each = dice.number(2, 12), dice.number(4, 30)
    sold = dice.number(2, boxes * each - 1)
    left = boxes * each - sold
    return record(
        f"{seller} has {boxes} boxes with {each} {goods} each and sells {sold} of them to {buyer} "
        f"at {price} cents apiece. How many {goods} are left, and what does {buyer} pay?",
        f"At first there are {boxes} × {each} = {boxes * each} {goods}.\n"
        f"After the sale {boxes * each} - {sold} = {left} are left.\n"
        f"{buyer} pays {sold} × {price} = {sold * price} cents.\n"
        f"So {left} {goods} are left, and {buyer} pays {sold * price / 100:.2f}.",
    )


def classify(dice: Dice) -> Record:
    group = dice.pick(tuple(GROUPS))
    choice = dice.some(tuple(GROUPS), 2)
    choice = choice if group in choice else [group, choice[0]]
    first, second = sorted(choice)
    question = f"Does this word belong to the {first} or to the {second}?"
    return record(question, f"To the {group}.", dice.pick(GROUPS[group]))


def arrange(dice: Dice) -> Record:
    words = dice.some([word for group in GROUPS.values() for word in group], dice.number(3, 14))
    given = ", ".join(words)
    task = dice.number(0, 2)
    if task == 0:
        return record("Sort the words by the alphabet.", ", ".join(sorted(words)), given)
    if task == 1:
        longest = max(words, key=len)
        return record("Which of these words is the longest?", longest.capitalize() + ".", given)
    count = sum(map(len, words))
    return record(
        "Count the words and their letters.",
        f"There are {len(words)} words with {count} letters in all.",
        given,
    )


def past_tense(dice: Dice) -> Record:
    present, past, thing = dice.pick(VERBS)
    name, place = dice.pick(NAMES), dice.pick(PLACES)
    return record(
        "Rewrite the sentence in the past tense.",
        f"{name} {past} {thing} {place}.",
        f"{name} {present} {thing} {place}.",
    )


def listing(dice: Dice) -> Record:
    group = dice.pick(tuple(GROUPS))
    count = dice.number(3, 10)
    words = dice.some(GROUPS[group], count)
    lines = [f"{i}. {word.capitalize()}" for i, word in enumerate(words, start=1)]
    kind = {"fruit": "kinds of fruit", "furniture": "pieces of furniture"}.get(group, group)
    return record(f"Name {count} {kind}, one a line and numbered.", "\n".join(lines))


def explain(dice: Dice) -> Record:
    topic = dice.pick(tuple(TOPICS))
    sentences = TOPICS[topic][: dice.number(1, 5)]
    opening = dice.pick(("Tell me about", "Explain", "Write down what one should know about"))
    length = "a sentence" if len(sentences) == 1 else f"{len(sentences)} sentences"
    return record(f"{opening} {topic} in {length}.", " ".join(sentences))


def notes(dice: Dice) -> Record:
    topics = dice.some(tuple(TOPICS), dice.number(2, 4))
    parts = [
        f"## {topic.capitalize()}\n\n" + "\n".join(f"- {line}" for line in TOPICS[topic]) for topic in topics
    ]
    named = ", ".join(topics[:-1]) + f" and {topics[-1]}"
    return record(f"Write notes with headings on {named}.", "\n\n".join(parts))


def tell(dice: Dice, sentences: int) -> tuple[str, str, str]:
    """A story of so many sentences before its ending, and the two people in it."""
    name, other = dice.some(NAMES, 2)
    lines: list[str] = []
    while len(lines) < sentences:
        for scene in dice.some(SCENES, min(len(SCENES), sentences - len(lines))):
            _, past, thing = dice.pick(VERBS)
            words = {"name": name, "other": other, "past": past, "thing": thing}
            words |= {"place": dice.pick(PLACES), "weather": dice.pick(WEATHER)}
            words |= {"saying": dice.pick(SAYINGS), "number": str(dice.number(3, 90))}
            words |= {"animal": dice.pick(GROUPS["animals"]), "food": dice.pick(GROUPS["fruit"])}
            lines.append(scene.format_map(words))
    paragraphs = [" ".join(lines[i : i + 6]) for i in range(0, len(lines), 6)]
    return "\n\n".join(paragraphs) + " " + dice.pick(ENDINGS), name, other


def story(dice: Dice) -> Record:
    text, name, other = tell(dice, dice.number(3, 12))
    return record(f"Write a short story about {name} and {other}.", text)


def long_story(dice: Dice) -> Record:
    text, name, other = tell(dice, dice.number(18, 66))
    return record(f"Write a long story in which {name} meets {other}.", text)


def summarize(dice: Dice) -> Record:
    text, name, other = tell(dice, dice.number(3, 18))
    return record(
        "Who are the people in this story, and how many sentences does its first part have?",
        f"They are {name} and {other}; the first part has {text.split(chr(10))[0].count('. ') + 1}"
        " sentences.",
        text,
    )


def snippet(dice: Dice) -> Record:
    does, signature, body, call, result = dice.pick(PYTHON)
    indented = "\n".join(f"    {line}" for line in body.split("\n"))
    code = f"def {signature}:\n{indented}"
    wish = dice.pick(("Write a Python function that", "In Python I need a function that"))
    if dice.number(0, 1):
        return record(f"{wish} {does}.", f"```python\n{code}\n```")
    return record(
        f"{wish} {does}. Show how {dice.pick(NAMES)} would call it.",
        f"```python\n{code}\n\n\nprint({call})\n```\n\nThis prints `{result}`.",
    )


def table(dice: Dice) -> Record:
    people = dice.some(NAMES, dice.number(2, 9))
    amounts = [dice.number(5, 400) for _ in people]
    rows = "\n".join(f"{name},{amount}" for name, amount in zip(people, amounts, strict=True))
    most = people[amounts.index(max(amounts))]
    return record(
        "Add up the column and say who has the largest amount.",
        f"The sum is {' + '.join(map(str, amounts))} = {sum(amounts)}. "
        f"{most} has the largest amount, {max(amounts)}.",
        f"name,amount\n{rows}",
    )


def letter(dice: Dice) -> Record:
    sender, receiver = dice.some(NAMES, 2)
    topic, place = dice.pick(tuple(TOPICS)), dice.pick(PLACES)
    middle = " ".join(TOPICS[topic][: dice.number(1, 4)])
    return record(
        f"Write a letter from {sender} to {receiver} about {topic}.",
        f"Dear {receiver},\n\nsince we met {place} I have read a lot about {topic}. {middle}\n\n"
        f"What do you think? I shall be {dice.pick(PLACES)} until {dice.number(2, 11)} o'clock on "
        f"Sunday and would be glad to see you.\n\nYours,\n{sender}",
    )


def greeting(dice: Dice) -> Record:
    language = dice.pick(tuple(GREETINGS))
    return record(
        f"{dice.pick(NAMES)} asks: how do I greet somebody in {language} in the morning?",
        GREETINGS[language],
    )


def silence(dice: Dice) -> Record:
    return record(f"Answer {dice.pick(NAMES)} with nothing at all.", "")
