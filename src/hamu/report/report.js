// Draws the charts of a report. Each .chart element holds its figures as JSON:
//   xy    series of {name, color, x, y, mode: line | points | both | steps | area, hints, dash, width, base, small,
//         ring: [x, y]};
//         axes x and y of {label, limits, low, log, percent, whole}; marks, diagonal (1 or -1), zero, square, nearest
//   bars  categories, series of {name, color, values}, high, percent
//   heat  rows, columns, values, scale: diverging | sequential, low, high, log, percent, numbers, square, xlabel
"use strict";
(() => {
  const PAPER = 700;  // CSS pixels that a figure has on A4
  const SVG = "http://www.w3.org/2000/svg";
  const hint = document.getElementById("hint");

  const make = (name, attributes = {}, parent = null, text = null) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };
  const element = (name, className, parent, text = "") => {
    const node = document.createElement(name);
    if (className) node.className = className;
    node.textContent = text;
    parent.append(node);
    return node;
  };

  // ---- numbers ----------------------------------------------------------------------------------------------------
  const shown = (value, axis = {}) => {
    if (value === null || value === undefined) return "-";
    if (axis.percent) return `${+(100 * value).toPrecision(3)}%`;
    if (axis.whole) return Math.round(value).toLocaleString("en");
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e6 || size < 1e-4)) return value.toExponential(2).replace("e+", "e").replace("-", "−");
    return String(+value.toPrecision(4)).replace("-", "−");
  };
  const ticks = (low, high, count) => {
    const rough = (high - low) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(+(n * step).toPrecision(12));
    return found;
  };
  const powers = (low, high) => {
    const found = [];
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
    const every = Math.max(1, Math.ceil((last - first) / 6));
    for (let power = first; power <= last; power += every) found.push(10 ** power);
    return found.length > 1 ? found : [low, high];
  };

  const ends = (values) => {
    let [low, high] = [Infinity, -Infinity];  // not spread: a call takes only so many arguments
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return [low, high];
  };

  const scaleOf = (axis, values, from, to) => {
    let [low, high] = axis.limits || ends(values);
    if (!Number.isFinite(low) || !Number.isFinite(high)) [low, high] = [0, 1];
    if (axis.low !== undefined) low = axis.low;
    if (low === high) [low, high] = axis.log ? [low / 2, high * 2] : [low - (Math.abs(low) / 2 || 1), high + (Math.abs(high) / 2 || 1)];
    if (axis.log && !axis.limits) {
      const factor = (high / low) ** 0.05;
      low /= factor;
      high *= factor;
    } else if (!axis.limits && !axis.whole) {
      const margin = 0.06 * (high - low);
      if (axis.low === undefined) low -= margin;
      high += margin;
    }
    const [a, b] = axis.log ? [Math.log10(low), Math.log10(high)] : [low, high];
    const at = (value) => from + ((axis.log ? Math.log10(value) : value) - a) / (b - a) * (to - from);
    at.limits = [low, high];
    at.ticks = (count) => axis.log ? powers(low, high) : ticks(low, high, count).filter((t) => !axis.whole || Number.isInteger(t));
    return at;
  };

  // ---- hints under the pointer, or where the arrow keys are -----------------------------------------------------------
  const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const within = (value, low, high) => Math.max(low, Math.min(high, value));
  let leaving = () => {};  // what the chart that told last does when its hint goes
  const hush = () => { hint.hidden = true; leaving(); leaving = () => {}; };
  const tell = (x, y, lines) => {
    hint.textContent = lines.join("\n");
    hint.hidden = false;
    const box = hint.getBoundingClientRect(), below = y + 16;
    hint.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - box.width - 6))}px`;
    hint.style.top = `${below + box.height > innerHeight ? y - box.height - 12 : below}px`;
  };
  // look: what to tell at a place, null for nothing; go: the place that an arrow key leads to; in the chart's own units
  const follow = (svg, width, look, go, leave = () => {}) => {
    const at = (x, y) => {
      const box = svg.getBoundingClientRect(), scale = box.width / width, lines = look(x, y);
      if (!lines) return hush();
      if (leaving !== leave) hush();
      leaving = leave;
      tell(box.left + x * scale, box.top + y * scale, lines);
    };
    const move = (event) => {
      const box = svg.getBoundingClientRect(), scale = width / box.width;
      at((event.clientX - box.left) * scale, (event.clientY - box.top) * scale);
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hush(); });
    svg.addEventListener("blur", hush);
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") hush();
      if (!(event.key in ARROWS) || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      at(...go(...ARROWS[event.key]));
    });
  };
  addEventListener("scroll", hush, { passive: true });
  addEventListener("pointerdown", (event) => { if (!event.target.closest(".chart > svg")) hush(); });

  // ---- axes ---------------------------------------------------------------------------------------------------------
  const frame = (svg, box, x, y, spec) => {
    const { left, right, top, bottom } = box;
    for (const tick of y.ticks(5)) {
      make("line", { class: "grid-line", x1: left, x2: right, y1: y(tick), y2: y(tick) }, svg);
      make("text", { x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, svg, shown(tick, spec.y));
    }
    for (const tick of x.ticks(Math.max(2, (right - left) / 90))) {
      make("line", { class: "grid-line", x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 4 }, svg);
      make("text", { x: x(tick), y: bottom + 18, "text-anchor": "middle" }, svg, shown(tick, spec.x));
    }
    make("line", { class: "frame", x1: left, x2: right, y1: bottom, y2: bottom }, svg);
    make("text", { x: (left + right) / 2, y: bottom + 36, "text-anchor": "middle" }, svg, spec.x.label);
    make("text", { x: left, y: top - 9 }, svg, spec.y.label);
  };
  const ink = (color) => color === "#000000" ? "currentColor" : color;

  // ---- lines and points ---------------------------------------------------------------------------------------------
  const path = (one, x, y, stepped) => {
    let text = "", open = false;
    one.x.forEach((value, n) => {
      if (value === null || one.y[n] === null) { open = false; return; }
      const at = `${x(value).toFixed(1)},${y(one.y[n]).toFixed(1)}`;
      if (open && stepped) text += `H${x(value).toFixed(1)}V${y(one.y[n]).toFixed(1)}`;
      else text += `${open ? "L" : "M"}${at}`;
      open = true;
    });
    return text;
  };
  const drawXY = (holder, spec, width, hidden) => {
    const there = spec.series.filter((one) => !hidden.has(one));
    const values = (key) => there.flatMap((one) => one[key].filter((v) => v !== null));
    const height = spec.square ? Math.min(width * 0.85, 430) : Math.max(230, Math.min(width * 0.52, 360));
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}` });
    const box = { left: 58, right: width - 14, top: 26, bottom: height - 44 };
    const ys = values("y").concat(spec.zero && !spec.y.limits ? [0] : []);
    const xs = values("x").concat((spec.marks || []).map((m) => m.x), spec.zero && !spec.x.limits ? [0] : []);
    const x = scaleOf(spec.x, xs, box.left, box.right);
    const y = scaleOf(spec.y, spec.y.log ? ys.filter((v) => v > 0) : ys, box.bottom, box.top);
    frame(svg, box, x, y, spec);
    const clip = `clip${drawXY.count = (drawXY.count || 0) + 1}`;
    const area = make("clipPath", { id: clip }, svg);
    make("rect", { x: box.left - 4, y: box.top - 4, width: box.right - box.left + 8, height: box.bottom - box.top + 8 }, area);
    const inside = make("g", { "clip-path": `url(#${clip})` }, svg);
    if (spec.zero) {
      make("line", { class: "zero", x1: box.left, x2: box.right, y1: y(0), y2: y(0) }, inside);
      make("line", { class: "zero", x1: x(0), x2: x(0), y1: box.top, y2: box.bottom }, inside);
    }
    if (spec.diagonal) {
      const reach = 2 * Math.max(...x.limits.map(Math.abs), ...y.limits.map(Math.abs));
      make("line", { class: "diagonal", x1: x(-reach), y1: y(-reach * spec.diagonal), x2: x(reach), y2: y(reach * spec.diagonal) }, inside);
    }
    for (const one of there) {
      const color = ink(one.color), mode = one.mode || "line";
      if (mode === "area") {
        const line = path(one, x, y), ends = one.x.filter((_, n) => one.y[n] !== null);
        if (ends.length > 1) make("path", { d: `${line}L${x(ends[ends.length - 1]).toFixed(1)},${y(one.base)}L${x(ends[0]).toFixed(1)},${y(one.base)}Z`, fill: color, opacity: 0.55 }, inside);
      } else if (mode !== "points") {
        make("path", { d: path(one, x, y, mode === "steps"), fill: "none", stroke: color, "stroke-width": one.width || 1.8,
          "stroke-linejoin": "round", ...(one.dash ? { "stroke-dasharray": one.dash } : {}) }, inside);
      }
      if (mode === "points" || mode === "both" || one.x.length === 1) {
        one.x.forEach((value, n) => {
          if (one.y[n] === null) return;
          make("circle", { cx: x(value).toFixed(1), cy: y(one.y[n]).toFixed(1), r: one.small ? 2.4 : 3.6, fill: color,
            "fill-opacity": one.small ? 0.6 : 0.9 }, inside);
        });
      }
      if (one.ring && !one.ring.includes(null)) {
        make("circle", { class: "ring", cx: x(one.ring[0]).toFixed(1), cy: y(one.ring[1]).toFixed(1), r: 8, stroke: color }, inside);
      }
    }
    for (const mark of spec.marks || []) {
      make("line", { class: "mark", x1: x(mark.x), x2: x(mark.x), y1: box.top, y2: box.bottom }, svg);
      make("text", { class: "mark-label", x: x(mark.x) + 4, y: box.top - 9, "text-anchor": "end" }, svg, mark.label);
    }
    const cursor = make("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" }, svg);
    const points = there.map((one) => one.x.map((_, n) => n).filter((n) => one.y[n] !== null));
    let [series, place, along] = [0, -1, -1];  // where the arrow keys are
    const go = (dx, dy) => {
      if (!spec.nearest) {  // along the axis in a hundred steps
        along = within(along + dx, 0, 100);
        return [box.left + along / 100 * (box.right - box.left), (box.top + box.bottom) / 2];
      }
      series = within(series + dy, 0, there.length - 1);
      if (!there.length || !points[series].length) return [-1e6, -1e6];
      place = within(place + dx, 0, points[series].length - 1);
      const n = points[series][place];
      return [x(there[series].x[n]), y(there[series].y[n])];
    };
    follow(svg, width, (px, py) => {
      if (spec.nearest) {
        let best = null, distance = 900;
        for (const one of there) one.x.forEach((value, n) => {
          if (one.y[n] === null) return;
          const away = (x(value) - px) ** 2 + (y(one.y[n]) - py) ** 2;
          if (away < distance) [distance, best] = [away, [one, n]];
        });
        if (!best) return null;
        const [one, n] = best;
        return [[one.name, one.hints && one.hints[n]].filter(Boolean).join(", "),
          `${spec.x.label}: ${shown(one.x[n], spec.x)}`, `${spec.y.label}: ${shown(one.y[n], spec.y)}`];
      }
      if (px < box.left || px > box.right) return null;
      const lines = [];
      let at = null;
      for (const one of there) {
        let best = -1;
        one.x.forEach((value, n) => { if (one.y[n] !== null && (best < 0 || Math.abs(x(value) - px) < Math.abs(x(one.x[best]) - px))) best = n; });
        if (best < 0) continue;
        if (at === null || Math.abs(x(one.x[best]) - px) < Math.abs(x(at) - px)) at = one.x[best];
        const value = one.mode === "area" && one.base === 1 ? 1 - one.y[best] : one.y[best];
        lines.push(`${one.name}: ${shown(value, spec.y)}`);
      }
      if (at === null) return null;
      cursor.setAttribute("x1", x(at)); cursor.setAttribute("x2", x(at)); cursor.setAttribute("visibility", "visible");
      return [`${spec.x.label} ${shown(at, spec.x)}`, ...lines];
    }, go, () => cursor.setAttribute("visibility", "hidden"));
    holder.append(svg);
  };

  // ---- bars ---------------------------------------------------------------------------------------------------------
  const cut = (text, most) => text.length > most ? `${text.slice(0, most - 1)}…` : text;
  const tail = (text, most) => text.length > most ? `…${text.slice(1 - most)}` : text;
  const drawBars = (holder, spec, width, hidden) => {
    const there = spec.series.filter((one) => !hidden.has(one));
    const thick = 9, gap = 8, group = Math.max(14, thick * there.length);
    const longest = Math.max(...spec.categories.map((name) => cut(name, 18).length));
    const box = { left: Math.min(18 + 7 * longest, width * 0.4), right: width - 48, top: 4 };
    const height = box.top + spec.categories.length * (group + gap) + 26;
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}` });
    const x = scaleOf({ limits: [0, spec.high] }, [], box.left, box.right);
    const bottom = height - 24;
    let category = -1;
    for (const tick of x.ticks(4)) {
      make("line", { class: "grid-line", x1: x(tick), x2: x(tick), y1: box.top, y2: bottom }, svg);
      make("text", { x: x(tick), y: height - 8, "text-anchor": "middle" }, svg, shown(tick, spec));
    }
    spec.categories.forEach((name, n) => {
      const top = box.top + n * (group + gap) + gap / 2;
      make("text", { x: box.left - 8, y: top + group / 2 + 4, "text-anchor": "end" }, svg, cut(name, 18));
      there.forEach((one, k) => {
        if (one.values[n] === null) return;
        const at = top + (group - thick * there.length) / 2 + k * thick;
        make("rect", { x: box.left, y: at, width: Math.max(1, x(one.values[n]) - box.left), height: thick - 1, fill: ink(one.color) }, svg);
      });
      const last = there[there.length - 1];
      if (last && last.values[n] !== null) {
        const end = Math.max(...there.map((one) => one.values[n] === null ? 0 : x(one.values[n])));
        make("text", { x: end + 5, y: top + group / 2 + 4 }, svg, shown(last.values[n], spec));
      }
    });
    follow(svg, width, (px, py) => {
      const n = Math.floor((py - box.top) / (group + gap));
      if (n < 0 || n >= spec.categories.length) return null;
      return [spec.categories[n], ...spec.series.map((one) => `${one.name}: ${shown(one.values[n], spec)}`)];
    }, (dx, dy) => {
      category = within(category + dx + dy, 0, spec.categories.length - 1);
      return [box.left, box.top + (category + 0.5) * (group + gap)];
    });
    holder.append(svg);
  };

  // ---- heat maps ----------------------------------------------------------------------------------------------------
  const ramps = {
    sequential: [[246, 247, 249], [253, 208, 138], [233, 125, 50], [160, 45, 20], [70, 10, 30]],
    diverging: [[0, 74, 130], [110, 175, 220], [244, 244, 244], [240, 160, 95], [170, 60, 0]],
  };
  const colorOf = (spec, value) => {
    if (value === null) return null;
    let share = spec.log ? (Math.log(Math.max(value, spec.low)) - Math.log(spec.low)) / (Math.log(spec.high) - Math.log(spec.low) || 1)
      : (value - spec.low) / (spec.high - spec.low || 1);
    share = Math.max(0, Math.min(1, share));
    const ramp = ramps[spec.scale], at = share * (ramp.length - 1), n = Math.min(ramp.length - 2, Math.floor(at));
    return ramp[n].map((from, k) => Math.round(from + (ramp[n + 1][k] - from) * (at - n)));
  };
  const css = (color) => `rgb(${color.join(",")})`;
  const drawHeat = (holder, spec, width) => {
    const rows = spec.rows.length, columns = spec.columns.length;
    const most = width < 500 ? 14 : 34;
    const longest = Math.max(...spec.rows.map((name) => Math.min(most, name.length)));
    const left = Math.min(14 + 6.7 * longest, width * 0.42), right = width - 8, top = 6;
    const cell = (right - left) / columns;
    const tall = spec.square ? Math.max(14, Math.min(cell, 34)) : Math.max(3, Math.min(16, 640 / rows));
    const height = top + tall * rows + (spec.square ? 64 : 44), bottom = top + tall * rows;
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}` });
    const canvas = document.createElement("canvas"), fine = 2;
    canvas.width = Math.ceil((right - left) * fine); canvas.height = Math.ceil(tall * rows * fine);
    const paint = canvas.getContext("2d");
    spec.values.forEach((line, r) => line.forEach((value, c) => {
      const color = colorOf(spec, value);
      if (!color) return;
      paint.fillStyle = css(color);
      const x0 = Math.floor(c * canvas.width / columns), x1 = Math.floor((c + 1) * canvas.width / columns);
      const y0 = Math.floor(r * canvas.height / rows), y1 = Math.floor((r + 1) * canvas.height / rows);
      paint.fillRect(x0, y0, x1 - x0, y1 - y0);
    }));
    make("image", { href: canvas.toDataURL(), x: left, y: top, width: right - left, height: tall * rows, preserveAspectRatio: "none" }, svg);
    make("rect", { class: "frame", x: left, y: top, width: right - left, height: tall * rows }, svg);
    const every = Math.ceil(13 / tall);
    let [row, column] = [0, -1];
    spec.rows.forEach((name, r) => {
      if (r % every === 0) make("text", { x: left - 6, y: top + (r + 0.5) * tall + 4, "text-anchor": "end" }, svg, spec.square ? cut(name, most) : tail(name, most));
    });
    const room = spec.square ? 20 : 60, apart = Math.max(1, Math.ceil(room / cell));
    spec.columns.forEach((name, c) => {
      if (c % apart) return;
      const x = left + (c + 0.5) * cell, y = bottom + 15;
      if (spec.square) make("text", { x, y, "text-anchor": "end", transform: `rotate(-38 ${x} ${y})` }, svg, cut(name, 10));
      else make("text", { x, y, "text-anchor": "middle" }, svg, name);
    });
    make("text", { x: (left + right) / 2, y: height - 3, "text-anchor": "middle" }, svg, spec.xlabel);
    if (spec.numbers && cell >= 24) spec.values.forEach((line, r) => line.forEach((value, c) => {
      if (value === null || value < 0.005) return;
      const text = make("text", { x: left + (c + 0.5) * cell, y: top + (r + 0.5) * tall + 4, "text-anchor": "middle" }, svg, Math.round(100 * value));
      text.style.fill = value > 0.5 ? "#fff" : "#222";
    }));
    follow(svg, width, (px, py) => {
      const c = Math.floor((px - left) / cell), r = Math.floor((py - top) / tall);
      if (c < 0 || c >= columns || r < 0 || r >= rows) return null;
      return [spec.rows[r], `${spec.xlabel} ${spec.columns[c]}`, shown(spec.values[r][c], spec)];
    }, (dx, dy) => {
      [row, column] = [within(row + dy, 0, rows - 1), within(column + dx, 0, columns - 1)];
      return [left + (column + 0.5) * cell, top + (row + 0.5) * tall];
    });
    const scale = element("div", "scale", holder);
    element("span", "", scale, shown(spec.low, spec));
    const stops = ramps[spec.scale].map(css).join(",");
    element("i", "", scale).style.background = `linear-gradient(90deg,${stops})`;
    element("span", "", scale, shown(spec.high, spec) + (spec.log ? " (log)" : ""));
    holder.append(svg);
  };

  // ---- all of them --------------------------------------------------------------------------------------------------
  const draw = { xy: drawXY, bars: drawBars, heat: drawHeat };
  const swatch = (one) => {
    const wide = one.dash ? 44 : 22, color = ink(one.color);
    const svg = make("svg", { viewBox: `0 0 ${wide} 12`, "aria-hidden": "true", class: one.dash ? "dashed" : "" });
    if (one.values || one.mode === "area") make("rect", { x: 3, y: 1, width: 16, height: 10, fill: color }, svg);
    else if (one.mode === "points") make("circle", { cx: 11, cy: 6, r: 4, fill: color }, svg);
    else make("line", { x1: 0, x2: wide, y1: 6, y2: 6, stroke: color, "stroke-width": 3, ...(one.dash ? { "stroke-dasharray": one.dash } : {}) }, svg);
    return svg;
  };
  const charts = [...document.querySelectorAll(".chart")].map((holder) => {
    const spec = JSON.parse(holder.querySelector("script").textContent), hidden = new Set();
    const figure = holder.closest("figure");
    const says = `${figure.querySelector(".title").textContent}. ${figure.querySelector("figcaption").textContent}`;
    let legend = null;
    if (spec.series && spec.series.length > 1) {
      legend = element("div", "legend", holder);
      for (const one of spec.series) {
        const button = element("button", "", legend);
        button.type = "button";
        button.append(swatch(one), one.name);
        button.setAttribute("aria-pressed", "true");
        button.addEventListener("click", () => {
          if (!hidden.delete(one)) hidden.add(one);
          button.setAttribute("aria-pressed", String(!hidden.has(one)));
          chart.redraw();
        });
      }
    }
    const chart = {
      width: 0,
      redraw() {
        for (const child of [...holder.children]) if (child.tagName !== "SCRIPT" && child !== legend) child.remove();
        draw[spec.kind](holder, spec, chart.width, hidden);
        const svg = holder.querySelector(":scope > svg");
        svg.setAttribute("role", "img");
        svg.setAttribute("tabindex", "0");
        svg.setAttribute("aria-label", says);
      },
      isWide: () => figure.matches(".wide, :only-child"),
      fit(width = Math.round(holder.clientWidth)) {
        if (!width || Math.abs(width - chart.width) < 2) return;
        chart.width = width;
        chart.redraw();
      },
    };
    chart.fit();
    return chart;
  });
  let waiting = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => charts.forEach((chart) => chart.fit()));
  });
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const one of folded) one.open = true;
    for (const chart of charts) chart.fit(chart.isWide() ? PAPER : PAPER / 2);
  });
  addEventListener("afterprint", () => {
    for (const one of folded) one.open = false;
    for (const chart of charts) chart.fit();
  });
})();
