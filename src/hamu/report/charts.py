"""Interactive charts of the report, by plotly; `captions.html.j2` has their captions."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from hamu.evaluation.attacks import RELEARNING, AttackResult
from hamu.evaluation.gains import drawn_entries
from hamu.evaluation.membership import AttackScores, loss_attack, min_k_scores
from hamu.evaluation.predictions import principal_axes, probabilities
from hamu.report.pictures import COLOR_OF_MODEL, limits_of
from hamu.report.run import ROLES, SIDES, ImageObservations, Observations, Run, TextObservations
from hamu.report.tables import attack_figure
from hamu.unlearning.goals import record_losses

FORGET, RETAIN, TEST, GREY = "#D55E00", "#0072B2", "#009E73", "#7F7F7F"
COLORS = {"forget": FORGET, "retain": RETAIN, "test": TEST, "before": GREY, "after": FORGET}
BUCKETS = 400
_MOST_CLASSES = 30
_CELLS = 160  # rows and columns of a heat map
_LEAST_LOSS = 1e-6  # lower losses are drawn here: a logarithmic axis has no 0
_SHARES = {"range": [-0.03, 1.03], "tickformat": ".0%", "dtick": 0.2}
_OF_STEPS = {  # by key: title, unit, and columns of the log
    "hardness": ("Hardness κ", "g_r · g_f", ("kappa", "direct_threshold", "stop_threshold")),
    "demand": ("Demand", "change per learning rate", ("demand", "free_limit", "max_demand")),
    "headroom": ("Headroom of the expected gradients", "free over demanded", ("headroom",)),
    "noise": ("Noise scale", "records", ("retain_noise_scale", "forget_noise_scale")),
    "branches": ("Branches", "share of the blocks", ("direct_share",)),
}
_LABELS = {"kappa": "κ", "direct_threshold": "direct up to (κ1, κ3)"}
_LABELS |= {"stop_threshold": "costs from (κ2, κ4)", "demand": "demanded", "direct_share": "direct"}
_LABELS |= {"headroom": "headroom", "retain_noise_scale": "retain", "forget_noise_scale": "forget"}
_LABELS |= {"free_limit": "possible without harm", "max_demand": "possible at all"}
_escaped = partial(html.escape, quote=False)


@dataclass(frozen=True)
class Chart:
    """A chart: the key of its caption in the template, its title, and a word for the caption."""

    key: str
    title: str
    figure: go.Figure
    word: str = ""
    wide: bool = False


def _series(name: str, xy: Any, color: str, mode: str = "lines", **trace: Any) -> go.Scatter:
    """Series of finite values, thinned; texts are escaped, as plotly renders markup."""
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


def _heat(table: pd.DataFrame, x: str, **look: Any) -> go.Figure:
    """Heat map of a table, its first row on top; of cells too many the largest magnitudes stay."""
    for _ in range(2):  # rows, then columns
        size = len(table)
        starts = np.unique(np.linspace(0, size, min(size, _CELLS), endpoint=False).astype(int))
        high, low = (pick.reduceat(table.to_numpy(), starts) for pick in (np.fmax, np.fmin))
        merged = np.where(high >= -low, high, low)
        table = pd.DataFrame(merged, table.index[starts], table.columns).T
    names = {"y": [*map(_escaped, table.index)], "x": [*map(_escaped, table.columns)]}
    look = {"hoverongaps": False, "colorbar": {"thickness": 12}, **look}
    drawn = go.Heatmap(z=[_short(row) for row in table.to_numpy()], **names, **look)
    figure = go.Figure(drawn, {"template": {}, "height": 110 + min(480, 18 * len(table))})
    figure.update_xaxes(title_text=x, type="category")
    return figure.update_yaxes(type="category", autorange="reversed")


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


# Runs: trajectories, steps, layers, attacks


def trajectories(runs: Sequence[Run], looks: Sequence[tuple[str, str]]) -> list[Chart]:
    """ΔL_f against -ΔL_r, a marker per evaluation (paper, Fig. 4); nothing without two of them."""
    drawn = [(run, look) for run, look in zip(runs, looks, strict=True) if len(run.points) > 1]
    limits, lines, rings = limits_of([run.points for run, _ in drawn]), [], []
    for run, (color, dash) in drawn:
        hints = ["start", *(f"step {one['step']:,}" for one in drawn_entries(run.entries))]
        name = run.name if len(runs) > 1 else run.method
        style = {"width": 3 if run.method.startswith("hamu") else 2, "dash": dash}
        points = np.array(run.points).T
        lines.append(_series(name, points, color, "lines+markers", hovertext=hints, line=style))
        if run.gains and run.earlier_state:
            marker = {"symbol": "circle-open", "size": 16, "color": color}
            ring = {"marker": marker, "mode": "markers", "showlegend": False}
            x, y = [run.gains.retain], [run.gains.forget]
            rings.append(go.Scatter(x=x, y=y, name=f"{name}, saved", **ring))
    across, up = "retain utility gained, -ΔL_r", "forget quality gained, ΔL_f"
    layout = {"xaxis_range": limits[0], "yaxis_range": limits[1], "showlegend": len(lines) > 1}
    figure = _plane([*lines, *rings], across, up, -1, **layout)
    return [Chart("trajectory", "Trajectory", figure, wide=len(runs) > 1)] * bool(drawn)


def step_charts(run: Run) -> list[Chart]:
    """Losses, hardness, demand, branches, and promised against realised changes of the steps."""
    losses, charts = [], []
    for side in SIDES:
        key, color = f"{side}_loss", COLORS[side]
        known = [(e["step"], e[f"eval_{key}"]) for e in run.entries if f"eval_{key}" in e]
        if known:
            name = f"{side}, evaluations"
            losses.append(_series(name, np.array(known).T, color, "markers"))
        if key in run.steps and run.logs_loss(side):
            losses.append(_logged(run, key, f"{side}, batches", color))
        elif key in run.steps:
            own = [_logged(run, key, f"{side} objective, batches", color)]
            title, word = f"Objective of the method: {side}", run.objective(side) or "unknown here"
            charts.append(Chart("objective", title, _over_steps(own, "objective"), word))
    charts = [Chart("losses", "Losses", _over_steps(losses, "loss, nats"))] * bool(losses) + charts
    for key, (title, unit, columns) in _OF_STEPS.items():
        styles = zip(columns, (RETAIN, TEST, FORGET), strict=False)
        lines = [_logged(run, c, _LABELS[c], color) for c, color in styles if c in run.steps]
        charts += [Chart(key, title, _over_steps(lines, unit))] * bool(lines)
    return charts + [chart for side in SIDES for chart in _promise(run, side)]


def _promise(run: Run, side: str) -> list[Chart]:
    """First-order change that each checked step promised, against the change it made."""
    columns = [f"{kind}_{side}_change" for kind in ("first_order", "realised")]
    if not {*columns} <= {*run.steps}:
        return []
    known = run.steps[np.isfinite(run.steps[columns]).all(axis=1)]
    hints = [f"step {step:,.0f}" for step in known["step"]]
    name = f"{side} {'loss' if run.logs_loss(side) else 'objective'}"
    xy = known[columns].to_numpy().T
    points = _series("checked steps", xy, COLORS[side], "markers", hovertext=hints)
    figure = _plane([points], f"promised change of the {name}", "realised", 1)
    return [Chart("promise", f"Promise and reality: {name}", figure)] * bool(len(known))


def _logged(run: Run, column: str, name: str, color: str) -> go.Scatter:
    return _series(name, (run.steps["step"], run.steps[column]), color)


def _over_steps(lines: Sequence[go.Scatter], unit: str) -> go.Figure:
    """Series over the steps; positive values that spread far get a logarithmic scale."""
    values = [v for line in lines for v in line.y]
    is_log = bool(values) and min(values) > 0 and max(values) > 50 * max(np.median(values), 1e-12)
    scale, unit = ("log", f"{unit} (log)") if is_log else ("linear", unit)
    return _plane(lines, "step", unit, yaxis_type=scale)


def layer_charts(layers: Mapping[str, pd.DataFrame]) -> list[Chart]:
    """Heat maps of cosθ and ‖Δw‖ of every block, without those that hold no figure."""
    both = {"colorscale": "RdBu_r", "zmin": -1, "zmax": 1}
    looks: dict[str, tuple[str, str, Any]] = {
        "cos": ("cosθ: where both gradients meet", "cosθ %{z:.3g}", both),
        "change": ("‖Δw‖: where the weights moved", "10^%{z:.2f}", {"colorscale": "Blues"}),
    }
    charts = []
    for key, found in layers.items():
        values = found if key == "cos" else np.log10(found.where(found > 0))
        if np.isfinite(values).any(axis=None):
            title, cell, look = looks[key]
            look["hovertemplate"] = f"%{{y}}, step %{{x}}: {cell}<extra></extra>"
            values = values.rename("{:,}".format).T
            values.index = values.index.str.removesuffix(".weight")
            charts.append(Chart(key, title, _heat(values, "step", **look), wide=True))
    return charts


def attack_charts(result: AttackResult) -> list[Chart]:
    """Forgotten records over the steps of each attack that relearns."""
    charts = []
    for attack in (one for one in result.outcomes if one in RELEARNING):
        measured, lines = attack_figure(attack, result), []
        for role, outcome in result.outcomes[attack].items():
            xy = outcome.at, [outcome.mean(measured.key, at) for at in outcome.at]
            lines.append(_series(role, xy, COLOR_OF_MODEL[role], "lines+markers"))
        figure = _plane(lines, "steps of fine-tuning", measured.label)
        figure.update_yaxes(**(_SHARES if measured.key == "recognised" else {}))
        charts.append(Chart("attack", f"After {attack}", figure))
    return charts


# Records: losses, membership inference, answers, images


def distribution(found: Observations) -> Chart:
    """Share of the records with at most each loss."""
    before, after = (found.predictions[role] for role in ROLES)
    sets = {"forget, before": (GREY, before["forget"]), "forget, after": (FORGET, after["forget"])}
    if "test" in before:
        sets["test, before: never trained on"] = (TEST, before["test"])
    curves = []
    for name, (color, predictions) in sets.items():
        losses = np.maximum(np.sort(record_losses(predictions).numpy()), _LEAST_LOSS)
        share = np.arange(1, len(losses) + 1) / len(losses)
        curves.append(_series(name, (losses, share), color, line={"shape": "hv"}))
    titles = ("loss of a record, nats", "share of the records")
    figure = _plane(curves, *titles, xaxis_type="log", yaxis=_SHARES, hovermode="closest")
    return Chart("distribution", "Losses, record by record", figure, wide=True)


def membership_charts(found: Observations) -> list[Chart]:
    """Histograms of an attack's scores before and after, and its ROC curves."""
    if "test" not in found.predictions["after"]:
        return []
    charts, curves = [], []
    for role in ROLES:
        sets: Any = found.predictions[role]
        forget, test = sets["forget"], sets["test"]
        if isinstance(found, ImageObservations):
            one = loss_attack(forget, test, found.seed)
        else:
            one = AttackScores(*(min_k_scores(sort, -sort.losses) for sort in (forget, test)))
        if one is None or one.auc is None:  # too few records, or a score that is not finite
            continue
        bars = []
        for name, values in (("forget", one.members), ("test", one.nonmembers)):
            # images: probabilities, as the logarithms that the attack ranks reach far down
            values = values.exp() if isinstance(found, ImageObservations) else values
            look = {"marker": {"color": COLORS[name]}, "hovertemplate": "%{x}: %{y:.1%}"}
            bins = {"histnorm": "probability", "bingroup": 1, "nbinsx": 24}
            bars.append(go.Histogram(name=name, x=_short(values.tolist()), **bins, **look))
        figure = _plane(bars, "score", "share of records", hovermode="closest")
        charts.append(Chart("histogram", f"Scores {role}, AUC {one.auc:.3f}", figure))
        curves.append(_series(f"{role}, AUC {one.auc:.3f}", one.roc(), COLORS[role]))
    titles = ("test records taken for forget records", "forget records found")
    figure = _plane(curves, *titles, 1, xaxis=_SHARES, yaxis=_SHARES)
    return charts + [Chart("roc", "ROC of the attack", figure)] * bool(curves)


