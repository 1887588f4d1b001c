// Store the reader's choices (sorting, zoom, hidden runs) in the browser's session, because a page about running runs reloads itself.
const place = "report:" + location.pathname;
const choices = JSON.parse(sessionStorage.getItem(place) || "{}");
function keep(key, value) {
  choices[key] = value;
  sessionStorage.setItem(place, JSON.stringify(choices));
}

document.querySelectorAll("table.sortable").forEach((table, number) => {
  const titles = [...table.tHead.rows[0].cells];
  function sort(column, down) {
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [a, b].map((row) => row.cells[column].dataset.value);
      if (x === "" || y === "") return (x === "") - (y === "");  // Rows without a value are last in both directions.
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, "en", { numeric: true }) : x - y;
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows);
    titles.forEach((title, i) => i === column ? title.setAttribute("aria-sort", down ? "descending" : "ascending") : title.removeAttribute("aria-sort"));
    keep("table" + number, [column, down]);
  }
  titles.forEach((title, column) => title.firstElementChild.addEventListener("click", () => {
    const now = title.getAttribute("aria-sort");
    sort(column, now ? now === "ascending" : !title.classList.contains("text"));
  }));
  if (choices["table" + number]) sort(...choices["table" + number]);
});

document.querySelectorAll(".plotly-graph-div").forEach((plot) => {
  // On a phone, the legend is below the panels, because it would need most of the width beside them.
  if (innerWidth <= 700) Plotly.relayout(plot, { "legend.orientation": "h", "legend.y": -0.03, "legend.yanchor": "top", "margin.l": 50, "margin.r": 10 });
  const before = choices[plot.id];
  if (before && before.visible.length === plot.data.length) {
    Plotly.relayout(plot, before.ranges);
    Plotly.restyle(plot, { visible: before.visible });
  }
  const note = () => {
    const zoomed = Object.entries(plot.layout).filter(([key, axis]) => /^[xy]axis/.test(key) && axis.range && !axis.autorange);
    const ranges = Object.fromEntries(zoomed.map(([key, axis]) => [key + ".range", axis.range]));
    keep(plot.id, { ranges, visible: plot.data.map((trace) => trace.visible ?? true) });
  };
  plot.on("plotly_relayout", note);
  plot.on("plotly_restyle", note);
});
