"""Interactive charts of the report, by plotly; `captions.html.j2` has their captions."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch

from hamu.evaluation.attack_results import RELEARNING, AttackResult
from hamu.evaluation.gains import drawn_entries
from hamu.evaluation.membership import AttackScores, loss_attack, min_k_scores
from hamu.evaluation.predictions import principal_axes, probabilities
from hamu.report.observations import ROLES, ImageObservations, Observations, TextObservations
from hamu.report.pictures import COLOR_OF_MODEL, Look, label_of, limits_of
from hamu.report.run import SIDES, Layers, Run
from hamu.report.tables import attack_figure
from hamu.unlearning.goals import record_losses
from hamu.unlearning.stop_reason import ALL_DONE

FORGET, RETAIN, TEST, GREY = "#D55E00", "#0072B2", "#009E73", "#7F7F7F"
COLOR_OF_SET = {"forget": FORGET, "retain": RETAIN, "test": TEST}
COLOR_OF_ROLE = {"before": GREY, "after": FORGET}
BUCKETS = 400
_MOST_CLASSES = 30
_LEAST_LOSS = 1e-6  # lower losses are drawn here: a logarithmic axis has no 0
_ROWS, _COLUMNS = 160, 200  # cells of a heat map that a screen can show
_DASHED = {"dash": "6px,4px"}
_SHARES = {"range": [-0.03, 1.03], "tickformat": ".0%", "dtick": 0.2}
_OF_STEPS: dict[str, tuple[str, str, dict[str, tuple[str, str, dict[str, str]]]]] = {
    "hardness": (
        "Hardness κ",
        "g_r · g_f",
        {
            "kappa": ("κ", RETAIN, {}),
            "direct_threshold": ("direct up to (κ1, κ3)", TEST, _DASHED),
            "stop_threshold": ("costs from (κ2, κ4)", FORGET, _DASHED),
        },
    ),
    "demand": (
        "Demand of the steps",
        "change per learning rate",
        {
            "demand": ("demanded", FORGET, {}),
            "free_limit": ("possible without harm", TEST, {}),
            "max_demand": ("possible at all", GREY, _DASHED),
        },
    ),
}


@dataclass(frozen=True)
class Chart:
    """A chart: the key of its caption in the template, its title, and figures for the caption."""

    key: str
    title: str
    figure: go.Figure
    facts: Mapping[str, Any] = field(default_factory=dict)
    wide: bool = False

    @property
    def courses(self) -> list[dict[str, Any]]:
        """Name, ends and extremes of each series."""
        found = []
        for one in self.figure.data:
            course: dict[str, Any] = {"name": html.unescape(one.name)}
            if one.y:
                course |= {"first": (one.x[0], one.y[0]), "last": (one.x[-1], one.y[-1])}
                course |= {"low": min(one.y), "high": max(one.y)}
            found.append(course)
        return found


def _series(name: str, xy: Any, color: str, mode: str = "lines", **trace: Any) -> go.Scatter:
    """Series of finite values, thinned by `extremes`; plotly renders markup, so texts are escaped.

    `hovertext` is a text for each point, other keywords are properties of plotly's scatter trace.
    """
    xs, ys = (np.asarray(part, dtype=float) for part in xy)
    kept = extremes(ys)
    if "hovertext" in trace:
        trace["hovertext"] = [_escaped(trace["hovertext"][place]) for place in kept]
    look = {"line": {"color": color, **trace.pop("line", {})}}
    look["marker"] = {"color": color, "size": 5 if mode == "markers" else 7}
    mode = "lines+markers" if len(kept) == 1 else mode
    points = {"x": _short(xs[kept]), "y": _short(ys[kept])}
    return go.Scatter(name=_escaped(name), mode=mode, **points, **look, **trace)


def _plane(traces: Sequence[Any], x: str, y: str, slope: int = 0, **more: Any) -> go.Figure:
    """Chart over two axes with these titles, with a dotted diagonal if it has a slope."""
    own = {"height": 400, "hovermode": "closest"} if slope else {"hovermode": "x unified"}
    titles = {"xaxis_title_text": x, "yaxis_title_text": y, "showlegend": len(traces) > 1}
    layout = {"template": {}, "height": 320, **titles, **own, **more}
    figure = go.Figure(traces, go.Layout(**layout))
    if slope:
        values = [v for one in traces for part in (one.x, one.y) for v in part]
        low, high = figure.layout.xaxis.range or (min(values, default=0), max(values, default=1))
        ends = {"x0": low, "x1": high, "y0": slope * low, "y1": slope * high}
        line = {"dash": "dot", "color": GREY, "width": 1}
        figure.add_shape(type="line", layer="below", line=line, **ends)
    return figure


def _heat(
    rows: Sequence[str], columns: Sequence[str], values: np.ndarray, x: str, **cells: Any
) -> go.Figure:
    """Heat map of [rows, columns], the first row on top; NaN leaves a cell empty.

    Cells that a screen cannot show are merged into the one of the largest magnitude.
    """
    values, rows = _merged(values, rows, _ROWS)
    values, columns = _merged(values.T, columns, _COLUMNS)
    names = {"y": [*map(_escaped, rows)], "x": [*map(_escaped, columns)]}
    look = {"hoverongaps": False, "colorbar": {"thickness": 12}}
    drawn = go.Heatmap(z=[_short(row) for row in values.T], **names, **look, **cells)
    figure = go.Figure(drawn, {"template": {}})
    figure.update_xaxes(title_text=x, type="category")
    return figure.update_yaxes(type="category", autorange="reversed")


def _escaped(text: str) -> str:
    return html.escape(text, quote=False)


def _short(values: Iterable[float | None]) -> list[float | None]:
    """Numbers with five digits, whole ones unchanged; None for those that are not finite."""
    found = [None if v is None or not np.isfinite(v) else float(v) for v in values]
    return [v if v is None or v.is_integer() else float(f"{v:.5g}") for v in found]


def extremes(values: np.ndarray) -> np.ndarray:
    """Positions of at most 2·BUCKETS + 2 finite values: both ends and the extremes of buckets."""
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) <= 2 * BUCKETS:
        return finite
    parts = np.array_split(finite, BUCKETS)
    low, high = ([part[pick(values[part])] for part in parts] for pick in (np.argmin, np.argmax))
    return np.unique([finite[0], finite[-1], *low, *high])


def _merged(
    values: np.ndarray, names: Sequence[str], most: int
) -> tuple[np.ndarray, Sequence[str]]:
    """Merge rows into at most this many, each the largest magnitude of its part."""
    if len(values) <= most:
        return values, names
    parts = np.array_split(np.arange(len(values)), most)
    largest = [np.nan_to_num(np.abs(values[part]), nan=-1.0, posinf=-1.0) for part in parts]
    rows = [
        np.take_along_axis(values[part], magnitude.argmax(0)[None], 0)[0]
        for part, magnitude in zip(parts, largest, strict=True)
    ]
    joined = [" … ".join(dict.fromkeys((names[part[0]], names[part[-1]]))) for part in parts]
    return np.array(rows), joined


# Runs: trajectories, steps, layers, attacks


def trajectories(runs: Sequence[Run], looks: Sequence[Look], *, wide: bool = False) -> list[Chart]:
    """ΔL_f against -ΔL_r, a marker per evaluation (paper, Fig. 4); nothing without two of them."""
    drawn = [(run, look) for run, look in zip(runs, looks, strict=True) if len(run.points) > 1]
    if not drawn:
        return []
    limits = limits_of([run.points for run, _ in drawn])
    lines, rings, ends = [], [], []
    for run, look in drawn:
        hints = ["start", *(e.get("at", f"step {e['step']:,}") for e in drawn_entries(run.entries))]
        end = run.gains or run.points[-1]
        name = label_of(run.name if len(runs) > 1 else run.method, end, limits)
        style = {"width": 3 if run.method.startswith("hamu") else 2, "dash": look.dash or "solid"}
        points, mode = np.array(run.points).T, "lines+markers"
        lines.append(_series(name, points, look.color, mode, hovertext=hints, line=style))
        ends.append((run, end))
        if run.earlier_state:
            marker = {"symbol": "circle-open", "size": 16, "color": look.color}
            ring = {"marker": marker, "mode": "markers", "showlegend": False, "hoverinfo": "skip"}
            rings.append(go.Scatter(x=[end.retain], y=[end.forget], **ring))
    x, y = "retain utility gained, -ΔL_r", "forget quality gained, ΔL_f"
    layout = {"xaxis_range": limits[0], "yaxis_range": limits[1], "showlegend": len(lines) > 1}
    figure = _plane([*lines, *rings], x, y, -1, height=400 if wide else 320, **layout)
    return [Chart("trajectory", "Trajectory", figure, {"ends": ends}, wide)]


def losses_of_runs(runs: Sequence[Run], looks: Sequence[Look], side: str) -> list[Chart]:
    """The loss of one side in the runs whose steps log it."""
    lines = [
        _logged(run, f"{side}_loss", run.name, look.color, {"dash": look.dash or "solid"})
        for run, look in zip(runs, looks, strict=True)
        if f"{side}_loss" in run.steps and run.logs_loss(side)
    ]
    title = f"The {side} loss of the steps' batches"
    return [Chart("courses", title, _over_steps(lines, "loss, nats"))] if lines else []


def step_charts(run: Run) -> list[Chart]:
    """Losses, hardness, demand, branches, and promised against realised changes of the steps."""
    if not run.steps:
        return []
    charts = _losses(run)
    for key, (title, unit, styles) in _OF_STEPS.items():
        known = {column: style for column, style in styles.items() if column in run.steps}
        lines = [_logged(run, column, *style) for column, style in known.items()]
        charts += [Chart(key, title, _over_steps(lines, unit, run))] * bool(lines)
    if "direct_share" in run.steps:
        share, at = run.steps["direct_share"], run.steps["step"]
        parts = (("direct", share, TEST), ("rectified", 1 - share, "#E69F00"))
        areas = [_series(name, (at, y), color, stackgroup="all") for name, y, color in parts]
        figure = _over_steps(areas, "share of blocks", run)
        figure.update_yaxes(range=[0, 1], tickformat=".0%", type="linear")
        charts.append(Chart("branches", "Branches: direct and rectified blocks", figure))
    return charts + [chart for side in SIDES for chart in _promise(run, side)]


def _losses(run: Run) -> list[Chart]:
    """Losses of batches and evaluations, and objectives that are not the loss in charts apart."""
    lines, charts = [], []
    for side in SIDES:
        key, color = f"{side}_loss", COLOR_OF_SET[side]
        if key in run.steps and run.logs_loss(side):
            lines.append(_logged(run, key, f"{side}, batches", color))
        elif key in run.steps:
            own = _logged(run, key, f"{side} objective, batches", color)
            named = {"side": side, "objective": run.objective(side), "method": run.method}
            figure, title = _over_steps([own], "objective", run), f"Objective of the method: {side}"
            charts.append(Chart("objective", title, figure, named))
        found = [(e["step"], e[f"eval_{key}"]) for e in run.entries if f"eval_{key}" in e]
        if found:
            lines.append(_series(f"{side}, evaluations", np.array(found).T, color, "markers"))
    facts = {"step": run.last_step, "ended": (run.evaluation or {}).get("ended")}
    losses = [Chart("losses", "Losses", _over_steps(lines, "loss, nats", run), facts)]
    return losses * bool(lines) + charts


def _promise(run: Run, side: str) -> list[Chart]:
    """First-order change that each checked step promised, against the change it made."""
    columns = [f"{kind}_{side}_change" for kind in ("first_order", "realised")]
    if not run.steps.keys() >= {*columns}:
        return []
    promised, realised = (run.steps[column] for column in columns)
    known = np.flatnonzero(np.isfinite(promised) & np.isfinite(realised))
    name = f"{side} {'loss' if run.logs_loss(side) else 'objective'}"
    ratios = ((run.evaluation or {}).get("promise") or {}).get("median_ratio", {})
    hints = [f"step {step:,.0f}" for step in run.steps["step"][known]]
    xy, look = (promised[known], realised[known]), (COLOR_OF_SET[side], "markers")
    points = _series("a checked step", xy, *look, hovertext=hints)
    figure = _plane([points], f"promised change of the {name}", "realised", 1)
    facts = {"name": name, "steps": len(known), "ratio": ratios.get(side)}
    return [Chart("promise", f"Promise and reality: the {name}", figure, facts)] * bool(len(known))


def _logged(run: Run, column: str, name: str, color: str, line: Any = None) -> go.Scatter:
    return _series(name, (run.steps["step"], run.steps[column]), color, line=line or {})


def _over_steps(lines: Sequence[go.Scatter], unit: str, run: Run | None = None) -> go.Figure:
    """Series over the steps, with the stop of a run that was stopped.

    Positive values that spread far get a logarithmic scale.
    """
    values = [v for line in lines for v in line.y]
    is_log = bool(values) and min(values) > 0 and max(values) > 50 * max(np.median(values), 1e-12)
    scale, unit = ("log", f"{unit} (log)") if is_log else ("linear", unit)
    figure = _plane(lines, "step", unit, yaxis_type=scale)
    # evaluation.json of a run may name no stop reason
    if run is not None and run.ended_kind not in (None, ALL_DONE.kind, "other"):
        figure.add_vline(run.last_step, line={"dash": "dash", "width": 1}, annotation_text="stop")
    return figure


def layer_charts(layers: Layers) -> list[Chart]:
    """Heat maps of cosθ and ‖Δw‖ of every block, without those that hold no figure."""
    with np.errstate(divide="ignore"):
        powers = np.log10(layers.change)
    high = np.max(powers, initial=-99.0, where=np.isfinite(powers))
    low = max(np.min(powers, initial=high, where=np.isfinite(powers)), high - 6)
    cos = {"zmin": -1.0, "zmax": 1.0, "colorscale": "RdBu_r"}
    blues = {"zmin": low, "zmax": high, "colorscale": "Blues"}
    parts = [name.split(".") for name in layers.blocks]
    shared = len([*takewhile(lambda one: len(set(one)) == 1, zip(*parts, strict=False))])
    names = [".".join(one[shared:]).removesuffix(".weight") or ".".join(one) for one in parts]
    steps = [f"{step:,}" for step in layers.steps]
    charts = []
    for key, title, values, drawn, cell, look in (
        ("cos", "cosθ: where both gradients meet", layers.cos, layers.cos, "cosθ %{z:.3g}", cos),
        ("change", "‖Δw‖: where the weights moved", layers.change, powers, "10^%{z:.2f}", blues),
    ):
        known = np.ma.masked_invalid(values)
        if not known.count():
            continue
        look["hovertemplate"] = f"%{{y}}, step %{{x}}: {cell}<extra></extra>"
        figure = _heat(names, steps, drawn.T, "step", **look)
        figure.update_layout(height=110 + min(480, 18 * len(names)))
        means = known.mean(0)
        ends = [(layers.blocks[n], float(means[n])) for n in (means.argmax(), means.argmin())]
        facts = {"ends": ends, "gaps": bool(known.mask.any())}
        charts.append(Chart(key, title, figure, facts, wide=True))
    return charts


def attack_charts(result: AttackResult) -> list[Chart]:
    """Forgotten records over the steps of each attack that relearns."""
    charts = []
    for attack in (one for one in result.outcomes if one in RELEARNING):
        measured, lines = attack_figure(attack, result), []
        for role, outcome in result.outcomes[attack].items():
            means = [outcome.mean(measured.key, at) for at in outcome.at]
            look = (COLOR_OF_MODEL[role], "lines+markers")
            lines.append(_series(role, (outcome.at, means), *look))
        figure = _plane(lines, "steps of fine-tuning", measured.label)
        figure.update_yaxes(**(_SHARES if measured.key == "recognised" else {}))
        charts.append(Chart("attack", f"After {attack}", figure, {"label": measured.label}))
    return charts


# Records: losses, membership inference, answers, images


def distribution(found: Observations) -> Chart:
    """Share of the records with at most each loss."""
    before, after = (found.predictions[role] for role in ROLES)
    sets = [("forget, before", GREY, before["forget"]), ("forget, after", FORGET, after["forget"])]
    if "test" in before:
        sets.append(("test, before: never trained on", TEST, before["test"]))
    curves, quantiles = [], []
    for name, color, predictions in sets:
        losses = np.sort(record_losses(predictions).numpy())
        losses = losses[np.isfinite(losses)]
        share = np.arange(1, len(losses) + 1) / max(1, len(losses))
        xy = (np.maximum(losses, _LEAST_LOSS), share)
        curves.append(_series(name, xy, color, line={"shape": "hv"}))
        if len(losses):
            quantiles.append((name, np.quantile(losses, (0.25, 0.5, 0.75)).tolist()))
    titles = ("loss of a record, nats", "share of the records")
    figure = _plane(curves, *titles, xaxis_type="log", yaxis=_SHARES, hovermode="closest")
    facts = {"quantiles": quantiles, "least": _LEAST_LOSS}
    return Chart("distribution", "Losses, record by record", figure, facts, wide=True)


def membership_charts(found: Observations) -> list[Chart]:
    """Histograms of an attack's scores before and after, and its ROC curves."""
    if "test" not in found.predictions["after"]:
        return []
    known = {role: one for role in ROLES if (one := _attack(found, role)) is not None}
    charts, curves = [], []
    for role, one in known.items():
        bars, sets = [], []
        for name, values in (("forget", one.members), ("test", one.nonmembers)):
            # images: probabilities, as the logarithms that the attack ranks reach far down
            values = values.exp() if isinstance(found, ImageObservations) else values
            look = {"marker": {"color": COLOR_OF_SET[name]}, "hovertemplate": "%{x}: %{y:.1%}"}
            bins = {"histnorm": "probability", "bingroup": 1, "nbinsx": 24}
            bars.append(go.Histogram(name=name, x=_short(values.tolist()), **bins, **look))
            sets.append((name, len(values), float(values.median())))
        figure = _plane(bars, "score", "share of records", hovermode="closest")
        facts = {"role": role, "sets": sets, "auc": one.auc}
        charts.append(Chart("histogram", f"Scores {role}", figure, facts))
        curves.append(_series(f"{role}, AUC {one.auc:.3f}", one.roc(), COLOR_OF_ROLE[role]))
    if curves:
        titles = ("test records taken for forget records", "forget records found")
        figure = _plane(curves, *titles, 1, xaxis=_SHARES, yaxis=_SHARES)
        charts.append(Chart("roc", "ROC of the attack", figure))
    return charts


