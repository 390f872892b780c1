// Draws the figure that each .chart holds, in the page's colours; the arrow keys show its values.
"use strict";
(() => {
  const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const within = (value, high) => Math.max(0, Math.min(high, value));
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const charts = [...document.querySelectorAll(".chart")].map((holder) => {
    const source = holder.querySelector("script");
    source.remove();
    return [holder, JSON.parse(source.textContent)];
  });

  const layoutOf = (own, ink) => {
    const axis = { gridcolor: ink("--line"), zerolinecolor: ink("--line"), automargin: true, exponentformat: "power" };
    const font = { color: ink("--soft"), family: "system-ui, sans-serif", size: 12 };
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font, margin: { l: 56, r: 16, t: 24, b: 44 },
      xaxis: axis, yaxis: axis, legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
      hoverlabel: { bgcolor: ink("--page"), font: { color: ink("--ink") }, namelength: -1 },
      dragmode: isTouch ? false : "zoom",  // a finger scrolls the page
    };
    return { ...own, template: { layout } };
  };
  const draw = (widthOf) => {
    const style = getComputedStyle(document.documentElement);
    const ink = (name) => style.getPropertyValue(name).trim();
    for (const [holder, { data, layout }] of charts) {
      const shown = data.map((one) => one.line?.color === "#000000"
        ? { ...one, line: { ...one.line, color: ink("--ink") }, marker: { ...one.marker, color: ink("--ink") } } : one);
      const width = widthOf ? { width: widthOf(holder) } : {};
      Plotly.react(holder, shown, { ...layoutOf(layout, ink), ...width }, { responsive: true, displayModeBar: false });
    }
  };

  const follow = (holder, data) => {
    let [row, column] = [0, -1];  // of a heat map, else series and point
    holder.addEventListener("keydown", (event) => {
      if (event.key === "Escape") Plotly.Fx.unhover(holder);
      if (!(event.key in ARROWS) || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      const [dx, dy] = ARROWS[event.key], isHeat = data[0].type === "heatmap";
      row = within(row + dy, (isHeat ? data[0].z.length : data.length) - 1);
      column = within(column + dx, (isHeat ? data[0].z[row] : data[row].x).length - 1);
      if (isHeat) Plotly.Fx.hover(holder, { xval: column, yval: row }, "xy");
      else Plotly.Fx.hover(holder, [{ curveNumber: row, pointNumber: column }]);
    });
    holder.addEventListener("blur", () => Plotly.Fx.unhover(holder));
  };

  draw();
  charts.forEach(([holder, { data }]) => follow(holder, data));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  const PAPER = 700;  // CSS pixels across A4
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((one) => { one.open = true; });
    draw((holder) => holder.closest("figure").matches(".wide, :only-child") ? PAPER : PAPER / 2 - 14);
  });
  addEventListener("afterprint", () => draw());
})();
