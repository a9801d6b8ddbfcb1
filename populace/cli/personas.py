"""``populace personas``: populations from distributions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from populace.cli import show
from populace.cli.session import Json, print_json
from populace.cli.writing import write
from populace.personas.people import read_rows
from shared.errors import InvalidInputError
from shared.ids import check_token
from shared.settings import load_settings

app = typer.Typer(
    help="Draw populations from distributions, and see how well they fit.",
    no_args_is_help=True,
    add_completion=False,
)

app.command("write")(write)

Source = Annotated[
    str, typer.Argument(metavar="FILE", help="A population file, or the name of a template.")
]
Size = Annotated[int | None, typer.Option("--size", min=1, help="Number of people.")]
Html = Annotated[
    Path | None, typer.Option("--html", help="Also write the report as a page with plots.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="What all draws follow from.")]


def _sampler(source: str, size: int | None, seed: int | None) -> Any:
    try:
        from populace.personas.sampling import Sampler
        from populace.personas.spec import TEMPLATES, PopulationFile
    except ImportError as error:
        raise InvalidInputError(
            f"populations need numpy and scipy ({error}): pip install 'populace[personas]'"
        ) from None
    path = Path(source)
    template = TEMPLATES / f"{source.removeprefix('template:')}.yaml"
    if not path.exists() and template.parent == TEMPLATES and template.exists():
        path = template
    overrides = {k: v for k, v in (("size", size), ("seed", seed)) if v is not None}
    return Sampler(PopulationFile(path, overrides))


@app.command()
def sample(
    source: Source,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to write: .parquet, .csv or .jsonl.")
    ] = None,
    size: Size = None,
    seed: Seed = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Draw a population, store it under its name, and report how well it fits."""
    from populace.personas.fit import fit_report
    from populace.personas.sampling import refuse_to_replace_texts, save

    sampler = _sampler(source, size, seed)
    table = sampler.rows()
    path = out or load_settings().personas_dir / f"{sampler.spec.name}.parquet"
    if out is None:
        refuse_to_replace_texts(path)
    save(table, path)
    report = fit_report(sampler, table)
    if html is not None:
        _write_page(html, report, table)
    if as_json:
        print_json({"file": str(path), **report.model_dump()})
        return
    show_fit(report)
    show.out.print(f"{table.num_rows:,} people in {path}", markup=False)


@app.command()
def fit(
    source: Source,
    people: Annotated[
        Path, typer.Argument(metavar="PEOPLE", help="Rows: .parquet, .csv or .jsonl.")
    ],
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Compare people, from wherever, with what a population file asks for."""
    from populace.personas.fit import fit_report

    sampler = _sampler(source, None, None)
    table = read_rows(people)
    report = fit_report(sampler, table)
    if html is not None:
        _write_page(html, report, table)
    if as_json:
        print_json(report.model_dump())
    else:
        show_fit(report)


@app.command("show")
def show_(
    people: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A stored population, or a file.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="How many to show.")] = 10,
    as_json: Json = False,
) -> None:
    """Show people of a stored population; without a name, which there are."""
    folder = load_settings().personas_dir
    if people is None:
        _list_stored(folder, as_json)
        return
    path = Path(people)
    if not path.exists():
        path = folder / f"{people}.parquet"
    table = read_rows(path)
    some = table.slice(0, rows).to_pylist()
    if as_json:
        print_json({"file": str(path), "rows": table.num_rows, "people": some})
        return
    shown = Table(title=f"{path} ({table.num_rows:,} people)", box=box.SIMPLE_HEAD)
    for name in table.column_names:
        shown.add_column(name)
    for row in some:
        shown.add_row(*(show.number(value) for value in row.values()))
    show.out.print(shown)


@app.command("import")
def import_(
    people: Annotated[
        Path, typer.Argument(metavar="PEOPLE", help="Ready people: .parquet, .csv or .jsonl.")
    ],
    name: Annotated[str, typer.Option("--name", help="Under which they are stored.")],
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--map", metavar="THEIRS=OURS", help="Rename a column, such as biography=text."
        ),
    ] = None,
) -> None:
    """Store people from elsewhere under a name, for scenarios to use."""
    from populace.personas.store import store_people

    mapping = {}
    for pair in columns or []:
        theirs, equals, ours = pair.partition("=")
        if not equals or not theirs or not ours:
            raise InvalidInputError(f"--map {pair!r}: write it as THEIRS=OURS")
        mapping[theirs] = ours
    path = store_people(name, read_rows(people), columns=mapping)
    show.out.print(f"{read_rows(path).num_rows:,} people in {path}", markup=False)


@app.command()
def export(
    people: Annotated[str, typer.Argument(metavar="NAME", help="A stored population.")],
    out: Annotated[Path, typer.Argument(metavar="FILE", help=".parquet, .csv or .jsonl.")],
) -> None:
    """Write a stored population's rows, texts included, to a file."""
    from populace.personas.sampling import save

    check_token(people, "the name")
    table = read_rows(load_settings().personas_dir / f"{people}.parquet")
    save(table, out)
    show.out.print(f"{table.num_rows:,} people in {out}", markup=False)


def _write_page(path: Path, report: Any, table: Any) -> None:
    from populace.personas.fit_page import fit_page

    try:
        path.write_text(fit_page(report, table), encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"{path} can't be written: {error}") from None
    show.err.print(f"report in {path}", markup=False)


def _list_stored(folder: Path, as_json: bool) -> None:
    from populace.personas.spec import TEMPLATES

    stored = sorted(path.stem for path in folder.glob("*.parquet"))
    templates = sorted(path.stem for path in TEMPLATES.glob("*.yaml"))
    if as_json:
        print_json({"stored": stored, "templates": templates})
        return
    show.out.print(f"stored in {folder}: {', '.join(stored) or 'none'}", markup=False)
    show.out.print(f"templates: {', '.join(templates)}", markup=False)


def show_fit(report: Any) -> None:
    """A fit report, for a person."""
    table = Table(title=f"{report.population}: asked and obtained", box=box.SIMPLE_HEAD)
    for heading in ("distribution", "rows", "category", "asked", "obtained", "p"):
        numeric = heading not in ("distribution", "category")
        table.add_column(heading, justify="right" if numeric else "left")
    for margin in report.margins:
        p = "exact" if margin.exact else "-" if margin.p_value is None else f"{margin.p_value:.3f}"
        first = (show.number(margin.name), f"{margin.count:,}")
        for i, name in enumerate(margin.obtained):
            table.add_row(
                *(first if i == 0 else ("", "")),
                show.number(name),
                f"{margin.asked.get(name, 0):.2%}",
                f"{margin.obtained[name]:.2%}",
                p if i == 0 else "",
            )
    if report.margins:
        show.out.print(table)
    for numbers in report.numbers:
        quantiles = ", ".join(f"{k} {v:g}" for k, v in numbers.quantiles.items())
        show.out.print(
            f"{numbers.name}: mean {numbers.mean:g}, deviation {numbers.deviation:g} ({quantiles})",
            markup=False,
        )
    for text, count in report.rejected.items():
        show.out.print(f"drawn again {count:,} times, for: {text}", markup=False)
    if report.absent:
        listed = "; ".join(report.absent[:5])
        more = f" and {len(report.absent) - 5} more" if len(report.absent) > 5 else ""
        show.out.print(f"never together, though frequent: {listed}{more}", markup=False)
    show.out.print(f"equal rows: {report.duplicates:,}", markup=False)
