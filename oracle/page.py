"""The report: one HTML page that needs nothing else, and the same in Markdown for a job's summary.

It shows what other commands have left behind: a verdict (``check --json``), the kill matrix, benchmark records.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from io import StringIO
from itertools import cycle
from pathlib import Path
from typing import Any

import jinja2

from oracle.case import Case
from oracle.laws import LAWS
from oracle.layout import packed_stream
from oracle.models import VOCABULARY

# Stand-ins for the page's own colours, which a style sheet knows.
INK, FAINT = "#010203", "#040506"
COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#57606a")


@dataclass(frozen=True)
class Sources:
    """Where the parts lie; what is not there is said to be missing.

    check: as written by ``check --json``. matrix: tests/faults/matrix.json. benchmarks: a folder of
    pytest-benchmark's records, the newest last by name.
    """

    check: Path = Path(".oracle/check.json")
    matrix: Path = Path("tests/faults/matrix.json")
    benchmarks: Path = Path(".benchmarks")


def content(sources: Sources) -> dict[str, Any]:
    """Everything the page shows, as text and numbers."""
    found: dict[str, Any] = {"wanted": sources, "verdict": "", "who": "", "killed": "", "machine": ""}
    found |= {part: [] for part in ("laws", "findings", "kinds", "checks", "contenders", "benchmarks")}
    found |= {"plots": [], "left_out": []}
    if sources.check.exists():
        found |= _verdict(json.loads(sources.check.read_text(encoding="utf-8")))
    if sources.matrix.exists():
        found |= _matrix(json.loads(sources.matrix.read_text(encoding="utf-8")))
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(sources.benchmarks.glob("*.json"))]
    if records:
        found |= _benchmarks(records)
    return found


def html(sources: Sources) -> str:
    """The page."""
    template = resources.files("oracle").joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template).render(content(sources)) + "\n"


# --- the parts --------------------------------------------------------------------------------------


def _verdict(report: dict[str, Any]) -> dict[str, Any]:
    known = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    results = report["results"]
    return {
        "verdict": report["verdict"],
        "who": f"{report['implementation']}; model tiny {report['model']}; {known}; seed {report['seed']}",
        "laws": [result for result in results if result["status"] != "not run"],
        "findings": [_finding(result["finding"]) for result in results if result["finding"]],
    }


def _finding(found: dict[str, Any]) -> dict[str, Any]:
    raw = json.dumps(found["case"])
    case = Case.from_json(raw)
    sentence = next((law.sentence for law in LAWS if law.title == found["law"]), "")
    return {
        "law": found["law"],
        "sentence": sentence,
        "told": "\n".join([found["summary"], *found["details"]]),
        "lengths": case.lengths,
        "stream": list(_tokens(case)),
        "case": case.to_json(),
    }


def _tokens(case: Case) -> Iterator[dict[str, Any]]:
    """The packed stream of a case, token by token."""
    stream = packed_stream(case.sequences, case.stream, VOCABULARY)
    owner = {
        at: place
        for place, i in enumerate(case.stream.arranged(len(case.sequences)))
        for at in range(stream.starts[i], stream.starts[i] + stream.lengths[i])
    }
    for at, position in enumerate(stream.position_ids.tolist()):
        kind = "slot" if at not in owner else "even" if owner[at] % 2 == 0 else "odd"
        yield {"position": position, "kind": kind}


def _matrix(matrix: dict[str, Any]) -> dict[str, Any]:
    rows = matrix["rows"]
    checks: list[tuple[object, ...]] = [("this suite", killed(rows), 0)]
    for style, alarms in matrix["alarms"].items():
        checks.append((style, f"{sum(row['styles'][style] for row in rows)} of {len(rows)}", alarms))
    told = f"KILLED {killed(rows)} planted faults, over {matrix['seeds']} seeds each, {max(r['date'] for r in rows)}"
    return {"kinds": by_kind(rows), "checks": checks, "killed": told}


def by_kind(rows: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    """The kill matrix kind by kind: killed, public, medians of examples and seconds."""
    found: list[tuple[object, ...]] = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        examples, seconds = (statistics.median([row[name] for row in own]) for name in ("median", "seconds"))
        public = sum(bool(row["url"]) for row in own)
        found.append((kind, killed(own), public, f"{examples:.0f}", f"{seconds:.1f}"))
    return found


def killed(rows: Sequence[dict[str, Any]]) -> str:
    """How many faults no seed let pass."""
    return f"{sum(row['killed'] == row['seeds'] for row in rows)} of {len(rows)}"


def _benchmarks(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    newest, info = records[-1], records[-1]["machine_info"]
    timed = [each["extra_info"] for each in newest["benchmarks"] if "limits" in each["extra_info"]]
    contenders = list(dict.fromkeys(name for each in timed for name in each["limits"]))
    timings = [
        (
            f"{_named(each)}; {each['sequences']:,} sequences, {each['tokens']:,} tokens",
            *(f"{each['limits'][name]:.2f}" if name in each["limits"] else "" for name in contenders),
        )
        for each in timed
    ]
    device = info.get("gpu") or {}
    machine = (
        f"{newest['datetime'][:10]}, commit {newest['commit_info'].get('id', '?')[:8]}, "
        f"{device.get('name') or info.get('cpu', {}).get('brand_raw', info.get('machine', ''))}, "
        f"{info.get('threads')} thread(s), torch {info.get('torch')}, transformers {info.get('transformers')}"
    )
    return {
        "contenders": contenders,
        "benchmarks": timings,
        "machine": machine,
        "left_out": list(_left_out(timed)),
        "plots": [
            plot for plot in (_token_time(newest), _raggedness(newest), *_grown(newest), _history(records)) if plot
        ],
    }


def _left_out(timed: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Who did not run, where, and why; a line for each reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for each in timed:
        for name, why in each.get("left out", {}).items():
            where = found.setdefault((name, why), [])
            if each["workload"] not in where:
                where.append(each["workload"])
    for (name, why), where in found.items():
        yield f"{name}, {', '.join(where)}: {why}"


def _named(each: dict[str, Any]) -> str:
    direction = "forward and backward" if each["backward"] else "forward"
    return f"{each['workload']}, {each['dtype'].removeprefix('torch.')}, {direction}"


# --- plots ------------------------------------------------------------------------------------------


def _plot(
    title: str, x: str, y: str, lines: dict[str, list[tuple[Any, float]]], logarithmic: str = ""
) -> dict[str, str]:
    """An SVG in the page's own colours, light and dark; logarithmic: "", "y" or "xy". Needs matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator
    except ImportError:
        return {"title": f"{title}: plots need pip install padding-free-oracle[report]", "svg": ""}
    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    settings = {"svg.fonttype": "none", "svg.hashsalt": title, "grid.color": FAINT, "font.size": 12, **ink}
    with rc_context(settings):
        figure = Figure(figsize=(6, 4.2), layout="constrained")
        axes = figure.add_subplot()
        for colour, (name, points) in zip(cycle(COLOURS), lines.items(), strict=False):
            axes.plot(*zip(*points, strict=True), label=name, color=colour, marker="o")
        axes.set(xlabel=x, ylabel=y)
        for name in logarithmic:
            axis = getattr(axes, f"{name}axis")
            getattr(axes, f"set_{name}scale")("log")
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
        if "x" in logarithmic:  # sizes: the measured ones are the numbers to read
            axes.set_xticks(sorted({x for points in lines.values() for x, _ in points}))
            axes.xaxis.set_major_formatter("{x:,.0f}")
        if not logarithmic:
            axes.set_ylim(0, 1.1 * max(y for points in lines.values() for _, y in points))
        axes.grid(visible=True, which="both")
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        drawn = StringIO()
        figure.savefig(
            drawn, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")
    return {"title": title, "svg": svg}


def _extra(record: dict[str, Any], key: str) -> Any:
    return next((each["extra_info"][key] for each in record["benchmarks"] if key in each["extra_info"]), None)


def _token_time(record: dict[str, Any]) -> dict[str, str] | None:
    micros = _extra(record, "microseconds a token")
    if not micros:
        return None
    lines = {"ours": [(float(count), value) for count, value in micros.items()]}
    return _plot("A token's time as the batch grows", "sequences", "microseconds", lines)


def _grown(record: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Memory and time as the batch grows, for each computation that was measured in several forms."""
    for each in record["benchmarks"]:
        growth = each["extra_info"].get("growth")
        if growth:
            for key, unit in (("mib", "MiB beyond the inputs"), ("s", "seconds")):
                lines = {
                    form: [(int(count), measured[key]) for count, measured in counts.items()]
                    for form, counts in growth["forms"].items()
                }
                title = f"{growth['of'].capitalize()}, forward and backward: {unit}"
                yield _plot(title, "groups" if growth["of"] == "loss" else "sequences", unit, lines, "xy")


def _raggedness(record: dict[str, Any]) -> dict[str, str] | None:
    ragged = _extra(record, "raggedness")
    if not ragged:
        return None
    names = next(iter(ragged.values()))
    lines = {name: [(float(sigma), limits[name]) for sigma, limits in ragged.items()] for name in names}
    title = "Time over the limit's as lengths grow more uneven"
    return _plot(title, "spread of the lengths' logarithms", "times the limit", lines, "y")


def _history(records: Sequence[dict[str, Any]]) -> dict[str, str] | None:
    lines: dict[str, list[tuple[Any, float]]] = {}
    for record in records:
        for each in record["benchmarks"]:
            if "limits" in each["extra_info"]:
                points = lines.setdefault(_named(each["extra_info"]), [])
                points.append((record["datetime"][:10], each["extra_info"]["limits"]["ours"]))
    if len(records) < 2:
        return None
    return _plot("Ours over the limit, night after night", "", "times the limit", lines)


# --- Markdown ---------------------------------------------------------------------------------------


def markdown(sources: Sources) -> str:
    """The same without the plots."""
    found = content(sources)
    lines = [f"# {found['verdict'] or 'No verdict is on file'}", "", found["who"], ""]
    if found["laws"]:
        lines += ["## Laws", ""]
        laws = [(law["law"], law["status"], law["cases"], f"{law['seconds']:.1f}") for law in found["laws"]]
        lines += [*table(("law", "verdict", "cases", "seconds"), laws), ""]
    for each in found["findings"]:
        lines += [f"## {each['law']}", "", each["sentence"], "", "```", each["told"], each["case"], "```", ""]
    if found["kinds"]:
        lines += ["## Does the suite catch bugs?", "", found["killed"], ""]
        lines += [*table(("kind", "killed", "public", "examples, median", "seconds"), found["kinds"]), ""]
        lines += [*table(("check", "kills", "false alarms"), found["checks"]), ""]
    if found["benchmarks"]:
        lines += ["## How fast", "", found["machine"], "", "Time over the limit's:", ""]
        lines += [*table(("workload", *found["contenders"]), found["benchmarks"]), ""]
        lines += [f"* Left out: {told}" for told in found["left_out"]]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """A table, line by line."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"
