"""Numbers in free answers: found as a reader would, and none that isn't meant."""

from __future__ import annotations

import json
import time
from math import inf

import pytest

from populace.parsing import find_number
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("33", 33),
        ("**42.5**", 42.5),
        ("My number is 17.", 17),
        ("I'll go with 12, since the others will pick 20.", 12),
        ("The average will be 50, and 2/3 of that is 33. So my answer is 22.", 22),
        ("I choose 22 because 2/3 of 33 is 22.", 22),
        ("2/3 of the average", None),
        ("The target is 2/3 of the average of all numbers from 0 to 100.", None),
        ("50% of the players", None),
        ("The 13th number will not work.", None),
        ("It is 12:30 now.", None),
        ("If you pick 5, I pick 6.", None),
        ("I pick 5. I pick 7.", None),
        ("I pick 5. No: my final answer is 7.", 7),
        ("I can't.", None),
        ("-1", None),
        ("101", None),
        ("1. Think of a number. 2. Divide it.", None),
        ("", None),
        # ranges, sums, halves
        ("I choose 5 to 6", None),
        ("My number is 20 and 30", None),
        ("My answer is 2, 3 of the average", None),
        ("My number is 2 as in 2/3", None),
        ("My number is 2 and 1/2", None),
        ("I choose 33 and a half", None),
        ("I choose 50 * 2/3 = 33.3", 33.3),
        ("The answer is 100 * 2/3 = 66.7", 66.7),
        # told, not picked
        ("Last round I chose 50.", None),
        ("the winning number was 14.", None),
        ("The average number is 22.", None),
        ("your number was 14, the winning number 12", None),
        ("You picked 14 and lost.", None),
        ("When you choose 0, you win.", None),
        ("I choose 100 as an upper bound", None),
        ("I choose " + "9" * 400 + ".", None),
        # plain, in other dresses
        ('{"number": 22}', 22),
        ("**Final Answer:** 22", 22),
        (r"So \boxed{22}", 22),
        ("My number is $22$.", 22),
        ("<answer>33</answer>", 33),
        ('I choose "22".', 22),
        ("22 is my final answer.", 22),
        ("I am choosing 41.", 41),
        ("Let me pick 41", 41),
        ("I've decided on 41", 41),
        ("I choose 33 (2/3 of 50).", 33),
        ("I choose 22 points", 22),
    ],
)
def test_what_an_answer_settles_on(text: str, number: float | None) -> None:
    assert find_number(text, 0, 100) == number


def test_numbers_outside_are_there_if_asked_for() -> None:
    assert find_number("My number is 500.", -inf, inf) == 500


def test_recorded_answers_of_a_small_model() -> None:
    """Labelled by hand; every answer with a pick that was recorded, and some without."""
    rows = [
        json.loads(line)
        for line in (ROOT / "tests/data/free_answers.jsonl").read_text().splitlines()
    ]
    right = false = missed = 0
    for row in rows:
        found = find_number(row["text"], 0, 100)
        if found is not None and found == row["number"]:
            right += 1
            continue
        false += found is not None
        missed += row["number"] is not None
    assert right / (right + false) > 0.97
    assert right / (right + missed) > 0.88


@pytest.mark.parametrize(
    "part", ["1 * ", "1/1*", "9", "my number ", '[{"', "when ", '"1" ', "my number is 5 "]
)
def test_long_answers_take_no_time(part: str) -> None:
    began = time.monotonic()
    find_number(part * (100_000 // len(part)), 0, 100)
    assert time.monotonic() - began < 2