def answer_probabilities(found: TextObservations, contents: bool) -> Chart:
    """Probability of each answer before and after, thinned by rank of change."""
    clouds = []
    for name, texts in found.texts.items():
        before, after = (probabilities(found.predictions[role][name]).numpy() for role in ROLES)
        order = np.argsort(after - before, kind="stable")
        at = order[np.linspace(0, len(order) - 1, min(len(order), 2 * BUCKETS)).astype(int)]
        hints = {"hovertext": [f"row {row}" for row in texts.rows.numpy()[at]]} if contents else {}
        clouds.append(_series(name, (before[at], after[at]), COLORS[name], "markers", **hints))
    figure = _plane(clouds[::-1], "before", "after", 1, xaxis=_SHARES, yaxis=_SHARES)
    return Chart("probabilities", "Probability of each record's answer", figure, wide=True)


def class_accuracy(
    evaluation: Mapping[str, Any], classes: Sequence[str], contents: bool
) -> list[Chart]:
    """Accuracy by class before and after, on the test set if there is one; without contents classes
    are numbered, by `classes` if given.
    """
    after = evaluation["after"]
    measured = [n for n in ("test", "retain") if "per_class_accuracy" in after.get(n, {})]
    if not measured:
        return []
    of_roles = {role: evaluation[role][measured[0]]["per_class_accuracy"] for role in ROLES}
    table = pd.DataFrame(of_roles, dtype=float)
    if not contents:
        names = [*(classes or table.index)]
        table.index = pd.Index([f"class {names.index(one) + 1}" for one in table.index])
    change = table.fillna(0.0).diff(axis=1)["after"].abs()
    shown = table[change.rank(method="first") > len(table) - _MOST_CLASSES]
    look: dict[str, Any] = {"orientation": "h", "hovertemplate": "%{y}: %{x:.1%}"}
    look["y"] = [*map(_escaped, shown.index)]
    bars = [go.Bar(name=role, x=_short(shown[role]), **look) for role in ROLES]
    layout = {"barmode": "group", "hovermode": "closest", "height": 80 + 30 * len(shown)}
    figure = go.Figure(bars, {"template": {}, "colorway": [GREY, FORGET], **layout})
    figure.update_xaxes(**{**_SHARES, "range": [0, 1.03]})
    figure.update_yaxes(type="category", autorange="reversed")
    return [Chart("classes", f"Accuracy by class, {measured[0]} set", figure)]


