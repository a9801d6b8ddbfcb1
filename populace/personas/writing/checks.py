"""Whether a written background contradicts its row: age, gender, education, occupation, categories.

These are rules, in English and Chinese: they find what is said outright ("you are a 52-year-old
man"), and can't find what would have to be concluded. ``judge`` in the job adds a model's opinion.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from populace.personas.writing.alike import shingles
from populace.personas.writing.names import gender_of

_ENOUGH_WORDS = 20
_DISTINCT = 0.6
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")


@dataclass(frozen=True, slots=True)
class Contradiction:
    """One thing that a text says and its row doesn't."""

    attribute: str
    asked: str
    found: str

    def __str__(self) -> str:
        return f"it says {self.found!r}, while {self.attribute} is {self.asked}"


_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen"),
)
_TENS = {
    "twenty": 20,
    "thirty": 30,
    "forty": 40,
    "fifty": 50,
    "sixty": 60,
    "seventy": 70,
    "eighty": 80,
    "ninety": 90,
}
_NUMBER_WORDS = {
    **{word: i for i, word in enumerate(_ONES)},
    **_TENS,
    **{f"{t}-{o}": n + i for t, n in _TENS.items() for i, o in enumerate(_ONES[1:10], 1)},
}
_NUMBER = (
    rf"(\d{{1,3}}|(?:{'|'.join(_TENS)})(?:[- ](?:{'|'.join(_ONES[1:10])}))?|"
    rf"{'|'.join(sorted(_ONES, key=len, reverse=True))})"
)
_KIN = (
    r"(?:son|daughter|child|kid|boy|girl|sister|brother|nephew|niece|cousin|grand\w+|twin|"
    r"mother|father|husband|wife|partner|friend|dog|cat|car|house|company|firm)"
)
_AGES = (
    # Of oneself: whisky, mothers and companies have ages as well.
    re.compile(
        rf"\b(?:you(?:'re| are)|as|being|now|currently|is|,)(?: (?!\d)[\w'-]+,?){{0,3}} "
        rf"{_NUMBER}[- ]years?[- ](?:old|of[- ]age)\b(?!(?: \w+)? {_KIN})",
        re.I,
    ),
    re.compile(rf"^\W*(?:an? )?{_NUMBER}[- ]years?[- ]old\b(?!(?: \w+)? {_KIN})", re.I),
    re.compile(
        rf"\byou(?:'re| are)(?: now| currently| just| only)? (?:aged )?{_NUMBER}"
        r"(?=[.,;]|$| and )",
        re.I,
    ),
    re.compile(rf"(?<!when )\baged {_NUMBER}\b", re.I),
    re.compile(r"(?:今年|现年|如今|你是?一?[个位名]?)\s*(\d{1,3}|[一二三四五六七八九十百]+)\s*岁"),
)
_OF_OTHERS = re.compile(
    r"\b(?:your|his|her|their|my|our|when|since|was|were|until)\b[^.]{0,25}$", re.I
)
_DECADES = re.compile(
    r"\b(?:you(?:'re| are)|now|currently)(?: \w+){0,3} in (?:your|his|her|their) "
    r"(?:early |mid-?|late )?"
    r"(teens|twenties|thirties|forties|fifties|sixties|seventies|eighties|nineties|\d0s)\b",
    re.I,
)
_DECADE = {
    "teens": 10,
    "twenties": 20,
    "thirties": 30,
    "forties": 40,
    "fifties": 50,
    "sixties": 60,
    "seventies": 70,
    "eighties": 80,
    "nineties": 90,
}

_HER = r"(?:woman|girl|lady|mother|grandmother|wife|daughter|sister|widow|female|businesswoman)"
_HIS = r"(?:man|boy|gentleman|father|grandfather|husband|son|brother|widower|male|businessman)"
_SELF = (
    r"\b(?:you(?:'re| are| were born)|as|like any|being) (?:an?|the) "
    r"(?:(?!of\b|to\b|for\b|from\b|with\b|and\b)[\w'-]+,? ){0,4}?"
)
_FEMALE = re.compile(
    rf"{_SELF}{_HER}\b|你是(?:一[个位名])?[^。,,]{{0,8}}(?:女性|女人|女孩|女士|母亲|妻子)", re.I
)
_MALE = re.compile(
    rf"{_SELF}{_HIS}\b|你是(?:一[个位名])?[^。,,]{{0,8}}(?:男性|男人|男孩|先生|父亲|丈夫)", re.I
)
_SHE = re.compile(r"\b(?:she|her|hers|herself)\b|她", re.I)
_HE = re.compile(r"\b(?:he|him|his|himself)\b|他(?!们|人|的人)", re.I)
_YOU = re.compile(r"\byou\b|\byour\b|你", re.I)

