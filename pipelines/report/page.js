"use strict";
// Everything shown from a document goes through textContent. There is no innerHTML in this file.
const gristmill = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  document.documentElement.classList.add("js");
  const $ = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";

  function make(tag, attributes, ...children) {
    const svg = ["svg", "rect", "title"].includes(tag);
    const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  const words = (name) => String(name).replaceAll("_", " ");

  function number(value) {
    if (value === null || value === undefined) return "–";
    if (Number.isInteger(value)) return value.toLocaleString("en-US");
    if (!Number.isFinite(value)) return String(value);
    return value.toLocaleString("en-US", { maximumSignificantDigits: 4 });
  }

  function percent(value) {
    if (value > 0 && value < 0.0005) return "< 0.1 %";
    if (value >= 0.9995 && value < 1) return "> 99.9 %";
    return (value * 100).toFixed(1) + " %";
  }

  // Tables: a click on a heading sorts.

  function sortable(table) {
    table.querySelectorAll("thead th").forEach((heading, column) => {
      const button = make("button", { type: "button" }, ...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => {
        const down = heading.getAttribute("aria-sort") !== "descending";
        table.querySelectorAll("th[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
        heading.setAttribute("aria-sort", down ? "descending" : "ascending");
        const body = table.tBodies[0];
        const keyed = [...body.rows].map((row) => {
          const cell = row.cells[column];
          return [cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v), row];
        });
        const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
        keyed.sort((a, b) => (down ? -1 : 1) * compare(a[0], b[0]));
        body.append(...keyed.map((pair) => pair[1]));
      });
    });
  }
  document.querySelectorAll("table.sortable").forEach(sortable);

  // What each rule removes, of one source and language.

  function removals() {
    const table = $("removals-table");
    if (!table) return;
    const source = $("removals-source"), language = $("removals-language");
    const whole = (rows, at) => {
      const sums = new Map();
      for (const row of rows) {
        const [from, of] = row.slice(at, at + 2);
        if ((source.value && from !== source.value) || (language && language.value && of !== language.value)) continue;
        const key = JSON.stringify(row.slice(0, at));
        const sum = sums.get(key) || row.slice(at + 2).map(() => 0);
        sums.set(key, sum.map((value, i) => value + row[at + 2 + i]));
      }
      return sums;
    };
    const cell = (value, text) => make("td", { class: "num", "data-v": value }, text);
    const draw = () => {
      const cameIn = whole(data.removals.came_in, 1);
      const rows = [...whole(data.removals.rows, 3)].filter((pair) => pair[1][0] > 0);
      table.tBodies[0].replaceChildren(...rows.sort((a, b) => b[1][0] - a[1][0]).map(([key, sum]) => {
        const [segment, stage, reason] = JSON.parse(key);
        const [documents, chars, only] = sum;
        const [ofDocuments, ofChars] = cameIn.get(JSON.stringify([segment])) || [1, 1];
        const part = documents / (ofDocuments || 1), charPart = chars / (ofChars || 1);
        return make("tr", null,
          make("td", null, words(stage)), make("th", { scope: "row" }, words(reason)), cell(documents, number(documents)),
          cell(part, percent(part)), cell(only, number(only)), cell(documents - only, number(documents - only)),
          cell(chars, number(chars)), cell(charPart, percent(charPart)));
      }));
    };
    source.addEventListener("change", draw);
    if (language) language.addEventListener("change", draw);
  }
  removals();

  // Funnel of one source.

  function bar(parts, label) {
    const svg = make("svg", { class: "bar", role: "img", width: "100%", height: "16" }, make("title", null, label));
    let at = 0;
    for (const [name, share] of parts) {
      if (share > 0) svg.append(make("rect", { class: name, x: at * 100 + "%", width: share * 100 + "%", height: "100%" }));
      at += share;
    }
    return svg;
  }

  function funnelRows(source) {
    const names = data.funnel.columns;
    return data.funnel.rows
      .map((row) => Object.fromEntries(names.map((name, i) => [name, row[i]])))
      .filter((row) => row.source === source);
  }

  function showFunnel(source) {
    const rows = funnelRows(source);
    $("funnel-picture").replaceChildren(
      ...rows.map((row, i) => {
        const lost = i ? rows[i - 1].kept_share - row.kept_share : 0;
        return make(
          "div", { class: "step" },
          make("span", { class: "name" }, words(row.stage)),
          bar([["kept", row.kept_share], [row.held_out ? "held" : "dropped", lost]], row.stage),
          make("span", { class: "amount" }, number(row.documents)),
        );
      }),
    );
    $("funnel-table").tBodies[0].replaceChildren(
      ...rows.map((row, i) => {
        const held = row.held_out ? make("span", { class: "chip" }, "+ " + number(row.held_out) + " held out") : "";
        const cells = [
          number(row.documents), i ? [number(row.dropped), " ", held] : "", i ? number(row.failed) : "",
          i ? percent(row.stage_share) : "", percent(row.kept_share),
          row.chars || row.segment !== "tokens" ? number(row.chars) : "", number(row.bytes),
          row.tokens ? number(row.tokens) : "",
        ];
        return make("tr", null, make("th", { scope: "row" }, words(row.stage)), ...cells.map((cell) => make("td", { class: "num" }, ...[cell].flat())));
      }),
    );
  }
  $("funnel-source")?.addEventListener("change", (event) => showFunnel(event.target.value || null));

  // Rules.

  $("log-counts")?.addEventListener("change", (event) => {
    document.documentElement.classList.toggle("log-counts", event.target.checked);
  });
  $("measure-stage")?.addEventListener("change", (event) => {
    document.querySelectorAll(".panel[data-stage]").forEach((panel) => {
      panel.hidden = event.target.value !== "" && panel.dataset.stage !== event.target.value;
    });
  });

  function yaml(limit, value) {
    if (!limit.setting) return "# This limit is not a single number of the recipe. Change it in stage " + limit.key + ".";
    const only = limit.applies_to.length ? "\n    only: [" + limit.applies_to.join(", ") + "]" : "";
    return "stages:\n  - " + limit.key + ": {" + limit.setting + ": " + value + "}" + only;
  }

  function answer(measure, limit, at) {
    const part = (low, high, unit) => {
      const now = low[limit.now_at];
      const change = (count) => (count >= now ? "+" : "−") + number(Math.abs(count - now));
      const share = (count) => (now ? " (" + (count >= now ? "+" : "−") + percent(Math.abs(count - now) / now) + ")" : "");
      if (at === limit.now_at) return number(low[at]) + " " + unit;
      if (low[at] === high[at]) return number(low[at]) + " " + unit + ", " + change(low[at]) + share(low[at]);
      return number(low[at]) + " to " + number(high[at]) + " " + unit + ", " + change(low[at]) + " to " + change(high[at]) + share(high[at]);
    };
    const lines = ["keeps " + part(limit.low, limit.high, "documents") + (at === limit.now_at ? ", as it is" : "")];
    if (limit.low_chars.length) lines.push(part(limit.low_chars, limit.high_chars, "characters"));
    return lines;
  }

  document.querySelectorAll(".what-if").forEach((element) => {
    const measure = data.measures[element.dataset.measure];
    const limit = measure.limits[element.dataset.limit];
    const slider = element.querySelector("input");
    if (!slider) return; // limits by language: one slider cannot move them all
    const line = element.closest(".panel").querySelector(".try");
    const show = () => {
      const at = Number(slider.value), moved = at !== limit.now_at, value = limit.values[at];
      element.querySelector(".now").textContent = number(value);
      element.querySelector(".answer").replaceChildren(...answer(measure, limit, at).flatMap((line, i) => (i ? [make("br"), line] : [line])));
      const code = element.querySelector(".yaml");
      code.hidden = !moved;
      code.textContent = yaml(limit, value);
      slider.setAttribute("aria-valuetext", number(value) + " " + measure.unit);
      const x = moved ? limit.x[at] : -9;
      line.setAttribute("x1", x);
      line.setAttribute("x2", x);
    };
    slider.addEventListener("input", show);
    show();
  });

  // A histogram says what is under the pointer.

  document.querySelectorAll(".panel[data-measure]").forEach((panel) => {
    const measure = data.measures[panel.dataset.measure];
    const plot = panel.querySelector("svg.histogram"), readout = panel.querySelector(".readout");
    const resting = readout.textContent;
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * plot.viewBox.baseVal.width;
      const bin = measure.x.findIndex((left, i) => i + 1 < measure.x.length && x >= left && x < measure.x[i + 1]);
      if (bin < 0) return;
      const edges = measure.edges, last = edges.length;
      const range = bin === 0 ? "below " + number(edges[0]) : bin === last ? "above " + number(edges[last - 1]) : number(edges[bin - 1]) + " to " + number(edges[bin]);
      readout.textContent = range + ": " + number(measure.kept[bin]) + " kept, " + number(measure.dropped[bin]) + " dropped";
    });
    plot.addEventListener("pointerleave", () => { readout.textContent = resting; });
  });

  return { data, make, words, number };
})();
