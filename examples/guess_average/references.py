"""What is known of the game: published figures and theory, for the report to draw beside ours."""

from __future__ import annotations

from rules import Params

from populace.report import Level, Reference, ReportSpec, Share, Variable

_PAPER = "Pan et al. 2024, arXiv 2407.17789"
_NAGEL = "Nagel 1995, American Economic Review 85 (laboratory)"
_NEWSPAPERS = "Bosch-Domènech et al. 2002, American Economic Review 92 (readers of newspapers)"
_LEVELS = 4


def _mean(label: str, value: float, kind: str, source: str, round_number: int) -> Reference:
    return Reference(label=label, value=value, kind=kind, source=source, round=round_number)


def _people(ratio: str) -> list[Reference]:
    if ratio == "2/3":
        return [
            _mean("people in a laboratory", 36.7, "human", _NAGEL, 1),
            _mean("readers of newspapers", 23.0, "human", _NEWSPAPERS, 1),
        ]
    if ratio == "1/2":
        return [_mean("people in a laboratory", 27.1, "human", _NAGEL, 1)]
    return []


def _paper(params: Params) -> list[Reference]:
    """Figures of the paper for set-ups like this one; its models were far larger."""
    plain = Params(
        target=params.target, style=params.style, notes=params.notes, variation=params.variation
    )
    if params != plain or params.target.offset:
        return []  # the paper's figures are of players without personas, for themselves
    found = []
    by_notes = {
        ("at_once", "none"): (35.30, 25.16),
        ("step_by_step", "none"): (6.11, 2.02),
        ("step_by_step", "rational"): (1.55, 0.14),
        ("step_by_step", "adaptive"): (1.69, 0.15),
    }
    if params.target.ratio == "2/3":
        if params.style == "at_once" and params.notes == "none":
            found += [
                _mean("Mistral 8x7B", 36.63, "paper", _PAPER, 1),
                _mean("Mistral 8x22B", 31.69, "paper", _PAPER, 1),
            ]
        if params.style == "step_by_step" and params.notes == "none":
            found.append(_mean("Qwen2-72B", 25.16, "paper", _PAPER, 1))
        later = by_notes.get((params.style, params.notes))
        if later is not None:
            found += [
                _mean("Qwen2-72B", value, "paper", _PAPER, number)
                for number, value in zip((3, 5), later, strict=True)
            ]
    winning = {("51/100", False): 11.85, ("51/100", True): 6.46, ("1/2", False): 6.21}
    value = winning.get((params.target.ratio, params.variation))
    if value is not None and params.style == "step_by_step":
        found.append(
            Reference(
                label="winning number, Qwen2-72B",
                value=value,
                kind="paper",
                source=_PAPER,
                round=1,
                of="mark",
            )
        )
    return found


def report(params: Params, rounds: int, groups: int | None, personas: str | None) -> ReportSpec:
    """What a report shows of a game."""
    low, high = params.range
    middle = (low + high) / 2
    steps = params.target.steps(middle, _LEVELS)
    theory = []
    if params.target.equilibrium is not None:
        theory.append(
            Reference(
                label="equilibrium",
                value=min(high, max(low, params.target.equilibrium)),
                kind="theory",
                source="the only number that is its own target, or the end of the range",
            )
        )
    usual = (low, high) == (0.0, 100.0)
    known = _people(params.target.ratio) if usual else []
    if usual and not groups and not personas:
        known += _paper(params)
    if params.target.offset:
        known = []
    # Nobody can win above what would win if all picked the largest number.
    top = params.target.of(high)
    number = Variable(
        name="number",
        label="number picked",
        low=low,
        high=high,
        mark="winning",
        mark_label="winning number",
        shares=[
            Share(label=f"{low:g}", low=low, high=low),
            Share(label=f"{middle:g}", low=middle, high=middle),
            *([Share(label=f"above {top:.1f}", low=top + 1e-9, high=high)] if top < high else []),
        ],
        levels=[
            Level(label=f"level {k}", value=min(high, max(low, step)))
            for k, step in enumerate(steps)
        ],
        # Half of the smallest step, so that no answer belongs to two; at most 4 as with Nagel's 50.
        level_width=min(0.04 * (high - low), abs(steps[-2] - steps[-1]) / 2),
        references=[*known, *theory],
    )
    game = "groups" if groups else "players"
    rules = {
        "llm": "",
        "level_k": f" All are of level {params.players.level}; no model is asked.",
        "cognitive_hierarchy": f" Levels are Poisson ({params.players.tau:g}); no model is asked.",
        "best_response": " All answer the round before best; no model is asked.",
    }
    return ReportSpec(
        about=(
            f"Guess {params.target.ratio} of the average"
            + (f", plus {params.target.offset:g}" if params.target.offset else "")
            + f": the {game} nearest to the target win. {rounds} rounds."
            + rules[params.players.kind]
        ),
        variables=[number],
        lines=["mean", "winning"],
        series=["winners"],
    )
