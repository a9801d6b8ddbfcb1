"""What players are told."""

from __future__ import annotations

STYLES = {
    "at_once": "Reply with the number alone.",
    "step_by_step": (
        "First think it over in a few short steps. Then end with one sentence that states the "
        "number."
    ),
}


def rules(*, players: int, low: float, high: float, formula: str) -> str:
    """The rules of the game: the same for everyone in every round, so they go first."""
    return (
        f"You are one of {players} players of a number game. Each player secretly picks a number "
        f"from {low:g} to {high:g}; decimals are allowed. The target is {formula}. The player "
        "whose number is nearest to the target wins."
    )


def question(style: str) -> str:
    """What is asked in each round."""
    return f"Pick your number now. {STYLES[style]}"


def formula(offset: float, ratio: str) -> str:
    """The target in words."""
    part = f"{ratio} of the average of all picked numbers"
    return part if not offset else f"{offset:g} plus {part}"


def news(round_number: int, mean: float, winning: float) -> str:
    """What is announced after a round."""
    return (
        f"Round {round_number} is over: the average was {mean:.2f} and the winning number was "
        f"{winning:.2f}. The same players play once more."
    )


def group_news(round_number: int, own: int, means: list[float | None], winning: float) -> str:
    """What is announced to the players of a group after a round: every group's mean."""
    told = ", ".join(
        f"group {i + 1}{' (yours)' if i == own else ''} "
        + ("gave no number" if mean is None else f"{mean:.2f}")
        for i, mean in enumerate(means)
    )
    return (
        f"Round {round_number} is over. The averages were: {told}. The winning number was "
        f"{winning:.2f}. The same players play once more."
    )


def extraction(text: str) -> str:
    """Asks a model to find the number that a text settles on."""
    return (
        "A player of a number game wrote the text between the lines. Which number does the player "
        f"pick? If the text names none, the number is null.\n---\n{text}\n---"
    )
