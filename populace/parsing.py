"""Finding the number that a free answer settles on, as a person reading it would.

For models too small, or endpoints too plain, for answers by schema. A number counts if it is the
whole answer, or if the answer says that it is the pick ("I choose 12", "the answer is 5", "my
number: 40"). Parts of fractions, percentages, ordinals, times, ranges and sums do not: "2/3 of the
average" is no answer of 2 or 3. Where several picks differ, and none is named as the last word,
nothing is found: better no answer than a guess.
"""

from __future__ import annotations

import re

_NUMBER = (
    r"(?<![\w.,/:%-])(-?\d+(?:\.\d+)?)(?:\.{3}|…)?"
    r"(?![\w%/:]|[.,]\d| ?(?:%|percent|per cent)|-\w)"
    # ranges, sums, lists, and halves: 5 to 6, 20 and 30, 50 * 2, 2, 3, 33 and a half
    r"(?!\s*(?:to|and|or|through|[-\u2013*\u00d7\u00b7+=\u00f7^])\s*\d)"
    r"(?!,\s*\d[\d.]*\s+of\b)"
    r"(?!\s+and\s+(?:a|one)[\s-]+(?:half|third|quarter))"
    r"(?!\s+as\s+(?:in\s+\d|an?\s+(?:upper|lower)))"
    r"(?!\s+(?:and|but)\s+(?:you\s+)?(?:lost|won|lose|win)\b)"
)
"""A number that is no part of anything else."""
_ENDS = (
    r"(?=\s*(?:[.,;:!?()\"'*`<\\]|$|\n|points?\b|"
    r"\s(?:and|but|as|at|so|in|on|to|for|from|because|since|which|now|then)\b))"
)
_WHOLE = re.compile(
    r"^[\s\"'`*_$(\[]*(?:(?:number|answer|pick|guess|choice)\s*[:=#]?\s*)?"
    rf"{_NUMBER}[\s\"'`*_$)\].!]*$",
    re.IGNORECASE,
)
_NAMED = r"(?:number|pick|answer|guess|choice|selection)"
_IS = r"(?:is|was|would be|will be|=|:)"
_PICKS = (
    # {"number": 12} / \\boxed{12} / <answer>12</answer> / 12 is my final answer
    re.compile(
        rf"[{{,]\s*[\"']{_NAMED}[\"']\s*:\s*[\"']?{_NUMBER}[\"']?\s*(?=[,}}])", re.IGNORECASE
    ),
    re.compile(rf"\\boxed\{{\s*{_NUMBER}\s*\}}"),
    re.compile(rf"<{_NAMED}>\s*{_NUMBER}\s*(?=</)", re.IGNORECASE),
    re.compile(rf"{_NUMBER}\s+is\s+my\s+(?:final\s+|last\s+)?{_NAMED}\b", re.IGNORECASE),
    # my number is 12 / the number that I picked is 12 / your pick: 12 / the answer is 12
    re.compile(
        rf"\b(?:my|the|your|player's)\s+(?:[a-z']+\s+){{0,2}}?{_NAMED}"
        r"(?:\s+(?:that\s+)?(?:i|you)(?:'[a-z]+)?(?:\s+[\w']+){1,8}?|\s+to(?:\s+[a-z']+){1,4}?)?"
        rf"(?:\s+(?:now|today))?\s*{_IS}\s*(?:a:|now\s+|actually\s+|of\s+)?\s*\**{_NUMBER}{_ENDS}",
        re.IGNORECASE,
    ),
    re.compile(
        rf"(?:^|[.:!?\n]\s*)(?:final\s+)?{_NAMED}(?:\s+[a-z]+)?\s*[:=]\s*\**{_NUMBER}{_ENDS}",
        re.IGNORECASE,
    ),
    re.compile(
        rf"\bpick (?:your|a|the) number(?: now)?\s*[,:]\s*\**{_NUMBER}{_ENDS}", re.IGNORECASE
    ),
    # I choose 12 / I'll go with 12 / I have picked the number 12 / you chose 12
    re.compile(
        r"\b(?:i|you)(?:'ll|'d|'ve|\s+will|\s+would|\s+have|\s+had|\s+am going to|'m going to)?"
        r"(?:\s+(?:like to|love to|just|now|then|only))*\s+"
        r"(?:pick(?:ed)?|choos(?:e|en)|chose|chosen|select(?:ed)?|guess(?:ed)?|"
        r"go(?:ing)? (?:with|for)|say|said|settle(?:d)? on|take|using|think(?:ing)? of|got it)\s+"
        r"(?:you pick\s+|-\s+)?"
        r"(?:a (?:random )?number[:,]?\s+|the number\s+|number\s+|my number is\s+|a perfect\s+)?"
        rf"\**{_NUMBER}{_ENDS}",
        re.IGNORECASE,
    ),
    re.compile(
        r"\b(?:i'm|i am) (?:using|thinking of|picking|choosing) (?:(?:a |the )?number,? )?"
        rf"{_NUMBER}{_ENDS}",
        re.IGNORECASE,
    ),
    re.compile(
        r"\b(?:let me (?:pick|choose|say|take)|i(?:'ve| have)? decided on)\s+"
        rf"(?:the number\s+)?{_NUMBER}{_ENDS}",
        re.IGNORECASE,
    ),
    re.compile(
        rf"\b(?:i think|so|so here it is:?)[,:]?\s+(?:it is|it's|it:)?\s*{_NUMBER}(?=\s*[.!]?\s*$)",
        re.IGNORECASE,
    ),
)
_SHORT = (
    re.compile(
        rf"\b(?:this is )?the(?:\s+number)?:?\s+\**{_NUMBER}(?=\s*[.!]?\s*$)", re.IGNORECASE
    ),
    re.compile(rf"\b(?:it's|it is|is:|there is one:)\s+{_NUMBER}{_ENDS}", re.IGNORECASE),
    re.compile(rf"^\W*choose {_NUMBER}{_ENDS}", re.IGNORECASE),
)
"""Of answers of a few words, where nothing else can be meant."""
_LONGEST_ITEM = 4
_FEW_WORDS = 14
_MANY_WORDS = 45
_AT_ITS_END = 0.8
_LEADING = re.compile(rf"^\W*{_NUMBER}\s+(?!is not\b|isn't\b)(?=\(|[^\n]*\b\1\b)")
"""A number first, and then words about it."""
_LAST_WORD = re.compile(
    r"\b(?:so|final(?:ly)?|therefore|thus|in the end|answer)\b[^.]*$", re.IGNORECASE
)
_SUPPOSED = re.compile(
    r"\bwhen(?:ever)?\b[^.,]*$|"
    r"\b(?:if|example|suppose|imagine|for instance|cannot|can't|don't|not|isn't|avoid|"
    r"last (?:round|time)|previous(?:ly)?|earlier)\b[^.]*$",
    re.IGNORECASE,
)
_OF_OTHERS = re.compile(
    r"\b(?:winning|average|mean|median|target|other|last|previous|highest|lowest|your\b.*\bwas)\b",
    re.IGNORECASE,
)
"""A number that is told, and not picked: the winning number was 14."""
_FORMULA = re.compile(
    r"(?<![\w.])\d{1,9}(?:\.\d{1,9})?(?:/\d{1,9})?"
    r"(?:\s{0,2}[*\u00d7\u00b7+\u00f7]\s{0,2}\(?\d{1,9}(?:\.\d{1,9})?(?:/\d{1,9})?\)?){1,6}"
    r"\s{0,2}[=\u2248]\s{0,2}(-?\d{1,9}(?:\.\d{1,9})?)"
)
"""A sum that is worked out: 50 * 2/3 = 33.3. Its parts are bounded, so that none takes long."""
_DRESSED = re.compile(r"[$\"](-?\d+(?:\.\d+)?)[$\"]")
"""A number in signs of its own: $22$, "22"."""
_REPEATED = re.compile(r"^\W*(-?\d+(?:\.\d+)?)(?:[\s,.]+\1)*\W*$")


