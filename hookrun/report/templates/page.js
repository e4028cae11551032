"use strict";
(() => {
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

  // Charts: what stands under the pointer.
  const tip = document.createElement("div");
  tip.className = "tip";
  for (const svg of all("svg[data-hover]")) {
    let points = null, cursor = null;
    const leave = () => { tip.remove(); cursor?.remove(); };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", event => {
      points ??= JSON.parse(svg.dataset.hover);
      if (!points.x.length) return;
      const box = svg.getBoundingClientRect();
      const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      let near = 0;
      points.x.forEach((x, n) => { if (Math.abs(x - at) < Math.abs(points.x[near] - at)) near = n; });
      cursor ??= document.createElementNS("http://www.w3.org/2000/svg", "path");
      cursor.setAttribute("class", "cursor");
      cursor.setAttribute("d", `M${points.x[near]} 10V194`);
      svg.append(cursor);
      tip.textContent = points.t[near];
      document.body.append(tip);
      const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 6);
      tip.style.left = `${Math.max(left, 6)}px`;
      tip.style.top = `${Math.max(event.clientY - tip.offsetHeight - 12, 6)}px`;
    });
  }

  // Tables: sorted by a click on a head, filtered by words; both stand in the address, which can be passed on.
  const table = document.querySelector("table[data-jobs]");
  if (table) {
    const body = table.tBodies[0], heads = all("th[data-sort]", table), input = document.querySelector("#filter");
    const shown = document.querySelector("#shown");
    let sorted = "";
    const value = (row, column) => row.cells[column].dataset.v ?? row.cells[column].textContent.trim();
    const number = text => ({inf: Infinity, "-inf": -Infinity})[text] ?? (text === "" ? NaN : Number(text));
    const compare = (a, b) => {
      const [x, y] = [number(a), number(b)];
      if (!Number.isNaN(x) && !Number.isNaN(y)) return x === y ? 0 : x - y;
      return String(a).localeCompare(String(b), undefined, {numeric: true});
    };
    const sort = (name, descending) => {
      const head = heads.find(each => each.dataset.sort === name);
      if (!head) return;
      const rows = [...body.rows];
      const isMissing = row => ["", "nan"].includes(value(row, head.cellIndex));
      rows.sort((a, b) => isMissing(a) - isMissing(b) // what is missing stands last, whichever the direction
        || (descending ? -1 : 1) * compare(value(a, head.cellIndex), value(b, head.cellIndex)));
      body.append(...rows);
      heads.forEach(each => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sorted = (descending ? "-" : "") + name;
    };
    const filter = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every(word => text.includes(word));
        count += !row.hidden;
      }
      shown.textContent = count === body.rows.length ? "" : `${count} of ${body.rows.length} jobs`;
    };
    const keep = () => {
      const parts = new URLSearchParams();
      if (sorted) parts.set("sort", sorted);
      if (input.value) parts.set("filter", input.value);
      history.replaceState(null, "", parts.size ? `#${parts}` : location.pathname + location.search);
    };
    heads.forEach(head => head.firstElementChild.addEventListener("click", () => {
      sort(head.dataset.sort, head.getAttribute("aria-sort") === "ascending");
      keep();
    }));
    input.addEventListener("input", () => { filter(); keep(); });
    const asked = new URLSearchParams(location.hash.slice(1)), by = asked.get("sort");
    if (by) sort(by.replace(/^-/, ""), by.startsWith("-"));
    if (asked.get("filter")) { input.value = asked.get("filter"); filter(); }
  }

  for (const button of all("button[data-copy]")) {
    button.addEventListener("click", async () => {
      const source = button.parentElement.querySelector("pre");
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "copied";
      } catch { // not allowed here: select it instead
        getSelection().selectAllChildren(source);
      }
    });
  }
  for (const button of all("button[data-unfold]")) {
    button.addEventListener("click", () => {
      document.querySelector(button.dataset.unfold).classList.remove("folded");
      button.remove();
    });
  }
})();