def _attack(found: Observations, role: str) -> AttackScores | None:
    """Scores of forget and test records; None for too few, or if one is not finite."""
    if isinstance(found, ImageObservations):
        sets = found.predictions[role]
        return loss_attack(sets["forget"], sets["test"], found.seed)
    scores = [min_k_scores(found.predictions[role][name]) for name in ("forget", "test")]
    is_usable = all(len(s) and bool(torch.isfinite(s).all()) for s in scores)
    return AttackScores(*scores) if is_usable else None


def answer_probabilities(found: TextObservations, contents: bool) -> Chart:
    """Probability of each answer before and after, thinned by rank of change."""
    clouds = []
    for name, texts in found.texts.items():
        before, after = (probabilities(found.predictions[role][name]).numpy() for role in ROLES)
        order = np.argsort(after - before, kind="stable")
        ranks = np.linspace(0, len(order) - 1, min(len(order), 2 * BUCKETS)).astype(int)
        at = np.take(order, ranks)
        hints = {"hovertext": [f"row {row}" for row in texts.rows.numpy()[at]]} if contents else {}
        clouds.append(
            _series(name, (before[at], after[at]), COLOR_OF_SET[name], "markers", **hints)
        )
    figure = _plane(clouds[::-1], "before", "after", 1, xaxis=_SHARES, yaxis=_SHARES)
    return Chart("probabilities", "Probability of each record's answer", figure, wide=True)


