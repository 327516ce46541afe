"""Tables of what a rotation group would do to a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from rotexp.rotation.survey import ModuleReport, RotationReport, Survey


def survey_tables(survey: Survey) -> Iterator[Table]:
    """Yield the model in figures, its rotations, and its modules, equal layers once."""
    yield _facts(survey)
    yield _rotations(survey.rotations)
    yield _modules("outside the layers", survey.ends)
    for indices, modules in survey.layers:
        yield _modules(f"layers {_ranges(indices)} ({len(indices)})", modules)


def _facts(survey: Survey) -> Table:
    table = Table(title="model", show_header=False, title_justify="left")
    for name, value in survey.facts.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))
    return table


def _rotations(reports: Sequence[RotationReport]) -> Table:
    table = Table(title="rotations", title_justify="left")
    for column in ("", "outcome", "acts", "Hadamard matrices (order = factors)"):
        table.add_column(column, overflow="fold")
    for report in reports:
        table.add_row(report.name, report.outcome, _acts(report), _orders(report))
    return table


def _acts(report: RotationReport) -> str:
    if not report.outcome.startswith("placed"):
        return ""
    return "online" if report.online else "merged into weights"


def _orders(report: RotationReport) -> str:
    texts = []
    for order, factors in zip(report.orders, report.factors, strict=True):
        product = " x ".join(map(str, factors)) if factors else "none, so only random or identity starts"
        texts.append(f"{order} = {product}")
    return "; ".join(texts)


def _modules(title: str, modules: Sequence[ModuleReport]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("module", "weight", "to the residual stream", "input", "output", "W", "A"):
        table.add_column(column, overflow="fold")
    for module in modules:
        shape = " x ".join(map(str, module.shape))
        sides = (module.input, module.output)
        table.add_row(module.module, shape, module.role, *sides, module.weights, module.activations)
    return table


def _ranges(indices: Sequence[int]) -> str:
    """Write ascending indices as ranges: 0-3, 5, 7-9."""
    starts = [index for index in indices if index - 1 not in indices]
    ends = [index for index in indices if index + 1 not in indices]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in pairs)
