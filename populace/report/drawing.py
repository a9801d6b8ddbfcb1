"""What figures of pages share (extra ``report``)."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = """
 :root { color-scheme: light dark; }
 body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem;
        margin: 2rem auto; padding: 0 1rem; }
 table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
 th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8884; }
 th:first-child, td:first-child { text-align: left; }
 figure { margin: .5rem 0; background: #fff; color: #222; padding: .5rem; border-radius: .4rem;
          overflow-x: auto; }
 svg { max-width: 100%; height: auto; }
 .note { color: #777; }
"""
"""Of pages with figures: light and dark, figures on white."""


def svg(figure: Figure) -> str:
    """A figure as an element for a page; its letters are shapes, so nothing in it is markup."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.hashsalt": "populace"}):  # else names of parts differ each time
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def plain(text: str) -> str:
    """A text whose dollar signs begin no formula."""
    return text.replace("$", r"\$")


def tidy(axes: Axes) -> None:
    """Leave out what says nothing."""
    axes.spines[["top", "right"]].set_visible(False)