def class_accuracy(evaluation: Mapping[str, Any], contents: bool) -> list[Chart]:
    """Accuracy by class before and after, on the test set if there is one."""
    after = evaluation["after"]
    sets = [name for name in ("test", "retain") if "per_class_accuracy" in after.get(name, {})]
    if not sets:
        return []
    before, after = (evaluation[role][sets[0]]["per_class_accuracy"] for role in ROLES)
    every = list(before | after)
    names = {key: key if contents else f"class {n}" for n, key in enumerate(every, 1)}
    change = {key: after.get(key, 0.0) - before.get(key, 0.0) for key in every}
    shown = every
    if len(every) > _MOST_CLASSES:
        shown = sorted(every, key=lambda key: -abs(change[key]))[:_MOST_CLASSES]
    heights = [_escaped(names[key]) for key in shown]
    look = {"orientation": "h", "hovertemplate": "%{y}: %{x:.1%}"}
    bars = [
        go.Bar(
            name=role,
            y=heights,
            x=_short(found.get(key) for key in shown),
            marker={"color": COLOR_OF_ROLE[role]},
            **look,
        )
        for role, found in zip(ROLES, (before, after), strict=True)
    ]
    figure = go.Figure(bars, {"template": {}, "barmode": "group", "hovermode": "closest"})
    figure.update_layout(height=80 + 30 * len(shown))
    figure.update_xaxes(**{**_SHARES, "range": [0, 1.03]})
    figure.update_yaxes(type="category", autorange="reversed")
    worst = min(every, key=change.__getitem__)
    fall = [one.get(worst, 0.0) for one in (before, after)] if change[worst] < 0 else None
    facts = {"set": sets[0], "classes": len(every), "shown": len(shown), "worst": names[worst]}
    title = f"Accuracy by class, {sets[0]} set"
    return [Chart("classes", title, figure, {**facts, "fall": fall})]