_LADDER = (
    (1, re.compile(r"\b(?:elementary|primary|grade) school\b|小学", re.I)),
    (2, re.compile(r"\b(?:high|secondary|middle) school\b|高中|初中|中学", re.I)),
    (3, re.compile(r"\bassociate(?:'s)? degree\b|大专", re.I)),
    (
        4,
        re.compile(r"\bbachelor(?:'s|s)?\b|\bundergraduate degree\b|\bB\.?Sc\b|本科|学士", re.I),
    ),
    (
        5,
        re.compile(
            r"\bmaster's\b|\bmasters? degree\b|\bmaster of (?:science|arts|business)\b|"
            r"\bM\.?Sc\b|\bMBA\b|硕士",
            re.I,
        ),
    ),
    (6, re.compile(r"\bPh\.? ?D\b|\bdoctora(?:te|l)\b|博士", re.I)),
)
_NOT_HELD = re.compile(
    r"(?:\bno\b|\bnot\b|n't|never|without|hope|dream|wish|want|plan|aspir|some ?day|one day|"
    r"instead of|pursu|toward|your \w+(?:'s)? |没有|未|想|希望|梦想|打算|将来)[^.。]{0,40}$",
    re.I,
)
_SCHOOLS = 2
_WENT = re.compile(
    r"\b(?:graduat|finish|complet|degree|diploma|educat|studi|study|attend|went to|go to)\w*\b"
    r"[^.]{0,40}$",
    re.I,
)
_EDUCATION = ("education", "degree", "schooling", "学历", "教育")
_OCCUPATION = ("occupation", "job", "profession", "work", "职业", "工作")
_WORKS_AS = re.compile(
    r"\byou(?:'re)? (?:now |currently )?(?:work|are employed|are working|earn your living) as "
    r"an? ([a-z][\w' -]{2,40}?)(?=[.,;]| (?:at|in|for|with|who|and|by|from|on|of|near)\b|$)",
    re.I,
)


_ONESELF = re.compile(
    r"(?:\byou(?:'re| are| live| lived| come| came| grew up| were born| belong| hold| have been)\b|"
    r"\byour (?:home|nationality|party|religion|occupation|job)\b|\bas an? |你[是住来])"
    r"(?:(?!\bbut\b|\bwho\b|\bmarried to\b|\bfriends?\b)[^.;。])*$"
)


def contradictions(
    row: Mapping[str, Any], text: str, categories: Mapping[str, list[str]] | None = None
) -> list[Contradiction]:
    """What a text says that its row doesn't.

    Args:
        row: the person's attributes.
        text: the written background.
        categories: the categories that each attribute has in the population: a text that names
            another category of an attribute, and not its own, contradicts its row.
    """
    text = text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    found = [*_age(row, text), *_gender(row, text), *_education(row, text), *_work(row, text)]
    told = {c.attribute for c in found}
    for attribute, names in (categories or {}).items():
        if attribute not in told and attribute in row:
            found.extend(_category(attribute, str(row[attribute]), text, names))
    return found


def flaw(text: str) -> str | None:
    """What makes a text unfit whatever its row is: it goes round in circles, say."""
    if re.search(r"<\w+[ />]|https?://|\]\]|\{\{|[^\W\d_]{30}", text) and not _UNSPACED.search(
        text
    ):
        return "it holds something else than sentences"
    if not re.search(r"[.!?。!?]", text):
        return "it has no whole sentence"
    pieces = shingles(text)
    words = len(text) if _UNSPACED.search(text) else len(text.split())
    if words > _ENOUGH_WORDS and len(pieces) < words * _DISTINCT:
        return "it says the same over and over"
    return None


