"""Writing people: prompts, names, checks against rows, near-duplicates, bounded rewriting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from populace.models.answering import Answerer
from populace.models.backends.scripted import ScriptedBackend
from populace.personas.writing.alike import alike, shingles, similarity
from populace.personas.writing.checks import contradictions, flaw, number_of
from populace.personas.writing.names import Names, gender_of
from populace.personas.writing.template import TemplateError, languages, load_template
from populace.personas.writing.writer import Writer, whole_sentences
from shared.errors import InvalidInputError
from shared.messages.model import ModelRequest, ModelResponse
from shared.messages.scenario import ModelSpec, ScriptSpec

ROW = {
    "age": 34,
    "gender": "female",
    "education": "high school",
    "occupation": "economist",
    "region": "north",
}
CATEGORIES = {"region": ["north", "south", "far south"], "gender": ["female", "male"]}


@pytest.mark.parametrize(
    ("text", "attribute"),
    [
        ("You are a 52-year-old woman who likes maps.", "age"),
        ("You are forty-one, and you live by the sea.", "age"),
        ("Now aged 29, you work in a bank.", "age"),
        ("You are in your late fifties.", "age"),
        ("你今年五十二岁,住在河边。", "age"),
        ("You are a quiet, tall man who works hard.", "gender"),
        ("You are an old father of three.", "gender"),
        ("He wakes up early and his work is hard.", "gender"),
        ("你是一位有经验的男性。", "gender"),
        ("You earned a master\N{RIGHT SINGLE QUOTATION MARK}s degree in law.", "education"),
        ("You hold a PhD.", "education"),
        ("你拿到了博士学位。", "education"),
        ("You work as a plumber in a small town.", "occupation"),
        ("You grew up in the far south and stayed there.", "region"),
    ],
)
def test_contradictions_are_found(text: str, attribute: str) -> None:
    found = contradictions(ROW, text, CATEGORIES)
    assert [c.attribute for c in found] == [attribute], found
    assert str(ROW[attribute]) in str(found[0])


@pytest.mark.parametrize(
    "text",
    [
        "You are a 34-year-old woman.",
        "You are thirty-four, and your 5-year-old son plays outside.",
        "At the age of 12 you moved to the north.",
        "When you were 20 years old you left school.",
        "You never got a bachelor's degree.",
        "You dream of a Ph.D. one day.",
        "You work as an economist at a bank.",
        "You are in your thirties.",
        "You look after an 80-year-old mother.",
        "Your husband is a tall man.",
        "She works hard, and he does too.",
        "You live in the north, and travel to the south.",
        "In your twenties you moved to a town by the sea.",
        "Your father, now in his seventies, lives nearby.",
        "You are the mother of a boy.",
        "You are the wife of a businessman.",
        "You like a 12-year-old whisky.",
        "You often travel to the far south.",
        "You clean floors at the local elementary school.",
        "你高中毕业,想读博士。",
        "你今年三十四岁。",
    ],
)
def test_what_fits_is_left_alone(text: str) -> None:
    assert contradictions(ROW, text, CATEGORIES) == []


def test_numbers_in_words() -> None:
    told = {"7": 7, "thirteen": 13, "thirty four": 34, "ninety-nine": 99, "三十四": 34, "十": 10}
    assert {text: number_of(text) for text in told} == told
    assert number_of("many") is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("You like it. <img src='x'>", "something else"),
        ("and then there", "no whole sentence"),
        ("You go on and on. " * 20, "over and over"),
    ],
)
def test_texts_that_are_none(text: str, what: str) -> None:
    assert what in (flaw(text) or "")


def test_a_half_sentence_goes() -> None:
    assert whole_sentences("You live here. You wor") == "You live here."
    assert whole_sentences("You live here.") == "You live here."
    assert whole_sentences("no end") == "no end"


def test_genders_and_names() -> None:
    assert gender_of({"sex": "F"}) == "female"
    assert gender_of({"gender": "男"}) == "male"
    assert gender_of({"gender": "other"}) is gender_of({}) is None
    names = Names("en_US", 1)
    some = [names.name(i, "female") for i in range(50)]
    assert some == [Names("en_US", 1).name(i, "female") for i in range(50)]
    assert len(set(some)) > 40
    assert some != [Names("en_US", 2).name(i, "female") for i in range(50)]
    assert any("\u4e00" <= sign <= "\u9fff" for sign in Names("zh_CN", 1).name(0, None))
    with pytest.raises(InvalidInputError, match="no names for 'tlh'"):
        Names("tlh", 1)


def test_near_duplicates() -> None:
    words = "the cat sat on the mat and looked at the moon for a very long time until morning came"
    texts = [
        (10, words),
        (11, words.replace("morning", "evening")),
        (12, "You keep bees, and sell the honey at the market on the square each Saturday."),
        (13, words.upper()),
    ]
    found = alike(texts, 0.6)
    assert found == {11: 10, 13: 10}
    assert similarity(texts[0][1], texts[1][1]) >= 0.6
    assert alike(texts, 1.0) == {13: 10}
    assert alike([], 0.5) == {}
    chinese = "你在河边长大,喜欢安静的早晨,也喜欢与人下棋。"
    assert len(shingles(chinese)) > 10
    assert alike([(0, chinese), (1, chinese)], 0.9) == {1: 0}


class Model:
    """Answers with these backgrounds, one after the other; the last one for ever."""

    def __init__(self, *backgrounds: str) -> None:
        self.backgrounds = list(backgrounds)
        self.requests: list[ModelRequest] = []

    async def __call__(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        text = self.backgrounds[min(len(self.requests), len(self.backgrounds)) - 1]
        if text.startswith("!"):
            return ModelResponse(request.number, error_kind=text[1:], error="told to fail")
        data: Any = {"background": text}
        if "contradicts" in json.dumps(request.schema):
            data = json.loads(text)
        return ModelResponse(request.number, data=data, tokens_in=7, tokens_out=5)


GOOD = "You count things for a living. In the evening you walk along the canal and think of prices."


def writer(model: Any, **more: Any) -> Writer:
    return Writer(load_template("en"), model, model=ModelSpec(backend="scripted"), **more)


async def test_a_good_text_is_taken_at_once() -> None:
    model = Model(GOOD)
    written = await writer(model, names=Names("en_US", 3)).write(5, ROW)
    assert written.text is not None
    assert written.text.startswith(f"You are {written.values['name']}. Facts about you: age: 34;")
    assert written.text.endswith(GOOD)
    assert (written.requests, written.rewrites, written.tokens_in) == (1, 0, 7)
    system, user = model.requests[0].messages
    assert "second person" in system["content"]
    assert "age: 34" in user["content"]


async def test_contradictions_are_written_anew_a_bounded_number_of_times() -> None:
    model = Model("You are a 50-year-old woman. You like it here.", "You are a man.", GOOD)
    written = await writer(model).write(5, ROW)
    assert (written.background, written.requests, written.rewrites) == (GOOD, 3, 2)
    assert "50-year-old" in model.requests[1].messages[1]["content"]
    stubborn = Model("You are a 50-year-old woman. You like it here.")
    written = await writer(stubborn, attempts=3).write(5, ROW)
    assert written.text is None
    assert len(stubborn.requests) == written.requests == 3
    assert "age is 34" in written.problem
    assert len({r.draw for r in stubborn.requests}) == 3


async def test_model_failures_are_shown_as_failures() -> None:
    written = await writer(Model("!unreachable")).write(5, ROW)
    assert (written.text, written.requests) == (None, 1)
    assert written.problem == "unreachable: told to fail"
    written = await writer(Model("!schema", GOOD)).write(5, ROW)
    assert (written.background, written.requests) == (GOOD, 2)


async def test_a_judge() -> None:
    model = Model(
        GOOD,
        '{"contradicts": true, "what": "economists don\'t count"}',
        GOOD,
        '{"contradicts": false, "what": ""}',
    )
    written = await writer(model, judge=True).write(5, ROW)
    assert (written.background, written.requests, written.rewrites) == (GOOD, 4, 1)
    assert "economists don't count" in model.requests[2].messages[1]["content"]


async def test_temperature_and_angle_vary_by_row_and_follow_from_the_seed() -> None:
    model = Model(GOOD)
    one = writer(model, temperature=(0.5, 1.0), seed=4)
    for row in range(40):
        await one.write(row, ROW)
    temperatures = [r.temperature for r in model.requests]
    assert len(set(temperatures)) > 30
    assert all(0.5 <= t <= 1.0 for t in temperatures)
    prompts = {r.messages[1]["content"] for r in model.requests}
    assert len(prompts) > 6
    again = Model(GOOD)
    two = writer(again, temperature=(0.5, 1.0), seed=4)
    for row in reversed(range(40)):
        await two.write(row, ROW)
    assert [r.temperature for r in reversed(again.requests)] == temperatures


async def test_the_scripted_model_writes_texts_that_differ() -> None:
    backend = ScriptedBackend(
        ModelSpec(backend="scripted", script=ScriptSpec(text="{words}. {words}."))
    )
    one = writer(Answerer(backend).answer)
    texts = [(i, (await one.write(i, ROW)).background) for i in range(100)]
    assert alike(texts, 0.5) == {}
    assert all(len(text) >= 40 for _, text in texts)


@pytest.mark.parametrize("language", languages())
def test_shipped_templates(language: str) -> None:
    template = load_template(language)
    assert len(template.angles) > 5
    told = template.fill("draft", facts=template.told(ROW), angle=template.angles[0])
    assert "age: 34" in told
    assert "$" not in told


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"draft": "Write of $fact."}, r"mine.yaml:\d+: draft: knows no \$fact"),
        ({"draft": "It costs $ 5."}, r"mine.yaml:\d+: draft: has a '\$' that begins no"),
        ({"drafts": "x"}, r"mine.yaml:\d+: drafts: is not a key"),
        ({"system": None}, r"mine.yaml:\d+: system: "),
    ],
)
def test_wrong_templates(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    raw = load_template("en").model_dump()
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(raw | change, allow_unicode=True))
    with pytest.raises(TemplateError, match=complaint):
        load_template(str(path))
    with pytest.raises(TemplateError, match="no template 'la'"):
        load_template("la")
