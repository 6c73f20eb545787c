// Draws the plots, keeps their time axes together, and tells at the pointer what was decided and why.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const tip = document.getElementById("tip");
  const NEAR_PX = 7; // a mark this near to the pointer is what is meant
  const config = { displayModeBar: false, responsive: true, doubleClick: "reset" };
  const coarse = matchMedia("(pointer: coarse)").matches;
  const places = Object.keys(data.figures || {}).map((key) => document.getElementById(key));

  // ---- colours and columns

  const resolved = (value, style, key) => {
    if (key === "meta") return value;
    if (typeof value === "string") {
      if (value.startsWith("--")) return style.getPropertyValue(value).trim();
      return value.startsWith("@") ? data.columns[value.slice(1)] : value;
    }
    if (Array.isArray(value)) return value.map((one) => resolved(one, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, resolved(one, style, name)]));
  };

  const figure = (place) => {
    const made = resolved(data.figures[place.id], getComputedStyle(root));
    made.layout.dragmode = coarse ? false : "zoom"; // a finger scrolls the page
    made.layout.xaxis.nticks = Math.max(3, Math.floor(place.clientWidth / 90));
    made.layout.width = place.clientWidth;
    if (place.shown) made.layout.xaxis.range = place.shown;
    return made;
  };

  const draw = (place) => {
    const { data: traces, layout } = figure(place);
    return Plotly.react(place, traces, layout, { ...config, responsive: false });
  };

  // ---- theme

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const redraw = () => places.forEach(draw);
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    redraw();
  });
  dark.addEventListener("change", redraw);
  let chosen;
  addEventListener("beforeprint", () => {
    chosen = root.dataset.theme;
    root.dataset.theme = "light";
    root.classList.add("printing");
    redraw();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    if (chosen === undefined) delete root.dataset.theme;
    else root.dataset.theme = chosen;
    redraw();
  });

  // ---- the tooltip: text nodes only, never markup

  const line = (className, text, parent = tip) => {
    const made = document.createElement("div");
    made.className = className;
    made.textContent = text;
    parent.append(made);
    return made;
  };

  const nearest = (times, x) => {
    let low = 0;
    let high = times.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (times[middle] < x) low = middle;
      else high = middle;
    }
    return high < 0 ? -1 : Math.abs(times[low] - x) <= Math.abs(times[high] - x) ? low : high;
  };

  // The decision nearest in time; an eventful one wins if it is near enough to be what is pointed at.
  const decisionAt = (x, perPx) => {
    const times = data.columns.t;
    const at = nearest(times, x);
    let best = at;
    let reach = NEAR_PX * perPx;
    for (const step of [-1, 1]) {
      for (let i = at; i >= 0 && i < times.length && Math.abs(times[i] - x) <= reach; i += step) {
        if (!data.decisions.kinds[i]) continue;
        best = i;
        reach = Math.abs(times[i] - x);
        break;
      }
    }
    return best;
  };

  const whenOf = (time, unit) => {
    if (unit === "s") return `${time.toPrecision(3)} s`;
    const whole = Math.floor(time);
    const rest = Math.floor((time - whole) * 60);
    return `${whole} ${unit} ${rest} ${unit === "h" ? "min" : "s"}`;
  };

  const shown = (value, axis) => {
    if (value === null || value === undefined) return "–";
    if (axis.tickformat === ".0%") return (value * 100).toFixed(value < 0.1 ? 1 : 0) + " %";
    return value.toLocaleString("en", { maximumSignificantDigits: 4 }).replaceAll(",", " ");
  };

  const tell = (place, event) => {
    const x = event.xvals ? event.xvals[0] : event.points[0].x;
    const axis = event.points[0].xaxis;
    const spec = data.figures[place.id];
    tip.replaceChildren();
    if (data.decisions && spec.data[0].x !== "@t0") {
      const of = data.decisions;
      const at = decisionAt(x, (axis.range[1] - axis.range[0]) / axis._length);
      const step = of.step[at] === null ? "" : ` · step ${of.step[at].toLocaleString("en").replaceAll(",", " ")}`;
      line("when", `${whenOf(data.columns.t[at], data.unit)}${step}`);
      of.names.forEach((name, bit) => of.kinds[at] & (1 << bit) && line("kind", name));
      if (of.change[at]) line("change", of.texts[of.change[at]]);
      if (of.reason[at]) line("reason", of.texts[of.reason[at]]);
      if (of.refused[at]) line("refused", "refused: " + of.texts[of.refused[at]]);
      if (of.kinds[at] && of.effect[at] !== null) line("effect", `then × ${of.effect[at].toFixed(2)} samples/s`);
    } else {
      line("when", whenOf(x, axis.ticksuffix.trim()));
    }
    const values = line("values", "");
    for (const trace of spec.data) {
      if (trace.mode !== "lines") continue;
      const at = nearest(data.columns[trace.x.slice(1)], x);
      const value = at < 0 ? null : data.columns[trace.y.slice(1)][at];
      const row = line("value", "", values);
      line("dot", "", row).style.background = `var(${trace.line.color})`;
      line("label", trace.meta.label, row);
      line("number", shown(value, spec.layout.yaxis), row);
    }
    tip.hidden = false;
    const { clientX, clientY } = event.event;
    const left = clientX + 16 + tip.offsetWidth > innerWidth - 8 ? clientX - 16 - tip.offsetWidth : clientX + 16;
    const top = Math.min(clientY + 14, innerHeight - tip.offsetHeight - 8);
    tip.style.transform = `translate(${Math.max(8, left)}px, ${Math.max(8, top)}px)`;
  };

  // ---- all plots of one page show the same stretch of time

  const follow = (place, event) => {
    const range = event["xaxis.range"] || [event["xaxis.range[0]"], event["xaxis.range[1]"]];
    const same = (other) => other.shown && other.shown[0] === range[0] && other.shown[1] === range[1];
    if (range[0] === undefined || same(place)) return; // the second is the echo of what is done below
    place.shown = range;
    for (const other of places) {
      if (same(other)) continue;
      other.shown = range;
      Plotly.relayout(other, { "xaxis.range": range.slice() });
    }
  };

  // ---- begin: one plot after the other, so that what is read first is there first

  const begin = (at) => {
    const place = places[at];
    if (!place) {
      performance.mark("drawn");
      root.dataset.drawn = String(places.length);
      return;
    }
    draw(place);
    place.on("plotly_hover", (event) => tell(place, event));
    place.on("plotly_unhover", () => (tip.hidden = true));
    place.on("plotly_relayout", (event) => follow(place, event));
    setTimeout(begin, 0, at + 1);
  };

  let width = innerWidth;
  let later;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(later);
    later = setTimeout(redraw, 100);
  });
  const away = () => {
    if (tip.hidden) return;
    tip.hidden = true;
    // Or the same decision would not be told again: Plotly only reports another one.
    places.forEach((place) => Plotly.Fx.unhover(place));
  };
  addEventListener("scroll", away, { passive: true });
  begin(0);
})();
