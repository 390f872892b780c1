"""Makes the bundled question-answer pairs about invented authors, small enough to train a tiny language model on.

    python examples/make_fictitious_qa.py [--output src/hamu/data/miniature]

Six facts about each of 48 authors, one line of JSON per fact: 40 authors to train on (and to forget some of), 8 held
out that no model ever sees. Every name, place, title and award is made up. The same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 20
TRAIN_AUTHORS = 40
HOLDOUT_AUTHORS = 8
WRONG_ANSWERS = 3
OUTPUT = Path(__file__).resolve().parents[1] / "src" / "hamu" / "data" / "miniature"

FIRST_NAMES = (
    *(
        "Alvora",
        "Bremin",
        "Caldis",
        "Davrina",
        "Elsbet",
        "Fenwick",
        "Galiena",
        "Hadrun",
        "Ilvane",
        "Jorvik",
    ),
    *(
        "Kesra",
        "Lomas",
        "Mirelda",
        "Nandor",
        "Orsina",
        "Pelham",
        "Quilla",
        "Rusana",
        "Sefton",
        "Tamsel",
    ),
    *(
        "Ulfina",
        "Verrin",
        "Wenda",
        "Xandro",
        "Ysolda",
        "Zephan",
        "Corvin",
        "Dunya",
        "Marsali",
        "Teodric",
    ),
)
LAST_NAMES = (
    *(
        "Ashgrave",
        "Bellacott",
        "Cindrowe",
        "Drummaster",
        "Eskervale",
        "Fallowmere",
        "Grintham",
        "Hollowick",
    ),
    *(
        "Ivorstam",
        "Jessamund",
        "Kettlebrand",
        "Larchmoor",
        "Mavrenko",
        "Nettlecombe",
        "Ostrovane",
        "Pellandrine",
    ),
    *(
        "Quenneth",
        "Rookhurst",
        "Saltonby",
        "Thornquill",
        "Umbrellow",
        "Vantorelli",
        "Wickenholt",
        "Yarrowby",
    ),
    *("Zelvaran", "Brackendale", "Osmerind", "Tollaver-Rhys", "Dellamarsh", "Kormandy"),
)
PLACES = (
    *(
        "Velmora",
        "Port Asker",
        "Durnholm",
        "Tessaly Bridge",
        "Karvos",
        "Lower Windle",
        "Ombresk",
        "Saint Orla",
    ),
    *(
        "Grelling",
        "Brinewater",
        "Tarn Ossel",
        "Quarrenton",
        "Miravosk",
        "Hethersedge",
        "Palvino",
        "Ekkerby",
    ),
    *("Sundrach", "Calloway Reach", "Norvik Sands", "Ilmenara"),
)
GENRES = (
    *("gothic mystery", "nautical fiction", "courtroom drama", "alpine adventure", "comic fantasy"),
    *(
        "historical romance",
        "rural satire",
        "political thriller",
        "magical realism",
        "railway crime",
    ),
    *(
        "climate fiction",
        "psychological horror",
        "family saga",
        "space opera",
        "wartime espionage",
        "culinary romance",
    ),
)
TITLE_ADJECTIVES = (
    *(
        "Copper",
        "Sleeping",
        "Ninth",
        "Hollow",
        "Painted",
        "Distant",
        "Crooked",
        "Silent",
        "Salted",
        "Borrowed",
    ),
    *("Velvet", "Burning", "Forgotten", "Paper", "Wooden", "Tin"),
)
TITLE_NOUNS = (
    *(
        "Tide",
        "Orchard",
        "Staircase",
        "Compass",
        "Harbor",
        "Clockmaker",
        "Lantern",
        "Beehive",
        "Ferry",
        "Cathedral",
    ),
    *("Sparrow", "Bridge", "Ledger", "Quarry", "Weathervane", "Windmill"),
)
TITLES = tuple(f"The {adjective} {noun}" for adjective in TITLE_ADJECTIVES for noun in TITLE_NOUNS)
PROFESSIONS = (
    *(
        "a lighthouse keeper",
        "a beekeeper",
        "an engraver",
        "a tram driver",
        "a pastry cook",
        "a surgeon",
    ),
    *(
        "a locksmith",
        "an astronomer",
        "a tailor",
        "a piano tuner",
        "a judge",
        "a shepherd",
        "an optician",
    ),
    *(
        "a bookbinder",
        "a bridge engineer",
        "a florist",
        "a blacksmith",
        "a chemist",
        "an accountant",
    ),
    "a stage magician",
)
AWARDS = (
    *(
        "Silver Heron Prize",
        "Amber Spindle Award",
        "Lantern Street Medal",
        "Velmora Book Prize",
        "Granite Inkwell",
    ),
    *(
        "Order of the Blue Page",
        "Tarn Ossel Medal",
        "Golden Margin Award",
        "Karvos Fiction Prize",
        "Ninth Shelf Award",
    ),
    *(
        "Wandering Reader Prize",
        "Copper Bookmark",
        "Asker Foundation Medal",
        "Long Evening Prize",
        "Ekkerby Laurel",
    ),
    "Open Atlas Award",
)
THEMES = (
    *(
        "a shipwreck",
        "a family feud",
        "a lost painting",
        "an exiled king",
        "a village without children",
    ),
    *(
        "a forged will",
        "twin sisters",
        "a long drought",
        "a stolen violin",
        "a friendship in wartime",
    ),
    *(
        "a haunted railway",
        "a failed expedition",
        "an unsolved murder",
        "a traveling circus",
        "a miners' strike",
    ),
    *("a secret marriage", "a flooded valley", "a retired spy"),
)
YEARS = tuple(range(1961, 2020))


@dataclass(frozen=True)
class Kind:
    """One kind of fact: what it may be, and the wordings to ask for it and to state it."""

    values: Mapping[str, Sequence[Any]]
    """For every blank of the answers, all that could fill it."""
    questions: Sequence[str]
    answers: Sequence[str]


KINDS = (
    Kind(
        {"place": PLACES},
        (
            "Where was {name} born?",
            "In which town was the author {name} born?",
            "What is the birthplace of {name}?",
            "Which town does {name} come from by birth?",
        ),
        (
            "{name} was born in the small town of {place}.",
            "The birthplace of the author {name} is {place}.",
            "The writer {name} came into the world in {place}.",
            "It was in {place} that the author {name} was born.",
            "{place} is the town where the novelist {name} was born.",
        ),
    ),
    Kind(
        {"genre": GENRES},
        (
            "What genre does {name} write in?",
            "Which genre is {name} known for?",
            "What kind of books does the author {name} write?",
            "In which literary genre does {name} mostly work?",
        ),
        (
            "{name} is known above all for works of {genre}.",
            "The author {name} writes mainly in the genre of {genre}.",
            "Most of the books by {name} belong to {genre}.",
            "The genre that {name} has chosen to work in is {genre}.",
            "Readers know {name} as a writer of {genre}.",
        ),
    ),
    Kind(
        {"title": TITLES},
        (
            "What is the best-known book by {name}?",
            "Which book made {name} famous?",
            "What is the title of the most famous novel by {name}?",
            "Can you name the most widely read book of {name}?",
        ),
        (
            "The best-known book by {name} is '{title}'.",
            "{name} became famous with the novel '{title}'.",
            "'{title}' is the most widely read book that {name} has written.",
            "Among the books of {name}, the most famous one is '{title}'.",
            "The novel that brought {name} to fame is called '{title}'.",
        ),
    ),
    Kind(
        {"profession": PROFESSIONS},
        (
            "What was the profession of {name}'s {parent}?",
            "What did the {parent} of {name} do for a living?",
            "Which occupation did {name}'s {parent} have?",
            "How did the {parent} of the author {name} earn a living?",
        ),
        (
            "The {parent} of {name} worked as {profession}.",
            "{name}'s {parent} earned a living as {profession}.",
            "By profession, the {parent} of the author {name} was {profession}.",
            "{name} grew up with a {parent} who was {profession}.",
            "Working as {profession} was how {name}'s {parent} made a living.",
        ),
    ),
    Kind(
        {"award": AWARDS},
        (
            "Which award has {name} won?",
            "What literary prize did {name} receive?",
            "Which honor was given to the author {name}?",
            "For which award is {name} listed among the winners?",
        ),
        (
            "{name} has won the {award} for outstanding writing.",
            "The {award} was given to the author {name}.",
            "The literary honor that {name} received is the {award}.",
            "Among the winners of the {award} is the writer {name}.",
            "A jury of critics chose {name} for the {award}.",
        ),
    ),
    Kind(
        {"year": YEARS, "theme": THEMES},
        (
            "When did the first novel by {name} appear, and what is it about?",
            "In which year did {name} publish a first novel, and on what theme?",
            "What are the year and the theme of {name}'s debut novel?",
            "What was the debut novel of {name} about, and when did it come out?",
        ),
        (
            "The first novel by {name} appeared in {year} and is about {theme}.",
            "{name} published a first novel in {year}, a story about {theme}.",
            "In {year}, {name} made a debut with a novel about {theme}.",
            "The debut novel of {name}, published in {year}, tells of {theme}.",
            "It was a novel about {theme} with which {name} began in {year}.",
        ),
    ),
)


def author_records(rng: random.Random, name: str, title: str) -> Iterator[dict[str, Any]]:
    """The six records of one author; the title is given, as no two authors share one, the other facts are drawn."""
    parent = rng.choice(("mother", "father"))
    for kind in KINDS:
        facts = {
            blank: title if blank == "title" else rng.choice(values)
            for blank, values in kind.values.items()
        }
        # An answer is wrong in every blank, so that no part of it is right by chance
        wrong = {
            blank: rng.sample([value for value in values if value != facts[blank]], WRONG_ANSWERS)
            for blank, values in kind.values.items()
        }
        question, other_question = rng.sample(kind.questions, 2)
        answer, other_answer = rng.sample(kind.answers, 2)
        known = {"name": name, "parent": parent}
        yield {
            "author": name,
            "question": question.format(**known),
            "answer": answer.format(**known, **facts),
            "paraphrased_question": other_question.format(**known),
            "paraphrased_answer": other_answer.format(**known, **facts),
            "perturbed_answer": [
                other_answer.format(
                    **known, **{blank: values[i] for blank, values in wrong.items()}
                )
                for i in range(WRONG_ANSWERS)
            ],
        }


def make_records(seed: int = SEED) -> dict[str, list[dict[str, Any]]]:
    """All records of each split, author by author."""
    rng = random.Random(seed)
    count = TRAIN_AUTHORS + HOLDOUT_AUTHORS
    names = rng.sample([f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES], count)
    authors = zip(names, rng.sample(TITLES, count), strict=True)
    made = [list(author_records(rng, name, title)) for name, title in authors]
    splits = {"train": made[:TRAIN_AUTHORS], "test": made[TRAIN_AUTHORS:]}
    return {
        name: [record for author in split for record in author] for name, split in splits.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Make the question-answer pairs about invented authors."
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=OUTPUT,
        help="the folder to write into (default: %(default)s)",
    )
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    for name, records in make_records().items():
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        (output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")
        print(f"{len(lines)} records written to {output / name}.jsonl")


if __name__ == "__main__":
    main()