def confusion(found: ImageObservations, role: str, contents: bool) -> Chart:
    """Confusion matrix: true classes by predicted ones, as shares of the row."""
    from sklearn.metrics import confusion_matrix  # takes a second

    sets = ["test"] if "test" in found.sizes else ["retain", "forget"]
    predictions = [found.predictions[role][name] for name in sets]
    # each image of a set that is sampled more thinly stands for more
    counted = [len(one.labels) for one in predictions]
    weights = np.repeat([found.sizes[name] for name in sets] / np.array(counted), counted)
    labels = np.concatenate([one.labels for one in predictions])
    guesses = np.concatenate([one.logits.argmax(-1) for one in predictions])
    names = output_names(found.classes, predictions[0].logits.shape[1], contents)
    of = {"labels": range(len(names)), "sample_weight": weights}
    counts = pd.DataFrame(confusion_matrix(labels, guesses, **of), names, names, float)
    right = np.diag(counts)
    wrong = (counts.sum(axis=1) - right).rank(method="first", ascending=False)
    kept = (wrong <= _MOST_CLASSES).to_numpy()
    shares = counts.div(counts.sum(axis=1), axis=0).loc[kept, kept]
    look = {"zmin": 0.0, "zmax": 1.0, "colorscale": "Blues"}
    look["hovertemplate"] = "%{y} taken for %{x}: %{z:.1%}<extra></extra>"
    look["texttemplate"] = "%{z:.0%}" if len(shares) <= 12 else ""
    figure = _heat(shares, "taken for", **look).update_layout(height=430)
    share = right.sum() / counts.to_numpy().sum()
    title = f"Confusion {role}: {share:.1%} of {len(labels):,} images recognised"
    return Chart("confusion", title, figure, " and ".join(sets))


