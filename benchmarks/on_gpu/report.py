"""The targets against what was measured, and tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

Results = dict[str, Any]
Row = dict[str, Any]
LARGE = 16384
#: M = K = N -> how many times faster than bfloat16 a layer is to be.
LINEAR = {4096: 1.25, 8192: 1.45, 16384: 1.6}
_LINEAR_RECIPES = ("current", "delayed")


@dataclass(frozen=True)
class Target:
    """A bound, and what was measured: ``holds`` is None where it was not."""

    name: str
    bound: str
    measured: str
    holds: bool | None


def _find(rows: Iterable[Row], **wanted: Any) -> Row:
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), {})


def _bound(name: str, value: float | None, bound: float, least: bool, unit: str = "") -> Target:
    words = f"{'>=' if least else '<='} {bound:g}{unit}"
    if value is None:
        return Target(name, words, "not measured", None)
    return Target(name, words, f"{value:.3f}{unit}", value >= bound if least else value <= bound)


def _checks(results: Results) -> list[Target]:
    made = []
    for section, name in (
        ("bytes", "bytes equal the CPU's"),
        ("large", "more than 2^31 elements"),
        ("products", "kernels and products against float64"),
        ("layers", "Linear"),
    ):
        outcomes = results.get(section, {}).get("rows")
        if not outcomes:
            made.append(Target(name, "all", "not run", None))
            continue
        failed = sum(o["failed"] for o in outcomes)
        idle = sum(not o["cases"] and not o["left_out"] for o in outcomes)
        # What the first look at a kernel left out, the second has seen, if it left out nothing.
        whole = {o["name"] for o in outcomes if not o["left_out"]}
        left = sum(o["left_out"] for o in outcomes if o["name"].replace(", some bytes", ", bytes") not in whole)
        words = f"{sum(o['cases'] for o in outcomes)} checks, {failed} failed, {left} left out" + (
            f", {idle} without a case" * bool(idle)
        )
        made.append(Target(name, "all", words, False if failed or idle else None if left else True))
    found = results.get("sanitizer", {}).get("rows") or {}
    for tool in ("memcheck", "racecheck"):
        one = found.get(tool, {})
        planted = ", and a planted error was not found" * (found.get("planted", {}).get("found") is False)
        words = {True: "clean", False: "errors"}.get(one.get("clean"), one.get("why", "not run"))
        if one.get("cases"):
            words += f", {one['cases']} cases"
        clean = one.get("clean") and not (planted and tool == "memcheck")
        made.append(
            Target(
                tool,
                "clean",
                words + (planted if one and tool == "memcheck" else ""),
                clean if one.get("clean") is not None else None,
            )
        )
    return made


def _kernels(results: Results) -> list[Target]:
    rows = results.get("kernels", {}).get("rows") or []
    chosen = [row for row in rows if row.get("size") == LARGE and row.get("dtype") == "bfloat16"]
    made = [
        _bound(f"{name}, of a copy's bandwidth", _find(chosen, kernel=name).get("of copy"), bound, True)
        for name, bound in (("cast", 0.90), ("cast, transpose", 0.80), ("mx rows and columns", 0.75))
    ]
    for ours, base in (("current scaling", "cast"), ("current scaling, transpose", "cast, transpose")):
        one, other = (_find(chosen, kernel=name).get("seconds") for name in (ours, base))
        made.append(_bound(f"{ours}, of {base}'s time", one / other if one and other else None, 1.6, False, "x"))
    return made


def _linear(results: Results) -> list[Target]:
    rows = results.get("linear", {}).get("rows") or []
    made = []
    for size, bound in LINEAR.items():
        peer = _find(rows, linear="torchao tensorwise compiled", size=size).get("seconds")
        for recipe in _LINEAR_RECIPES:
            own = _find(rows, linear=recipe, size=size)
            compiled = _find(rows, linear=f"{recipe} compiled", size=size).get("seconds")
            seconds = own.get("seconds")
            made.append(_bound(f"Linear {recipe} {size}, times bf16", own.get("times bf16"), bound, True, "x"))
            faster = min(seconds, compiled or seconds) if seconds else None
            made.append(
                _bound(
                    f"Linear {recipe} {size}, of torchao's time",
                    faster / peer if faster and peer else None,
                    1.0,
                    False,
                    "x",
                )
            )
            made.append(
                _bound(
                    f"Linear {recipe} {size}, eager of compiled's time",
                    seconds / compiled if seconds and compiled else None,
                    1.1,
                    False,
                    "x",
                )
            )
    return made


def _host(results: Results) -> list[Target]:
    rows = results.get("host", {}).get("rows") or []
    return [
        _bound(
            f"host, forward, {row['recipe']} {row['shape']}, of nn.Linear's", row["times nn.Linear"], 2.5, False, "x"
        )
        for row in rows
        if row["step"] == "forward" and row["recipe"] in ("current", "delayed", "mxfp8")
    ] or [Target("host time of a forward pass", "<= 2.5x", "not measured", None)]


def _demo(results: Results) -> list[Target]:
    found = results.get("demo", {})
    rows, bounds = found.get("rows") or [], found.get("bounds", {})
    made = []
    for row in rows[1:]:
        name, far = row["demo"], row.get("from bf16")
        made.append(
            _bound(f"demo {name}, loss from bf16", None if far is None else abs(far), bounds.get(name, 0.02), False)
        )
        if name != "custom":  # quantizes in plain PyTorch, to be read and not to be fast
            peak = _bound(f"demo {name}, peak memory of bf16's", row.get("peak, of bf16"), 1.0, False, "x")
            below = None if peak.holds is None else row["peak, of bf16"] < 1.0
            made.append(replace(peak, bound="< 1x", holds=below))
    return made or [Target("demo, every recipe", "loss and memory", "not measured", None)]


_PARTS: tuple[Callable[[Results], list[Target]], ...] = (_checks, _kernels, _linear, _host, _demo)


def targets(results: Results) -> list[Target]:
    """Every target, in the order of the sections."""
    return [target for part in _PARTS for target in part(results)]


def table(rows: list[list[str]]) -> str:
    """Columns of text."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def target_table(made: list[Target]) -> str:
    """One line for each target."""
    words = {True: "yes", False: "NO", None: "-"}
    return table(
        [["target", "bound", "measured", "holds"], *([t.name, t.bound, t.measured, words[t.holds]] for t in made)]
    )


def row_table(rows: list[Row], columns: list[str]) -> str:
    """Some columns of measured rows; what is not there is a dash."""

    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)[:60]

    return table([columns, *([cell(row.get(column)) for column in columns] for row in rows)])
