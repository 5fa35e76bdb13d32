"use strict";

// Sorting: by the numbers behind the cells; what has none, such as a cell that failed, stays last.
for (const table of document.querySelectorAll(".sortable table")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const words = head.dataset.words !== undefined;
      const first = words ? "ascending" : "descending";
      const second = words ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? second : first;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...body.rows].map((row) => {
        const text = row.cells[column]?.dataset.value ?? "";
        const last = row.dataset.failed !== undefined || text === "";
        return { row, last, value: words ? text : Number(text) };
      });
      rows.sort((a, b) => {
        if (a.last !== b.last) return a.last ? 1 : -1;
        if (a.last) return 0;
        return sign * (words ? a.value.localeCompare(b.value, "en", { numeric: true }) : a.value - b.value);
      });
      body.append(...rows.map((entry) => entry.row));
    });
  });
}

// A browser shows a title only to a mouse, and late: this shows it at once, and to a finger.
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);
for (const title of document.querySelectorAll("svg title")) {
  title.parentElement.dataset.tip = title.textContent;
  title.remove();
}
for (const mark of document.querySelectorAll("[title]")) {
  mark.dataset.tip = mark.title;
  mark.removeAttribute("title");
}
document.addEventListener("pointermove", show);
document.addEventListener("pointerdown", show);
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

function show(event) {
  const mark = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
  tip.hidden = mark === null;
  if (mark === null) return;
  tip.textContent = mark.dataset.tip;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, window.innerWidth - width - 4))}px`;
  tip.style.top = `${Math.max(4, event.clientY - height - 12)}px`;
}

// The page carries its own figures: it can be passed on alone.
const data = new Blob([document.getElementById("results").textContent], { type: "application/json" });
document.getElementById("download").href = URL.createObjectURL(data);
