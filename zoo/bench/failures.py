"""What becomes of a measurement that has no figures, and how far from exact a result may be."""

import torch

from zoo.results import Row

__all__ = ["LARGEST_ERROR", "Skipped", "failure", "fault"]

LARGEST_ERROR = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""Of the relative errors, by dtype."""


class Skipped(Exception):
    """Something is not measured; the message says why."""


def failure(error: Exception) -> Row:
    """The reason as "skipped" if a call cannot be served, as a kernel says by "impl: ...", or as an "error"."""
    reason = str(error).partition("\n")[0]
    unfit = isinstance(error, Skipped) or (isinstance(error, ValueError) and reason.startswith("impl:"))
    return {"skipped": reason} if unfit else {"error": f"{type(error).__name__}: {reason}"}


def fault(row: Row) -> str | None:
    """Why a row has no figures, or that they are of wrong results, in a line; None where all is well."""
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    if "error" in row:
        return row["error"]
    if not row["correct"]:
        return f"wrong: relative errors {', '.join(f'{name} {error}' for name, error in row['errors'].items())}"
    return None
