"""Reports: what a scenario says that one should show, statistics, figures, the page."""

from populace.report.spec import Level, Reference, ReportSpec, Share, Variable

__all__ = ["Level", "Reference", "ReportSpec", "Share", "Variable"]