def confusion(found: ImageObservations, role: str, contents: bool) -> Chart:
    """Confusion matrix: true classes by predicted ones, as shares of the row."""
    sets = ["test"] if "test" in found.counts else ["retain", "forget"]
    predictions = [found.predictions[role][name] for name in sets]
    # each image of a set that is sampled more thinly stands for more
    weights = [found.sizes[name] / found.counts[name] for name in sets]
    names = output_names(found.classes, max(one.logits.shape[1] for one in predictions), contents)
    counts = np.zeros((len(names), len(names)))
    for one, weight in zip(predictions, weights, strict=True):
        np.add.at(counts, (one.labels.numpy(), one.logits.argmax(-1).numpy()), weight)
    of_row = counts.sum(1, keepdims=True)
    shares = np.divide(counts, of_row, out=np.full_like(counts, np.nan), where=of_row > 0)
    wrong = counts.sum(1) - counts.diagonal()
    kept = np.sort(np.argsort(-wrong, kind="stable")[:_MOST_CLASSES])
    shown = [names[k] for k in kept]
    look = {"zmin": 0.0, "zmax": 1.0, "colorscale": "Blues"}
    look["hovertemplate"] = "%{y} taken for %{x}: %{z:.1%}<extra></extra>"
    look["texttemplate"] = "%{z:.0%}" if len(kept) <= 12 else ""
    figure = _heat(shown, shown, shares[np.ix_(kept, kept)], "taken for", **look)
    off = np.nan_to_num(shares) * (1 - np.eye(len(shares)))
    row, column = np.unravel_index(off.argmax(), off.shape)
    facts = {
        "role": role,
        "sets": sets,
        "images": sum(len(one.labels) for one in predictions),
        "right": float(counts.diagonal().sum() / counts.sum()),
        "weighted": len(set(weights)) > 1,
        "classes": len(names),
        "shown": len(kept),
        "most": (names[row], names[column], float(off[row, column])),
    }
    return Chart("confusion", f"Confusion {role}", figure.update_layout(height=430), facts)


