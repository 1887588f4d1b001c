// What a reader has chosen is kept while the page is open, as one that is followed reads itself again: sorting, zoom, hidden runs.
const place = "report:" + location.pathname;
const chosen = JSON.parse(sessionStorage.getItem(place) || "{}");
function keep(what, value) {
  chosen[what] = value;
  sessionStorage.setItem(place, JSON.stringify(chosen));
}

document.querySelectorAll("table.sortable").forEach((table, number) => {
  const titles = [...table.tHead.rows[0].cells];
  function sort(column, down) {
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [a, b].map((row) => row.cells[column].dataset.value);
      if (x === "" || y === "") return (x === "") - (y === "");  // what is not known stands last, either way
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
  if (chosen["table" + number]) sort(...chosen["table" + number]);
});

document.querySelectorAll(".plotly-graph-div").forEach((plot) => {
  const before = chosen[plot.id];
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