def number_of(text: str) -> int | None:
    """A number in figures, English words, or Chinese characters, up to 199."""
    text = text.strip().lower()
    if text.isdecimal():
        return int(text)
    if re.fullmatch("[一二三四五六七八九十百]+", text):
        return _chinese(text)
    return _NUMBER_WORDS.get(text.replace(" ", "-"))


def _chinese(text: str) -> int:
    total, digit = 0, 0
    for sign in text:
        if sign == "百":
            total, digit = total + max(1, digit) * 100, 0
        elif sign == "十":
            total, digit = total + max(1, digit) * 10, 0
        else:
            digit = "一二三四五六七八九".index(sign) + 1
    return total + digit


def _age(row: Mapping[str, Any], text: str) -> Iterator[Contradiction]:
    column = next((c for c in ("age", "年龄") if isinstance(row.get(c), (int, float))), None)
    if column is None or not math.isfinite(row[column]):
        return
    age = int(row[column])
    for pattern in _AGES:
        for match in pattern.finditer(text):
            if _OF_OTHERS.search(text[: match.start()].rpartition(".")[2]):
                continue
            said = number_of(match.group(1))
            if said is not None and said != age:
                yield Contradiction(column, str(age), match.group(0).strip())
                return
    for match in _DECADES.finditer(text):
        if _OF_OTHERS.search(text[: match.start()].rpartition(".")[2]):
            continue
        word = match.group(1).lower()
        decade = _DECADE.get(word) or int(word.rstrip("s"))
        if age // 10 * 10 != decade:
            yield Contradiction(column, str(age), match.group(0))
            return


def _gender(row: Mapping[str, Any], text: str) -> Iterator[Contradiction]:
    gender = gender_of(row)
    if gender is None:
        return
    column = next(c for c in ("gender", "sex", "性别") if c in row)
    wrong, wrong_word, right_word = (
        (_MALE, _HE, _SHE) if gender == "female" else (_FEMALE, _SHE, _HE)
    )
    match = wrong.search(text)
    if match is not None:
        yield Contradiction(column, str(row[column]), match.group(0))
        return
    if not _YOU.search(text):  # told in the third person
        count = len(wrong_word.findall(text))
        if count > len(right_word.findall(text)):
            yield Contradiction(column, str(row[column]), wrong_word.findall(text)[0])


def _rank(text: str) -> int | None:
    return max((rank for rank, pattern in _LADDER if pattern.search(text)), default=None)


def _education(row: Mapping[str, Any], text: str) -> Iterator[Contradiction]:
    column = next((c for c in _EDUCATION if isinstance(row.get(c), str)), None)
    own = _rank(row[column]) if column is not None else None
    if column is None or own is None:
        return
    for rank, pattern in _LADDER:
        if rank <= own:
            continue
        for match in pattern.finditer(text):
            before = text[: match.start()].rpartition(".")[2]
            # A school may be where someone works or lives; a degree is only ever held.
            if rank <= _SCHOOLS and not _WENT.search(before) and match.group(0).isascii():
                continue
            if not _NOT_HELD.search(before):
                yield Contradiction(column, row[column], match.group(0))
                return


def _stems(text: str) -> set[str]:
    return {word[:5] for word in re.findall(r"[a-z]{4,}", text.lower())}


def _work(row: Mapping[str, Any], text: str) -> Iterator[Contradiction]:
    column = next((c for c in _OCCUPATION if isinstance(row.get(c), str)), None)
    if column is None:
        return
    for match in _WORKS_AS.finditer(text):
        if not _stems(match.group(1)) & _stems(row[column]):
            yield Contradiction(column, row[column], match.group(0))
            return


def _category(attribute: str, own: str, text: str, names: list[str]) -> Iterator[Contradiction]:
    if attribute in ("gender", "sex", "性别") or (attribute in _EDUCATION and _rank(own)):
        return  # rules of their own
    low = text.lower()
    if own.lower() in low:
        return
    for name in names:
        if len(name) < 2 or name.lower() in own.lower() or own.lower() in name.lower():
            continue
        if name.isascii() and len(name) < 4:
            continue
        edge = r"\b" if name.isascii() else ""
        for match in re.finditer(rf"{edge}{re.escape(name.lower())}{edge}", low):
            # Said of oneself: anyone may travel to China, or know a lawyer.
            if _ONESELF.search(low[: match.start()]):
                yield Contradiction(attribute, own, name)
                return
