"""What players are told."""

from __future__ import annotations

from collections.abc import Mapping

STYLES = {
    "at_once": "Reply with the number alone.",
    "step_by_step": (
        "First think it over in a few short steps. Then end with one sentence that states the "
        "number."
    ),
}
_RATIONAL = "All players think strategically and want to win."
NOTES = {
    "none": "",
    "rational": _RATIONAL,
    "adaptive": f"{_RATIONAL} All of them adapt to what the others are likely to do.",
}
_VARIATION = (
    "This is a variation of a well-known game: read its rules closely, since what is known of the "
    "usual game may not hold for this one."
)
_EXPERT = {
    True: "You are the only expert in game theory among the players; all others are laymen.",
    False: "You are a layman; exactly one of the players is an expert in game theory.",
}


def rules(
    *,
    players: int,
    low: float,
    high: float,
    formula: str,
    groups: int | None = None,
    variation: bool = False,
    notes: str = "none",
    made_up: str = "",
) -> str:
    """The rules of the game: the same for everyone in every round, so they go first."""
    parts = [
        f"You are one of {players} players of a number game. Each player secretly picks a number "
        f"from {low:g} to {high:g}; decimals are allowed."
    ]
    if groups is None:
        parts.append(
            f"The target is {formula}. The player whose number is nearest to the target wins."
        )
    else:
        parts.append(
            f"The players form {groups} groups. A group's number is the average of its members' "
            f"numbers. The target is {formula}. The group whose number is nearest to it wins."
        )
    parts += [_VARIATION if variation else "", made_up, NOTES[notes]]
    return " ".join(part for part in parts if part)


def question(style: str) -> str:
    """What is asked in each round."""
    return f"Pick your number now. {STYLES[style]}"


def role(expert: bool | None) -> str:
    """What a player is told of its own knowledge, where just one is an expert."""
    return "" if expert is None else _EXPERT[expert]


def formula(offset: float, ratio: str, *, groups: bool = False) -> str:
    """The target in words."""
    part = f"{ratio} of the average of all {'group' if groups else 'picked'} numbers"
    return part if not offset else f"{offset:g} plus {part}"


def made_up(column: str, counts: Mapping[str, int]) -> str:
    """What players are told of who they are, by an attribute of their personas."""
    told = ", ".join(f"{value}: {count}" for value, count in sorted(counts.items()))
    return f"The players by {column.replace('_', ' ')}: {told}."


def news(round_number: int, mean: float, winning: float) -> str:
    """What is announced after a round."""
    return (
        f"Round {round_number} is over: the average was {mean:.2f} and the winning number was "
        f"{winning:.2f}. The same players play once more."
    )


def group_news(round_number: int, own: int, means: list[float | None], winning: float) -> str:
    """What is announced to the players of a group after a round: every group's number."""
    told = ", ".join(
        f"group {i + 1}{' (yours)' if i == own else ''} "
        + ("gave no number" if mean is None else f"{mean:.2f}")
        for i, mean in enumerate(means)
    )
    return (
        f"Round {round_number} is over. The groups' numbers were: {told}. The winning number was "
        f"{winning:.2f}. The same players play once more."
    )


def extraction(text: str) -> str:
    """Asks a model to find the number that a text settles on."""
    return (
        "A player of a number game wrote the text between the lines. Which number does the player "
        f"pick? If the text names none, the number is null.\n---\n{text}\n---"
    )
