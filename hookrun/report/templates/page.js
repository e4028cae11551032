"use strict";
(() => {
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

  // Charts: the values under the pointer.
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

  // Tables: sorted by a click on a column's title, filtered by words; the URL holds both, so it can be shared.
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
      rows.sort((a, b) => isMissing(a) - isMissing(b) // missing values come last in both directions
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

  // Pictures with more columns than are shown at a time.
  for (const line of all("[data-pages]")) {
    const image = line.previousElementSibling.querySelector("img:not(.input)"), text = document.createElement("span");
    const pages = [{src: image.src, says: line.textContent}, ...JSON.parse(line.dataset.pages)];
    const turn = document.createElement("span");
    turn.className = "page-of";
    let at = 0;
    const buttons = [["‹", "earlier", -1], ["›", "later", 1]].map(([sign, word, step]) => {
      const button = document.createElement("button");
      button.textContent = sign;
      button.setAttribute("aria-label", `${word} ones`);
      button.addEventListener("click", () => { at += step; show(); });
      return button;
    });
    const show = () => {
      image.src = pages[at].src;
      text.textContent = pages[at].says;
      buttons[0].disabled = at === 0;
      buttons[1].disabled = at === pages.length - 1;
    };
    turn.append(...buttons);
    line.replaceChildren(text, turn);
    text.setAttribute("aria-live", "polite");
    show();
  }

  // One sample at a time, through all layers of a hook.
  for (const box of all(".samples")) {
    const samples = all(":scope > details", box), bar = document.createElement("div"), menu = document.createElement("select");
    menu.append(...samples.map(each => new Option(each.querySelector("summary").textContent)));
    menu.setAttribute("aria-label", "sample");
    const show = at => {
      samples.forEach((each, n) => { each.open = n === at; });
      menu.selectedIndex = at;
      buttons.forEach(({button, step}) => { button.disabled = !samples[at + step]; });
    };
    const buttons = [["‹", "previous", -1], ["›", "next", 1]].map(([sign, word, step]) => {
      const button = document.createElement("button");
      button.className = "plain";
      button.textContent = sign;
      button.setAttribute("aria-label", `${word} sample`);
      button.addEventListener("click", () => show(menu.selectedIndex + step));
      return {button, step};
    });
    menu.addEventListener("change", () => show(menu.selectedIndex));
    bar.className = "chooser";
    bar.append(buttons[0].button, menu, buttons[1].button);
    box.prepend(bar);
    box.classList.add("chosen");
    show(0);
  }

  // Maps over pictures: how strongly they cover them.
  for (const slider of all("[data-strength]")) {
    slider.addEventListener("input", () => slider.closest(".overlays").style.setProperty("--strength", slider.value));
  }

  // Saving a figure: what the page shows of it, drawn again onto a canvas of twice its size.
  const HIDDEN = "button, details, label, .page-of";
  const styled = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "stroke-linecap", "opacity",
    "font-family", "font-size", "font-weight", "text-anchor"];
  const loaded = address => new Promise((done, failed) => {
    const image = new Image();
    image.onload = () => done(image);
    image.onerror = failed;
    image.src = address;
  });
  const asImage = svg => {
    const copy = svg.cloneNode(true), mine = [svg, ...svg.querySelectorAll("*")], its = [copy, ...copy.querySelectorAll("*")];
    mine.forEach((each, n) => {
      const style = getComputedStyle(each);
      for (const name of styled) its[n].style.setProperty(name, style.getPropertyValue(name));
    });
    copy.removeAttribute("data-hover");
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    const box = svg.getBoundingClientRect();
    copy.setAttribute("width", box.width * 2);
    copy.setAttribute("height", box.height * 2);
    return loaded(`data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`);
  };
  const drawn = async figure => {
    const frame = figure.getBoundingClientRect(), canvas = document.createElement("canvas"), pen = canvas.getContext("2d");
    const ends = all("*", figure).filter(each => !each.closest(HIDDEN)).map(each => each.getBoundingClientRect());
    const height = Math.max(...ends.map(box => box.bottom)) - frame.top + 12;
    const width = Math.max(frame.width, ...ends.map(box => box.right - frame.left + 8));
    const scale = Math.min(2, 8000 / width, 8000 / height);
    [canvas.width, canvas.height] = [width * scale, height * scale];
    pen.scale(scale, scale);
    pen.imageSmoothingEnabled = false;
    pen.fillStyle = getComputedStyle(figure).backgroundColor;
    pen.fillRect(0, 0, width, height);
    const walk = async node => {
      if (node.nodeType === Node.TEXT_NODE) return write(node);
      if (node.nodeType !== Node.ELEMENT_NODE || node.matches(HIDDEN)) return;
      const box = node.getBoundingClientRect(), style = getComputedStyle(node);
      const [x, y] = [box.left - frame.left, box.top - frame.top];
      if (node.localName === "svg") return pen.drawImage(await asImage(node), x, y, box.width, box.height);
      if (node.localName === "img") {
        const fit = style.objectFit === "contain" ? Math.min(box.width / node.naturalWidth, box.height / node.naturalHeight) : 0;
        const [w, h] = fit ? [node.naturalWidth * fit, node.naturalHeight * fit] : [box.width, box.height];
        return pen.drawImage(node, x, y, w, h);
      }
      const stops = style.backgroundImage.match(/rgb\([^)]*\)/g);
      if (node !== figure) {
        pen.fillStyle = style.backgroundColor;
        if (stops) {
          pen.fillStyle = pen.createLinearGradient(x, y, x + box.width, y);
          stops.forEach((colour, n) => pen.fillStyle.addColorStop(n / (stops.length - 1), colour));
        }
        for (const each of node.getClientRects()) {
          pen.fillRect(each.left - frame.left, each.top - frame.top, each.width, each.height);
        }
      }
      for (const child of node.childNodes) await walk(child);
    };
    const write = node => {
      const style = getComputedStyle(node.parentElement), range = document.createRange();
      pen.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
      pen.fillStyle = style.color;
      pen.textBaseline = "middle";
      let line = "", at = null;
      const put = () => { if (line.trim()) pen.fillText(line.trim(), at.left - frame.left, (at.top + at.bottom) / 2 - frame.top); };
      let offset = 0;
      for (const letter of node.textContent) { // a line ends where the browser has put the next letter lower
        range.setStart(node, offset);
        offset += letter.length;
        range.setEnd(node, offset);
        const [box] = range.getClientRects();
        if (!box || (!line && !letter.trim())) continue;
        if (at && Math.abs(box.top - at.top) > 3) { put(); line = ""; at = null; if (!letter.trim()) continue; }
        at ??= box;
        line += letter;
      }
      if (at) put();
    };
    await walk(figure);
    return canvas;
  };
  for (const button of all("button[data-save]")) {
    button.addEventListener("click", async () => {
      const link = document.createElement("a");
      link.href = (await drawn(button.closest("figure"))).toDataURL("image/png");
      link.download = `${button.dataset.save.replace(/[^\p{L}\p{N}]+/gu, "_").slice(0, 80) || "picture"}.png`;
      link.click();
    });
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
      for (const each of all("details", document.querySelector(button.dataset.unfold))) each.open = true;
      button.remove();
    });
  }
})();
