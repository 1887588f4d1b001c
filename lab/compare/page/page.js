document.querySelectorAll("table.sortable").forEach((table) => {
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
  }
  titles.forEach((title, column) => title.firstElementChild.addEventListener("click", () => {
    const now = title.getAttribute("aria-sort");
    sort(column, now ? now === "ascending" : !title.classList.contains("text"));
  }));
});

document.querySelectorAll(".plotly-graph-div").forEach((plot) => {
  // On a phone, the legend is below the panels, because it would need most of the width beside them.
  if (innerWidth <= 700) Plotly.relayout(plot, { "legend.orientation": "h", "legend.y": -0.03, "legend.yanchor": "top", "margin.l": 50, "margin.r": 10 });
});
