"""A fit report as one self-contained HTML page with plots (extra ``report``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from populace.personas.fit import Fit, Margin
from populace.report.drawing import STYLE, plain, svg, tidy
from shared.errors import InvalidInputError

_MOST_BARS = 40
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ fit.population }}: asked and obtained</title>
<style>{{ style | safe }}</style>
<h1>{{ fit.population }}</h1>
<p>{{ "{:,}".format(fit.rows) }} people; largest total variation distance of a margin
{{ "%.4f" | format(fit.worst) }};
{{ "{:,}".format(fit.duplicates) }} rows equal to an earlier one.</p>
{% for margin, plot in margins %}
<h2>{{ margin.name }}</h2>
<p class="note">{{ "{:,}".format(margin.count) }} people; total variation
{{ "%.4f" | format(margin.variation) }};
{% if margin.exact %}met exactly
{% elif margin.p_value is none %}no rows
{% elif margin.chi_square is none %}holds what was not asked for
{% else %}chi-square {{ "%.2f" | format(margin.chi_square) }},
p = {{ "%.3f" | format(margin.p_value) }}{% endif %}</p>
{% if plot %}<figure>{{ plot | safe }}</figure>{% endif %}
<table><tr><th>category<th>asked<th>obtained</tr>
{% for name, share in margin.obtained.items() %}
<tr><td>{{ name }}<td>{{ "%.2f" | format(100 * margin.asked.get(name, 0)) }} %
<td>{{ "%.2f" | format(100 * share) }} %</tr>
{% endfor %}</table>
{% endfor %}
{% for numbers, plot in numbers %}
<h2>{{ numbers.name }}</h2>
<p class="note">mean {{ "%g" | format(numbers.mean) }}, standard deviation
{{ "%g" | format(numbers.deviation) }};
{% for point, value in numbers.quantiles.items() %}{{ point }}: {{ "%g" | format(value) }}
{% endfor %}</p>
<figure>{{ plot | safe }}</figure>
{% endfor %}
{% if fit.rejected %}<h2>Drawn again</h2><table><tr><th>constraint<th>draws</tr>
{% for text, count in fit.rejected.items() %}<tr><td>{{ text }}<td>{{ "{:,}".format(count) }}</tr>
{% endfor %}</table>{% endif %}
{% if fit.absent %}<h2>Never together, though both are frequent</h2>
<ul>{% for pair in fit.absent %}<li>{{ pair }}{% endfor %}</ul>{% endif %}
</html>
"""


def fit_page(fit: Fit, table: pa.Table) -> str:
    """The page's text.

    Args:
        fit: the report.
        table: the rows that it is about, for the histograms.

    Raises:
        InvalidInputError: the extra isn't installed.
    """
    try:
        from jinja2 import Environment
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInputError(
            f"pages need matplotlib and jinja2 ({error}): pip install 'populace[report]'"
        ) from None
    page = Environment(autoescape=True, trim_blocks=True).from_string(_PAGE)
    return page.render(
        fit=fit,
        style=STYLE,
        margins=[(margin, _bars(Figure, margin)) for margin in fit.margins],
        numbers=[(n, _histogram(Figure, n.name, table[n.name])) for n in fit.numbers],
    )


def _bars(figure_class: Any, margin: Margin) -> str:
    names = list(margin.obtained)
    if len(names) > _MOST_BARS:
        return ""
    figure = figure_class(figsize=(8, 0.6 + 0.36 * len(names)), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(names))
    axes.barh(places - 0.2, [100 * margin.asked.get(n, 0) for n in names], 0.38, label="asked")
    axes.barh(places + 0.2, [100 * margin.obtained[n] for n in names], 0.38, label="obtained")
    axes.set_yticks(places, [plain(n) for n in names])
    axes.invert_yaxis()
    axes.set_xlabel("per cent")
    axes.legend(loc="lower right", frameon=False)
    tidy(axes)
    return svg(figure)


def _histogram(figure_class: Any, name: str, column: Any) -> str:
    values = np.asarray(column.to_numpy(zero_copy_only=False), dtype=float)
    figure = figure_class(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    whole = np.all(values == np.round(values)) and np.ptp(values) <= 120
    edges = np.arange(values.min() - 0.5, values.max() + 1.5) if whole else 40
    axes.hist(values, bins=edges)
    axes.set_xlabel(name.replace("_", " "))
    axes.set_ylabel("people")
    tidy(axes)
    return svg(figure)
