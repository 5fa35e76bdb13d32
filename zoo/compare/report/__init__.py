"""Results of a comparison for people: in the terminal, as Markdown, CSV and pictures, and as one page."""

from zoo.compare.report.figures import plots
from zoo.compare.report.folder import write
from zoo.compare.report.rows import outcome, title
from zoo.compare.report.tables import csv, markdown, table
from zoo.compare.report.webpage import page

__all__ = ["csv", "markdown", "outcome", "page", "plots", "table", "title", "write"]