def output_names(classes: Sequence[str], width: int, contents: bool) -> list[str]:
    """Names of a model's outputs: the classes of the data, and outputs beyond them."""
    named = list(classes) if contents else [f"class {n + 1}" for n in range(len(classes))]
    return named + [f"output {n + 1}" for n in range(len(named), width)]


def embedding(found: ImageObservations) -> list[Chart]:
    """Embeddings of each model, both on the same two principal axes."""
    groups = [(role, name) for role, sets in found.embeddings.items() for name in sets]
    flat, share = principal_axes([found.embeddings[role][name] for role, name in groups])
    at = {group: points.numpy() for group, points in zip(groups, flat, strict=True)}
    both = np.concatenate([*at.values()])
    margin = 0.05 * np.ptp(both, axis=0) + 1e-9
    limits = np.stack([both.min(0) - margin, both.max(0) + margin], 1).tolist()
    axes: dict[str, Any] = {"xaxis_range": limits[0], "yaxis_range": limits[1], "height": 400}
    charts = []
    for role, sets in found.embeddings.items():
        clouds = [
            _series(name, at[role, name].T, COLOR_OF_SET[name], "markers", opacity=0.6)
            for name in sets
        ]
        means = {name: vectors.double().mean(0) for name, vectors in sets.items()}
        distance = float((means["forget"] - means["retain"]).norm())
        facts = {"role": role, "share": share, "distance": distance}
        figure = _plane(clouds, "first axis", "second axis", hovermode="closest", **axes)
        charts.append(Chart("embedding", f"Embedding {role}", figure, facts))
    return charts
