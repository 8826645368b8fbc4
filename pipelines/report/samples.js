"use strict";
// Browsing documents: those of this file, or all of the run where a server answers. Everything shown goes through
// textContent, as in page.js.
(({ data, make, words, number }) => {
  const $ = (id) => document.getElementById(id);
  const form = $("sample-filter");
  if (!form) return;
  const PAGE = 10;
  const field = (name) => form.elements.namedItem(name);

  function fill(name, values) {
    const count = new Map();
    for (const value of values) if (value) count.set(value, (count.get(value) || 0) + 1);
    for (const [value, times] of [...count].sort((a, b) => a[0].localeCompare(b[0]))) {
      const many = data.served ? "" : " (" + number(times) + ")"; // of a sample
      field(name).append(make("option", { value }, words(value) + many));
    }
    field(name).closest("label").hidden = count.size === 0;
  }
  if (data.served) {
    const dropped = data.reasons.filter((r) => r.kind === "dropped" && (r.documents || r.breaks));
    fill("stage", dropped.map((r) => r.stage));
    fill("reason", dropped.map((r) => r.reason));
    fill("source", data.sources);
    fill("language", data.scan.languages.map((row) => row.name));
    fill("measure", data.measures.map((m) => m.measure));
  } else {
    fill("stage", data.samples.map((s) => s.stage));
    fill("reason", data.samples.flatMap((s) => s.reasons));
    fill("source", data.samples.map((s) => s.source));
    fill("language", data.samples.map((s) => s.language));
    fill("measure", data.samples.flatMap((s) => Object.keys(s.measures).filter((name) => s.measures[name] !== null)));
  }

  function chosen() {
    const names = ["kept", "stage", "reason", "source", "language", "text", "measure", "order"];
    const want = Object.fromEntries(names.map((n) => [n, field(n).value]));
    const text = want.text.trim().toLowerCase();
    const [low, high] = ["low", "high"].map((n) => (field(n).value === "" ? null : Number(field(n).value)));
    const found = data.samples.filter((s) =>
      (want.kept === "" || s.kept === (want.kept === "1")) && (!want.stage || s.stage === want.stage) &&
      (!want.reason || s.reasons.includes(want.reason)) && (!want.source || s.source === want.source) &&
      (!want.language || s.language === want.language) &&
      (!text || s.text.toLowerCase().includes(text) || (s.url || "").toLowerCase().includes(text)) &&
      (!want.measure || inRange(s.measures[want.measure], low, high)));
    if (want.measure) {
      found.sort((a, b) => (want.order === "up" ? 1 : -1) * (a.measures[want.measure] - b.measures[want.measure]));
    }
    return found;
  }

  function inRange(value, low, high) {
    return value !== null && value !== undefined && (low === null || value >= low) && (high === null || value <= high);
  }

  // Spans of a text that a reason speaks of: [start, end) pairs. Only where the text alone shows them.
  const LINES = /[^\n]+/g;
  const seen = (pattern, repeated) => (text) => {
    const before = new Set();
    return [...text.matchAll(pattern)].filter((m) => {
      const key = m[0].trim(), again = before.has(key);
      before.add(key);
      return key && again === repeated;
    }).map((m) => [m.index, m.index + m[0].length]);
  };
  const all = (pattern) => (text) => [...text.matchAll(pattern)].map((m) => [m.index, m.index + m[0].length]);
  const FAULTS = [
    [/para.*dup|dup.*para/, seen(/(?:[^\n]|\n(?!\n))+/g, true)],
    [/line.*dup|dup.*line/, seen(LINES, true)],
    [/bullet/, all(/^[ \t]*[•‣▪◦●\-*–].*$/gm)],
    [/ellips/, all(/(?:\.\.\.|…)[ \t]*$/gm)],
    [/lorem/, all(/lorem ipsum/gi)],
    [/curly|brace/, all(/[{}]/g)],
    [/javascript/, all(/javascript/gi)],
    [/symbol|hash/, all(/#|\.\.\.|…/g)],
    [/policy|terms|cookie/, all(/terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies/gi)],
  ];

  function spans(sample, text) {
    const found = [];
    if (sample.text === null) return found;
    for (const [name, marks] of FAULTS) {
      if (sample.reasons.some((reason) => name.test(reason))) found.push(...marks(sample.text).map((s) => [...s, "fault"]));
    }
    if (text) {
      const lower = sample.text.toLowerCase();
      // lowering can change a text's length in some scripts; then positions are not those of the text
      if (lower.length === sample.text.length) {
        for (let at = lower.indexOf(text); at >= 0 && found.length < 2000; at = lower.indexOf(text, at + text.length)) {
          found.push([at, at + text.length, "hit"]);
        }
      }
    }
    return found.sort((a, b) => a[0] - b[0]);
  }

  function marked(sample, text) {
    const out = [], whole = sample.text || "";
    let at = 0;
    for (const [start, end, kind] of spans(sample, text)) {
      if (start < at) continue;
      out.push(whole.slice(at, start), make("mark", { class: kind }, whole.slice(start, end)));
      at = end;
    }
    out.push(whole.slice(at));
    return out;
  }

  function guilty(sample) {
    const columns = new Set();
    for (const m of data.measures) {
      for (const limit of m.limits) if (m.stage === sample.stage && sample.reasons.includes(limit.reason)) columns.add(m.measure);
    }
    return columns;
  }

  function card(sample, text) {
    const title = sample.kept
      ? [make("span", null, "kept")]
      : [make("span", null, words(sample.stage)), ...sample.reasons.map((r, i) => make("span", { class: i ? "reason more" : "reason" }, words(r)))];
    const facts = [sample.source, sample.url, sample.language, sample.date, number(sample.chars) + " characters", sample.doc_id,
      ...Object.entries(sample.labels).map(([name, value]) => name + " " + value)];
    const bad = guilty(sample);
    const own = (name) => bad.has(name) || name.startsWith(sample.stage + ".");
    const measures = Object.entries(sample.measures).filter((pair) => pair[1] !== null)
      .sort((a, b) => Number(bad.has(b[0])) - Number(bad.has(a[0])));
    const line = (pairs) => pairs.length === 0 ? null : make("p", { class: "measures" },
      ...pairs.flatMap(([name, value], i) => [i ? "   " : null, make(bad.has(name) ? "b" : "span", null, name + " " + number(value))]));
    const others = measures.filter((pair) => !own(pair[0]));
    return make(
      "article", { class: sample.kept ? "sample kept" : "sample" },
      make("h3", null, ...title),
      make("p", { class: "where" }, ...facts.filter(Boolean).flatMap((fact, i) => [i ? " · " : null, make("bdi", null, fact)])),
      body(sample, text),
      original(sample),
      line(measures.filter((pair) => own(pair[0]))),
      others.length ? make("details", null, make("summary", null, "Other measures"), line(others)) : null,
    );
  }

  function body(sample, text) {
    const pre = make("pre", { dir: "auto", tabindex: "0" }, ...marked(sample, text));
    if (sample.text === null) pre.append(make("em", null, "(The text was not kept: only a sample for each reason keeps it.)"));
    if (!sample.more_chars) return pre;
    const rest = make("em", null, "\n… " + number(sample.more_chars) + " more characters");
    pre.append(rest);
    if (data.served) {
      const whole = make("button", { type: "button", class: "plain" }, "show all");
      whole.addEventListener("click", async () => {
        const found = await ask("document", at(sample));
        pre.replaceChildren(...marked({ ...sample, text: found.text }, text));
      });
      pre.append(" ", whole);
    }
    return pre;
  }

  // The page that a text was extracted from, beside it.
  function original(sample) {
    const side = (html) => [
      make("div", null, make("p", { class: "small" }, "original page"), make("pre", { dir: "auto", tabindex: "0", class: "html" }, html)),
      make("div", null, make("p", { class: "small" }, "extracted text"), make("pre", { dir: "auto", tabindex: "0" }, sample.text)),
    ];
    const cut = (html, more) => html + (more ? "\n… " + number(more) + " more characters" : "");
    const details = (...inner) => make("details", { class: "original" }, make("summary", null, "Original page beside the text"), ...inner);
    if (sample.html) return details(make("div", { class: "two" }, ...side(cut(sample.html, sample.more_html))));
    if (!data.served || !sample.position || sample.stage === "extract" || !/^[0-9.]+$/.test(sample.position)) return null;
    const place = make("div", { class: "two" });
    const element = details(place);
    element.addEventListener("toggle", async () => {
      if (!element.open || place.childNodes.length) return;
      const found = await ask("original", at(sample));
      place.replaceChildren(...(found.html === null
        ? [make("p", { class: "empty" }, "The original is not in a crawl archive, or no longer where it was.")]
        : side(cut(found.html, found.more))));
    }, { once: false });
    return element;
  }

  const at = (sample) => ({ part: sample.part, group: sample.place[1], row: sample.place[2] });

  // Pages of the sample in this file.

  let page = 0;
  function showSamples() {
    const found = chosen(), pages = Math.max(1, Math.ceil(found.length / PAGE));
    page = Math.min(Math.max(0, page), pages - 1);
    const text = field("text").value.trim().toLowerCase();
    $("sample-list").replaceChildren(...found.slice(page * PAGE, (page + 1) * PAGE).map((s) => card(s, text)));
    $("sample-count").textContent = number(found.length) + (found.length === 1 ? " document" : " documents");
    $("sample-page").textContent = "page " + number(page + 1) + " of " + number(pages);
    $("sample-before").disabled = page === 0;
    $("sample-after").disabled = page === pages - 1;
  }

  // Pages of all documents, from the server: where each page began is remembered, the last is the one shown.

  let begins = [null], following = null, turn = 0;

  async function ask(what, values) {
    const asked = new URLSearchParams(Object.entries(values).filter((pair) => pair[1] !== "" && pair[1] !== null));
    const answer = await fetch(what + "?" + asked, { credentials: "same-origin" });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }

  function wanted() {
    const names = ["kept", "stage", "reason", "source", "language", "text", "measure", "low", "high"];
    const want = Object.fromEntries(names.map((n) => [n, field(n).value.trim()]));
    if (want.measure) Object.assign(want, { order: want.measure, down: field("order").value === "down" ? "1" : "0" });
    return want;
  }

  async function showServed(counted) {
    const mine = ++turn, want = wanted(), list = $("sample-list");
    list.setAttribute("aria-busy", "true");
    try {
      const after = begins[begins.length - 1];
      const found = await ask("documents", { ...want, n: PAGE, after: after === null ? "" : after.join(",") });
      if (mine !== turn) return; // asked again meanwhile
      const text = want.text.toLowerCase();
      list.replaceChildren(...found.documents.map((s) => card(s, text)));
      if (found.timed_out) {
        list.append(make("p", { class: "note" }, "Looked at " + number(found.looked_at) + " documents for this page; Next goes on from there."));
      }
      following = found.next;
      $("sample-page").textContent = "page " + number(begins.length);
      $("sample-before").disabled = begins.length === 1;
      $("sample-after").disabled = following === null;
      if (!counted) {
        $("sample-count").textContent = "counting …";
        const total = await ask("count", want);
        if (mine !== turn) return;
        $("sample-count").textContent = (total.whole ? "" : "at least ") + number(total.documents) + (total.documents === 1 ? " document" : " documents");
      }
    } catch (error) {
      if (mine === turn) list.replaceChildren(make("p", { class: "empty" }, String(error.message)));
    } finally {
      if (mine === turn) list.removeAttribute("aria-busy");
    }
  }

  let waiting = 0;
  form.addEventListener("input", () => {
    form.querySelector(".range").hidden = field("measure").value === "";
    page = 0;
    begins = [null];
    if (!data.served) return showSamples();
    clearTimeout(waiting);
    waiting = setTimeout(showServed, 250);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const [id, step] of [["sample-before", -1], ["sample-after", 1]]) {
    $(id).addEventListener("click", () => {
      page += step;
      if (step > 0 && data.served) begins.push(following);
      else if (data.served) begins.pop();
      if (data.served) showServed(true);
      else showSamples();
      $("samples").scrollIntoView();
    });
  }
  if (data.served) showServed();
  else showSamples();
})(gristmill);