def output_names(classes: Sequence[str], width: int, contents: bool) -> list[str]:
    """Names of a model's outputs: the classes of the data, and outputs beyond them."""
    named = list(classes) if contents else [f"class {n + 1}" for n in range(len(classes))]
    return named + [f"output {n + 1}" for n in range(len(named), width)]


def embedding(found: ImageObservations) -> list[Chart]:
    """Embeddings of each model, both on the same two principal axes."""
    groups = [(role, name) for role, sets in found.embeddings.items() for name in sets]
    flat, share = principal_axes([found.embeddings[role][name] for role, name in groups])
    both = np.concatenate(flat)
    low, high = both.min(0), both.max(0)
    margin = 0.05 * (high - low) + 1e-9
    ends = np.stack([low - margin, high + margin], 1).tolist()
    axes: dict[str, Any] = {"xaxis_range": ends[0], "yaxis_range": ends[1], "height": 400}
    clouds: dict[str, list[go.Scatter]] = {role: [] for role in ROLES}
    for (role, name), points in zip(groups, flat, strict=True):
        clouds[role].append(_series(name, points.T, COLORS[name], "markers", opacity=0.6))
    charts = []
    for role, drawn in clouds.items():
        figure = _plane(drawn, "first axis", "second axis", hovermode="closest", **axes)
        charts.append(Chart("embedding", f"Embedding {role}", figure, f"{share:.0%}"))
    return charts
