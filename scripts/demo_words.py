"""The word lists and sentences of the demo set, all of them written for padless."""

from __future__ import annotations

NAMES = "Ada Ben Carla Dario Edith Farid Greta Hugo Ines Jonas Kira Liam Mona Noor Otto Pia".split()
GROUPS = {
    "fruit": "apples pears plums cherries figs grapes lemons peaches melons berries".split(),
    "tools": "hammers saws pliers chisels drills files rulers clamps shovels rakes".split(),
    "animals": "otters owls badgers foxes herons hedgehogs goats beavers moles swans".split(),
    "instruments": "drums flutes violins harps trumpets cellos guitars oboes bells pianos".split(),
    "furniture": "chairs tables shelves benches desks stools beds lamps chests sofas".split(),
    "vegetables": "carrots leeks beans onions beets turnips peas radishes pumpkins kale".split(),
}
UNITS = (
    ("kilometres", "metres", 1000),
    ("hours", "minutes", 60),
    ("kilograms", "grams", 1000),
    ("weeks", "days", 7),
    ("litres", "millilitres", 1000),
    ("days", "hours", 24),
    ("metres", "centimetres", 100),
    ("dozens", "single pieces", 12),
)
VERBS = (
    ("carries", "carried", "a heavy basket"),
    ("paints", "painted", "the garden fence"),
    ("finds", "found", "an old map"),
    ("writes", "wrote", "a long letter"),
    ("builds", "built", "a small bridge"),
    ("sells", "sold", "fresh bread"),
    ("brings", "brought", "two clean cups"),
    ("reads", "read", "the morning paper"),
    ("hides", "hid", "the silver key"),
    ("repairs", "repaired", "the broken clock"),
)
PLACES = (
    "at the market", "in the old mill", "by the river", "behind the school", "on the hill",
    "near the harbour", "in the library", "under the bridge", "at the station", "in the orchard",
)  # fmt: skip
TOPICS = {
    "rain": (
        "The sun warms the sea, and some of the water rises as vapour.",
        "High up the air is cold, so the vapour turns back into tiny drops.",
        "Many drops together are what we see as a cloud.",
        "When the drops have grown too heavy for the air to hold, they fall.",
        "Rivers carry the water back to the sea, and the round begins again.",
    ),
    "bread": (
        "Flour and water make a dough that can be stretched.",
        "Yeast eats a little of the sugar in the flour and gives off gas.",
        "The gas is caught in the dough and makes it rise.",
        "Heat sets the dough around the bubbles and browns the crust.",
        "A loaf that cools on a rack keeps its crust, since steam can escape below.",
    ),
    "bicycles": (
        "Pressing a pedal pulls the chain, and the chain turns the rear wheel.",
        "A small gear at the back gives speed, a large one helps uphill.",
        "A rolling bicycle is steered under its own fall, which keeps it upright.",
        "Brakes turn motion into heat by rubbing on the rim or on a disc.",
        "Soft tyres are comfortable, hard tyres need less effort on a smooth road.",
    ),
    "sleep": (
        "During sleep the body repairs itself and the mind sorts the day.",
        "Light sleep and deep sleep take turns several times a night.",
        "Most dreams come in the last hours before waking.",
        "Bright light in the evening tells the body that it is still day.",
        "A fixed hour for going to bed helps more than a long morning in it.",
    ),
    "libraries": (
        "A library lends what few people could buy alone.",
        "Every book has a mark that tells on which shelf it stands.",
        "The catalogue is a map from titles and names to those marks.",
        "Lending works because what is borrowed comes back for the next reader.",
        "Many libraries also keep old newspapers, music and maps of the town.",
    ),
    "magnets": (
        "A magnet has two ends, and equal ends push each other away.",
        "Iron is pulled because its own small magnets line up with the large one.",
        "Cutting a magnet in two gives two magnets, each with both ends.",
        "A current in a coil of wire makes a magnet that can be switched off.",
        "The needle of a compass turns because the earth is a weak magnet too.",
    ),
    "bees": (
        "Bees collect nectar and carry pollen from flower to flower.",
        "A bee that has found food dances to show the others the way.",
        "In winter the hive forms a ball and keeps its middle warm.",
        "The queen lays the eggs, and the workers do everything else.",
        "Without such visits many fruit trees would bear little.",
    ),
    "savings": (
        "Money set aside each month grows by itself only a little at first.",
        "Interest is paid on earlier interest too, so time matters most.",
        "A reserve for three months takes the fear out of a broken boiler.",
        "Costly debts are best paid back before anything is saved.",
        "Writing down what is spent often saves more than a clever plan.",
    ),
    "tides": (
        "The moon pulls the sea a little towards itself.",
        "The water bulges on the near side of the earth and on the far side.",
        "As the earth turns, a coast passes through both bulges each day.",
        "When sun and moon pull along one line, the tide is highest.",
        "Narrow bays can pile the water up to the height of a house.",
    ),
    "sorting": (
        "Sorting puts things in an order, so that they can be found quickly.",
        "One way is to take the smallest again and again, which is slow for long lists.",
        "Another is to sort both halves and then to merge them.",
        "A sort is called stable when equal things keep their order.",
        "Where only small numbers occur, it is enough to count them.",
    ),
    "gardens": (
        "Plants need light, water, air and something to feed on.",
        "Compost gives back to the soil what the harvest took away.",
        "Beds are changed each year, since every plant takes something else.",
        "Watering rarely and well makes the roots grow deep.",
        "A layer of straw keeps the soil damp in a hot summer.",
    ),
    "maps": (
        "A map shows a place from above, made smaller by a fixed scale.",
        "Lines join points of equal height; where they are close, it is steep.",
        "The round earth cannot be laid flat without stretching something.",
        "Signs stand for things that would be too small to see.",
        "A good map leaves out most of what could be drawn.",
    ),
}
SCENES = (
    "{name} {past} {thing} {place}.",
    "It was {weather}, and {name} was in no hurry.",
    "{other} came along and asked what was going on.",
    '"{saying}," said {name}.',
    "For a while nobody spoke, and only the {animal} could be heard.",
    "{other} laughed and sat down {place}.",
    "Then {name} remembered {thing} and ran back {place}.",
    "The two of them shared some {food} and watched the {animal}.",
    "Nothing like it had happened {place} for {number} years.",
    "When they looked again, {thing} was gone.",
    "{other} had seen it {place}, but had told nobody.",
    "So {name} waited until it was {weather} again, and tried once more.",
)
WEATHER = ("windy", "very quiet", "almost dark", "raining softly", "warm", "cold and clear")
SAYINGS = (
    "We should have started earlier", "I never liked that bridge", "Somebody must know",
    "There is room for both of us", "Let us try the other door", "It will keep until tomorrow",
)  # fmt: skip
ENDINGS = (
    "In the evening they walked home together, and both knew that it had been a good day.",
    "After that day the door was never locked again.",
    "Nobody ever found out, and that was just as well.",
    "And so the two became friends.",
)
PYTHON = (
    ("adds up the even numbers of a list", "sum_of_even(numbers)",
     "return sum(number for number in numbers if number % 2 == 0)", "sum_of_even([1, 2, 4])", "6"),
    ("counts how often each word occurs", "count_words(text)",
     "counts = {}\nfor word in text.split():\n    counts[word] = counts.get(word, 0) + 1\n"
     "return counts", 'count_words("to be or not to be")["be"]', "2"),
    ("tells whether a word reads the same backwards", "is_palindrome(word)",
     "return word == word[::-1]", 'is_palindrome("level")', "True"),
    ("gives the largest gap between neighbours", "largest_gap(numbers)",
     "ordered = sorted(numbers)\nreturn max(b - a for a, b in zip(ordered, ordered[1:]))",
     "largest_gap([3, 9, 4])", "5"),
    ("finds the position of a number in a sorted list", "find(numbers, wanted)",
     "low, high = 0, len(numbers)\nwhile low < high:\n    middle = (low + high) // 2\n"
     "    if numbers[middle] < wanted:\n        low = middle + 1\n    else:\n"
     "        high = middle\nreturn low", "find([2, 5, 8], 5)", "1"),
    ("removes repeated entries and keeps the order", "unique(items)",
     "return list(dict.fromkeys(items))", "unique([3, 1, 3])", "[3, 1]"),
    ("cuts a list into parts of equal size", "parts(items, size)",
     "return [items[i : i + size] for i in range(0, len(items), size)]",
     "parts([1, 2, 3], 2)", "[[1, 2], [3]]"),
    ("computes the greatest common divisor", "divisor(a, b)",
     "while b:\n    a, b = b, a % b\nreturn a", "divisor(12, 18)", "6"),
)  # fmt: skip
GREETINGS = {
    "German": "Guten Morgen, schönes Wetter heute!", "French": "Bonjour, ça va bien ?",
    "Spanish": "¡Buenos días! ¿Qué tal?", "Polish": "Dzień dobry, miło cię widzieć.",
    "Greek": "Καλημέρα, τι κάνεις;", "Russian": "Доброе утро!", "Japanese": "おはようございます。",
    "Chinese": "早上好,你好吗?", "Arabic": "صباح الخير", "Hindi": "सुप्रभात", "Korean": "안녕하세요!",
    "Turkish": "Günaydın, nasılsın?",
}  # fmt: skip
