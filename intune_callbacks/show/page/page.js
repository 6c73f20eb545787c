// Gives plotly the figures; what they say of the decision at the pointer is said in each of their plots.
(() => {
  "use strict";
  const config = { displayModeBar: false, responsive: true, doubleClick: "reset" };
  const printed = { width: 690, height: 980 }; // of a sheet of A4
  const figures = JSON.parse(document.getElementById("data").textContent);
  const places = Object.keys(figures).map((key) => document.getElementById(key));

  for (const place of places) {
    const { data, layout, times, told } = figures[place.id];
    for (const trace of data) if (typeof trace.x === "string") trace.x = times[trace.x];
    if (told) {
      const y = told.x.map(() => 0);
      const axes = new Map(data.map(({ xaxis, yaxis }) => [xaxis, { xaxis, yaxis }]));
      data.unshift(...[...axes.values()].map((of) => ({ ...told, ...of, y })));
    }
    if (matchMedia("(pointer: coarse)").matches) layout.dragmode = false; // a finger scrolls the page
    Plotly.newPlot(place, data, layout, config);
  }
  performance.mark("drawn");
  document.documentElement.dataset.drawn = places.length;

  const resize = (size) => places.forEach((place) => Plotly.relayout(place, size(figures[place.id].layout.height)));
  addEventListener("beforeprint", () => resize((height) => ({ ...printed, height: Math.min(height, printed.height) })));
  addEventListener("afterprint", () => resize((height) => ({ width: null, height, autosize: true })));
})();
