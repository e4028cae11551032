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

  // Tables that sort and filter: table[data-rows="samples"] names what its rows are. Without this script it is a plain
  // table. A cell is sorted by its data-v, or else by its text. data-filter is the id of an input of the page's, or else
  // one is made. With data-address the URL holds the order and the words, so that it can be shared.
  const collator = new Intl.Collator(undefined, {numeric: true});
  const NUMBER = /^[-+]?(\d{1,3}(,\d{3})+|\d+)?(\.\d*)?(e[-+]?\d+)?( ?%)?$/i;
  const number = text => {
    const plain = text.replace("\u2212", "-").replace("\u221e", "inf").replace(/ \u00b1 .*/, "");
    if (/^[-+]?inf(inity)?$/i.test(plain)) return plain.startsWith("-") ? -Infinity : Infinity;
    return NUMBER.test(plain) && /\d/.test(plain) ? parseFloat(plain.replaceAll(",", "")) : NaN;
  };
  const keyOf = cell => { // numbers come before texts, and what is missing last
    const text = (cell?.dataset.v ?? cell?.textContent ?? "").trim(), size = number(text);
    const kind = ["", "–", "nan"].includes(text.toLowerCase()) ? 2 : Number.isNaN(size) ? 1 : 0;
    return {kind, size, text};
  };
  const compare = (a, b) => {
    if (a.kind || b.kind) return a.kind - b.kind || collator.compare(a.text, b.text);
    return a.size === b.size ? 0 : a.size - b.size; // two infinities have no difference
  };
  for (const table of all("table[data-rows]")) {
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells], noun = table.dataset.rows;
    const name = head => head.dataset.sort ?? head.textContent.trim();
    let line = document.getElementById(table.dataset.filter ?? "")?.parentElement;
    if (!line) {
      line = document.createElement("p");
      line.className = "filter";
      line.append(document.createElement("input"), " ", document.createElement("span"));
      [line.firstChild.type, line.firstChild.placeholder] = ["search", "filter: all words must occur"];
      line.firstChild.setAttribute("aria-label", `filter the ${noun}`);
      line.lastChild.className = "soft small";
      table.parentElement.before(line);
    }
    const input = line.querySelector("input"), count = line.querySelector("span");
    count.setAttribute("role", "status");
    let sorted = "";
    const sort = (head, descending) => {
      if (!head) return;
      const sign = descending ? -1 : 1;
      const keyed = [...body.rows].map(row => [keyOf(row.cells[head.cellIndex]), row]);
      keyed.sort(([a], [b]) => a.kind === 2 || b.kind === 2 ? a.kind - b.kind : sign * compare(a, b));
      body.append(...keyed.map(([, row]) => row));
      heads.forEach(each => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sorted = (descending ? "-" : "") + name(head);
    };
    const filter = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let left = 0;
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every(word => text.includes(word));
        left += !row.hidden;
      }
      count.textContent = left === body.rows.length ? "" : `${left} of ${body.rows.length} ${noun}`;
    };
    const keep = () => {
      if (!("address" in table.dataset)) return;
      const parts = new URLSearchParams();
      if (sorted) parts.set("sort", sorted);
      if (input.value) parts.set("filter", input.value);
      history.replaceState(null, "", parts.size ? `#${parts}` : location.pathname + location.search);
    };
    for (const head of heads) {
      let button = head.querySelector("button");
      if (!button && head.textContent.trim()) {
        button = document.createElement("button");
        button.append(...head.childNodes);
        head.append(button);
      }
      button?.addEventListener("click", () => { sort(head, head.getAttribute("aria-sort") === "ascending"); keep(); });
    }
    input.addEventListener("input", () => { filter(); keep(); });
    if ("address" in table.dataset) {
      const parts = new URLSearchParams(location.hash.slice(1)), by = parts.get("sort") ?? "";
      sort(heads.find(head => by && name(head) === by.replace(/^-/, "")), by.startsWith("-"));
      input.value = parts.get("filter") ?? "";
      if (input.value) filter();
    }
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

  // One of several at a time: a sample through all layers of a hook, or a statistic by depth.
  for (const box of all(".samples")) {
    const samples = all(":scope > details", box), bar = document.createElement("div"), menu = document.createElement("select");
    const noun = box.dataset.noun ?? "sample";
    menu.append(...samples.map(each => new Option(each.querySelector("summary").textContent)));
    menu.setAttribute("aria-label", noun);
    const show = at => {
      samples.forEach((each, n) => { each.open = n === at; });
      menu.selectedIndex = at;
      buttons.forEach(({button, step}) => { button.disabled = !samples[at + step]; });
    };
    const buttons = [["‹", "previous", -1], ["›", "next", 1]].map(([sign, word, step]) => {
      const button = document.createElement("button");
      button.className = "plain";
      button.textContent = sign;
      button.setAttribute("aria-label", `${word} ${noun}`);
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
