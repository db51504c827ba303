"""Markdown tables."""

from __future__ import annotations

from dataclasses import dataclass


def number(value: float, digits: int = 0) -> str:
    return f"{value:,.{digits}f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, aligned for reading as it is; all columns but the first are numbers."""
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(cells: list[str]) -> str:
        padded = [
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * (width - 1) + ":") if index else "-" * width for index, width in enumerate(widths)]
    return "\n".join([line(head), line(rule), *map(line, rows)])


@dataclass(frozen=True)
class Target:
    """A figure, and what it should be."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None
    certain: bool = True
    """Nothing else disturbed the measurement."""

    def holds(self) -> bool:
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )

    def row(self) -> list[str]:
        digits = 0 if abs(self.value) >= 1000 else 2
        wanted = (
            f"≥ {number(self.at_least, digits)}"
            if self.at_least is not None
            else f"≤ {number(self.at_most or 0, digits)}"
        )
        doubt = "" if self.certain else "?"
        return [self.name, number(self.value, digits), wanted, f"yes{doubt}" if self.holds() else f"**no{doubt}**"]

    @staticmethod
    def table(targets: list[Target]) -> str:
        return table(["target", "measured", "wanted", "holds"], [target.row() for target in targets])