def find_number(text: str, low: float, high: float) -> float | None:
    """The number that an answer settles on.

    Args:
        text: the answer.
        low: the least number that may be picked.
        high: the greatest.

    Returns:
        The number, if it lies within; None if the answer settles on none, or on one outside.
    """
    stripped = text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").replace("**", "").strip()
    stripped = _DRESSED.sub(r"\1", _FORMULA.sub(r"\1", stripped))
    for pattern in (_WHOLE, _REPEATED):
        match = pattern.match(stripped)
        if match is not None:
            return _within(match.group(1), low, high)
    words = len(stripped.split())
    found: list[tuple[int, str]] = []
    for pattern in (*_PICKS, *(_SHORT if words <= _FEW_WORDS else ())):
        for match in pattern.finditer(stripped):
            sentence = re.split(r"[.!?]\s", stripped[: match.start()])[-1]
            told = _OF_OTHERS.search(match.group(0)) is not None
            if not told and not _SUPPOSED.search(sentence) and not _is_item(stripped, match):
                found.append((match.start(1), match.group(1)))
    leading = _LEADING.match(stripped)
    if leading is not None and words <= _MANY_WORDS:
        found.append((leading.start(1), leading.group(1)))
    if not found:
        return None
    found.sort()
    values = {float(value) for _, value in found}
    place, last = found[-1]
    concluded = _LAST_WORD.search(re.split(r"[.!?]\s", stripped[:place])[-1])
    if len(values) > 1 and not concluded:
        return None
    if words > _MANY_WORDS and place < _AT_ITS_END * len(stripped):
        return None  # said on the way, and not at the end
    return _within(last, low, high)


def _is_item(text: str, match: re.Match[str]) -> bool:
    """Whether the number begins an item of a list: "1. First, ... 2. Then, ..."."""
    after, number = text[match.end(1) :], match.group(1)
    if not number.isdigit() or len(number) > _LONGEST_ITEM:
        return False
    following = str(int(number) + 1)
    return re.match(r"[.)]\s", after) is not None and (
        re.search(rf"\s{following}{re.escape(after[0])}", after) is not None
    )


def _within(value: str, low: float, high: float) -> float | None:
    number = float(value)
    return number if low <= number <= high else None
