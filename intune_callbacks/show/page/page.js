// Gives plotly the figures; what they say of the decision at the pointer is said in each of their plots.
(() => {
  "use strict";
  const config = { displayModeBar: false, responsive: true, doubleClick: "reset" };
  const figures = JSON.parse(document.getElementById("data").textContent);
  const places = Object.keys(figures).map((key) => document.getElementById(key));

  for (const place of places) {
    const { data, layout, times, hover } = figures[place.id];
    for (const trace of data) if (typeof trace.x === "string") trace.x = times[trace.x];
    if (hover) {
      const y = hover.x.map(() => 0);
      hover.text = hover.text.map((text) => text.replaceAll("\n", "<br>")); // each is six letters in a script
      const axes = new Map(data.map(({ xaxis, yaxis }) => [xaxis, { xaxis, yaxis }]));
      data.unshift(...[...axes.values()].map((of) => ({ ...hover, ...of, y })));
    }
    if (matchMedia("(pointer: coarse)").matches) layout.dragmode = false; // a finger scrolls the page
    Plotly.newPlot(place, data, layout, config);
  }
  performance.mark("drawn");
  document.documentElement.dataset.drawn = places.length;

  const resize = (width, most, letters) => {
    for (const place of places) {
      const height = Math.min(Number(place.dataset.height), most);
      place.style.height = `${height}px`;
      Plotly.relayout(place, { width, height, autosize: width === null, "font.size": letters });
    }
  };
  addEventListener("beforeprint", () => resize(690, 910, 10)); // a sheet of A4
  addEventListener("afterprint", () => resize(null, Infinity, 12));
})();
