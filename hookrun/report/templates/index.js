"use strict";
(() => {
  // Without this script the page is a plain table. The URL holds search, filters and order, so that it can be shared.
  const table = document.querySelector("table"), body = table.tBodies[0], rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells], names = heads.map(head => head.textContent.trim());
  let kept;
  const texts = () => kept ??= rows.map(row => [...row.cells].map(cell => cell.textContent.trim())); // once it is needed
  const search = document.querySelector("#filter"), shown = document.querySelector("#shown");
  let sorted = "";

  const collator = new Intl.Collator(undefined, {numeric: true});
  const number = text => text === "" || text === "–" ? NaN : Number(text.replaceAll(",", ""));
  const sort = (name, descending) => {
    const column = names.indexOf(name);
    if (column < 0) return;
    const values = texts().map(cells => cells[column]), numbers = values.map(number);
    const isMissing = n => values[n] === "" || values[n] === "–" || values[n] === "NaN";
    const order = rows.map((_, n) => n).sort((a, b) => {
      if (isMissing(a) !== isMissing(b)) return isMissing(a) - isMissing(b); // they come last in both directions
      const both = !Number.isNaN(numbers[a]) && !Number.isNaN(numbers[b]);
      const by = both ? numbers[a] - numbers[b] : collator.compare(values[a], values[b]);
      return (descending ? -by : by) || a - b;
    });
    body.append(...order.map(n => rows[n]));
    heads.forEach(head => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", descending ? "descending" : "ascending");
    sorted = (descending ? "-" : "") + name;
  };

  const condition = typed => {
    const sign = typed[0], text = typed.slice(1).trim(), limit = number(text);
    if (sign === "=") return value => value === text;
    if ("<>".includes(sign) && !Number.isNaN(limit)) return value => sign === "<" ? number(value) < limit : number(value) > limit;
    return value => value.toLowerCase().includes(typed.toLowerCase());
  };
  const fields = heads.map((head, column) => {
    const field = document.createElement("input");
    field.type = "search";
    field.setAttribute("aria-label", `filter ${names[column]}`);
    field.addEventListener("focus", () => { // the values to choose from, where there are few
      const values = [...new Set(texts().map(cells => cells[column]))], list = document.createElement("datalist");
      if (values.length > 40) return;
      list.id = `values${column}`;
      list.append(...values.filter(Boolean).sort(collator.compare).map(value => new Option("", value)));
      document.body.append(list);
      field.setAttribute("list", list.id);
    }, {once: true});
    return field;
  });
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean), cells = texts();
    const typed = fields.map(field => field.value.trim()), conditions = typed.map(text => text && condition(text));
    let count = 0;
    rows.forEach((row, n) => {
      const whole = words.length ? cells[n].join("\n").toLowerCase() : "";
      const fits = words.every(word => whole.includes(word)) && conditions.every((of, column) => !of || of(cells[n][column]));
      if (row.hidden === fits) row.hidden = !fits;
      count += fits;
    });
    shown.textContent = count === rows.length ? "" : `${count} of ${rows.length} runs`;
  };
  const keep = () => {
    const parts = new URLSearchParams();
    if (sorted) parts.set("sort", sorted);
    if (search.value) parts.set("search", search.value);
    fields.forEach((field, column) => { if (field.value.trim()) parts.set(`in ${names[column]}`, field.value.trim()); });
    history.replaceState(null, "", parts.size ? `#${parts}` : location.pathname + location.search);
  };

  let waiting = 0;
  const typed = () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { filter(); keep(); }, rows.length > 1000 ? 150 : 0);
  };
  search.addEventListener("input", typed);
  const line = table.tHead.insertRow();
  line.className = "fields";
  fields.forEach(field => {
    field.addEventListener("input", typed);
    line.append(document.createElement("th"));
    line.lastChild.append(field);
  });
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = names[column];
    head.dataset.sort = names[column];
    head.replaceChildren(button);
    button.addEventListener("click", () => { sort(names[column], head.getAttribute("aria-sort") === "ascending"); keep(); });
  });
  search.hidden = document.querySelector("#how").hidden = false;

  const asked = new URLSearchParams(location.hash.slice(1)), by = asked.get("sort");
  if (by) sort(by.replace(/^-/, ""), by.startsWith("-"));
  search.value = asked.get("search") ?? "";
  fields.forEach((field, column) => { field.value = asked.get(`in ${names[column]}`) ?? ""; });
  if (asked.size) filter();
})();
