"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const PAGE = 100;
  const BARS = 12;
  const SVG = "http://www.w3.org/2000/svg";

  // Data ---------------------------------------------------------------------------------------------------------

  const size = data.names.length;

  /** The numbers of a column, separated by commas; -1 where there is none. */
  function numbers(text) {
    const values = new Int32Array(size).fill(-1);
    let place = 0;
    let value = -1;
    for (let i = 0; i < text.length; i++) {
      const digit = text.charCodeAt(i) - 48;
      if (digit >= 0) value = (value < 0 ? 0 : value * 10) + digit;
      else {
        values[place++] = value;
        value = -1;
      }
    }
    if (place < size) values[place] = value;
    return values;
  }

  /** A function that works its value out when it is first asked for. */
  function lazily(work) {
    let value;
    return () => (value === undefined ? (value = work()) : value);
  }

  const fileOf = numbers(data.columns.file);
  const cellOf = numbers(data.columns.cell);
  const findingsOf = numbers(data.columns.findings);
  const needsOf = lazily(() => numbers(data.columns.needs));
  const sides = data.sides.map((side) => ({
    runner: side.runner,
    outcome: side.outcome,
    more: side.more,
    kind: lazily(() => numbers(side.kind)),
    ms: lazily(() => numbers(side.ms)),
    mib: lazily(() => numbers(side.mib)),
    why: lazily(() => numbers(side.why)),
  }));
  const idOf = (n) => (data.names[n] ? `${data.files[fileOf[n]]}::${data.names[n]}` : data.files[fileOf[n]]);
  const CPU = "CPU";
  const needsFor = (n) => data.needs[needsOf()[n]] || {};
  const mustHaveDevice = (n) => Boolean(needsFor(n).devices);
  const takesDevice = (n) =>
    Boolean(needsFor(n).devices || needsFor(n).device_if_any || (cellOf[n] >= 0 && data.cells[cellOf[n]][0]));
  const lowered = lazily(() => Array.from({ length: size }, (_, n) => idOf(n).toLowerCase()));

  const RAN = "pfexX";
  const NOT_RUN = "sdu";
  const OUTCOMES = {
    passed: ["good", "✓"], failed: ["bad", "✗"], error: ["bad", "✗"], skipped: ["none", "–"], xfailed: ["good", "x"],
    xpassed: ["good", "X"], deselected: ["none", "–"], unreached: ["warn", "…"],
  };
  const SYMBOLS = {
    failed: "✗", breach: "!", "never-ran": "○", "cpu-only": "◐", idle: "z", lost: "↓", quarantined: "⊘", unmarked: "?",
    unwitnessed: "¿", finding: "*",
    flaky: "↻", "one-runner": "1", "drift-time": "↑", "drift-memory": "↑", "drift-parity": "↑",
  };
  const testFindings = data.findings.map((finding, bit) => ({ ...finding, bit: 1 << bit })).filter((f) => f.ofTests);
  const toneOf = (finding) => (finding.isRed ? "bad" : finding.isAllowed ? "none" : "warn");
  const ranSomewhere = (n) => sides.some((side) => hasRun(side, n));
  // An error in set-up has not run: no kind of device is told of it.
  const hasRun = (side, n) => RAN.includes(side.outcome[n]) && side.kind()[n] >= 0;

  // Elements -----------------------------------------------------------------------------------------------------

  /** An element; text is always text, never markup. */
  function element(name, properties = {}, ...children) {
    return filled(document.createElement(name), properties, children);
  }

  function drawn(name, properties = {}, ...children) {
    return filled(document.createElementNS(SVG, name), properties, children);
  }

  function filled(node, properties, children) {
    for (const [key, value] of Object.entries(properties)) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== undefined && child !== ""));
    return node;
  }

  const at = (id) => document.getElementById(id);
  const count = (number) => number.toLocaleString("en");
  const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

  function duration(seconds) {
    if (seconds < 0.0005) return "0 ms";
    if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
    if (seconds < 120) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
    return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
  }

  const memory = (mib) => (mib >= 1024 ? `${(mib / 1024).toFixed(1)} GiB` : `${mib} MiB`);

  function badge(tone, symbol, text) {
    return element("span", { class: `badge ${tone}` }, `${symbol} ${text}`);
  }

  // Filters ------------------------------------------------------------------------------------------------------

  const EMPTY = { q: "", status: "", runner: "", outcome: "", why: "", file: "", backend: "", dtype: "", kind: "", on: "ran", sort: "id", page: "0" };
  const NO_AXIS = "(none)";
  let filter = { ...EMPTY, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };

  const codes = () => {
    const found = new Map();
    data.whys.forEach((told, n) => {
      for (const [code] of told) {
        const name = code || "other";
        if (!found.has(name)) found.set(name, new Set());
        found.get(name).add(n);
      }
    });
    return found;
  };
  const whysByCode = codes();

  function reasons() {
    const found = new Map();
    for (const told of data.whys) {
      for (const [code, text, remedy, tests] of told) {
        const line = code ? `[${code}] ${text}` : text;
        if (!found.has(line)) found.set(line, { code, text, remedy, tests, line });
      }
    }
    return [...found.values()].sort((a, b) => b.tests - a.tests || (a.line < b.line ? -1 : 1));
  }
  const reasonLines = reasons();

  function whysOf(choice) {
    if (choice.startsWith("code:")) return whysByCode.get(choice.slice(5)) || new Set();
    const found = new Set();
    data.whys.forEach((told, n) => {
      if (told.some(([code, text]) => (code ? `[${code}] ${text}` : text) === choice)) found.add(n);
    });
    return found;
  }

  const OUTCOME_GROUPS = {
    ran: (side, n) => hasRun(side, n),
    passed: (side, n) => "pxX".includes(side.outcome[n]),
    failed: (side, n) => "fe".includes(side.outcome[n]),
    "not run": (side, n) => NOT_RUN.includes(side.outcome[n]) || (side.outcome[n] === "e" && side.kind()[n] < 0),
  };

  /** The tests that the filter leaves, in its order. */
  function matching() {
    const words = filter.q.toLowerCase().split(/\s+/).filter(Boolean);
    const ids = words.length ? lowered() : [];
    const finding = testFindings.find((f) => f.name === filter.status);
    const chosen = filter.runner ? sides.filter((side) => side.runner === filter.runner) : sides;
    const group = OUTCOME_GROUPS[filter.outcome];
    const whys = filter.why ? whysOf(filter.why) : null;
    const file = filter.file ? data.files.indexOf(filter.file) : -1;
    const cells = wantedCells();
    const kind = filter.kind ? data.kinds.indexOf(filter.kind) : -1;
    // On a device the tests that take one, on the CPU those that can do without.
    const belongs = (n) => (filter.kind === CPU ? !mustHaveDevice(n) : takesDevice(n));
    const wasOn = (n) => sides.some((side) => side.kind()[n] === kind && side.outcome[n] !== ".");
    const failedOn = (n) => sides.some((side) => side.kind()[n] === kind && "fe".includes(side.outcome[n]));
    const ON = { ran: wasOn, not: (n) => !wasOn(n) && belongs(n), failed: failedOn };
    const found = [];
    for (let n = 0; n < size; n++) {
      if (file >= 0 && fileOf[n] !== file) continue;
      if (cells && !cells.has(cellOf[n])) continue;
      if (finding && !(findingsOf[n] & finding.bit)) continue;
      if (filter.status === "fine" && findingsOf[n] !== 0) continue;
      if (kind >= 0 && !ON[filter.on in ON ? filter.on : "ran"](n)) continue;
      if (whys && !chosen.some((side) => whys.has(side.why()[n]))) continue;
      if (group && !chosen.some((side) => group(side, n))) continue;
      if (!group && filter.runner && !chosen.some((side) => side.outcome[n] !== ".")) continue;
      if (words.length && !words.every((word) => ids[n].includes(word))) continue;
      found.push(n);
    }
    if (filter.sort === "time") sortBy(found, longest);
    if (filter.sort === "memory") sortBy(found, largest);
    return found;
  }

  function sortBy(tests, value) {
    const values = new Map(tests.map((n) => [n, value(n)]));
    tests.sort((a, b) => values.get(b) - values.get(a) || a - b);
  }

  const most = (column) => (n) => {
    let best = -1;
    for (const side of shownSides()) best = Math.max(best, side[column]()[n]);
    return best;
  };
  const longest = most("ms");
  const largest = most("mib");
  const shownSides = () => (filter.runner ? sides.filter((side) => side.runner === filter.runner) : sides);

  function wantedCells() {
    if (!filter.backend && !filter.dtype) return null;
    const found = new Set();
    const fits = (wanted, axis) => !wanted || (wanted === NO_AXIS ? "" : wanted) === axis;
    data.cells.forEach(([backend, dtype], n) => {
      if (fits(filter.backend, backend) && fits(filter.dtype, dtype)) found.add(n);
    });
    if (fits(filter.backend, "") && fits(filter.dtype, "")) found.add(-1);
    return found;
  }

  function change(changes, { scroll = false } = {}) {
    filter = { ...filter, page: "0", ...changes };
    const kept = Object.entries(filter).filter(([key, value]) => value !== EMPTY[key]);
    history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
    showControls();
    showTests();
    if (scroll) {
      at("tests").scrollIntoView();
      at("tests").focus({ preventScroll: true });
    }
  }

  /** Show those tests and no others: what a click elsewhere on the page asks for. */
  const only = (changes) => change({ ...EMPTY, ...changes }, { scroll: true });

  const controls = {};

  function control(name, label, choices, wide = false) {
    const input = choices
      ? element("select", { name }, ...choices.map(([value, text]) => element("option", { value }, text)))
      : element("input", { name, type: "search", autocomplete: "off", spellcheck: "false" });
    let timer;
    input.addEventListener(choices ? "change" : "input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => change({ [name]: input.value }), choices ? 0 : 120);
    });
    controls[name] = input;
    return element("label", wide ? { class: "wide" } : {}, label, input);
  }

  function makeControls() {
    const any = (text) => [["", text]];
    const axis = (place) => [...new Set(data.matrix.map((row) => row[place] || NO_AXIS))].map((value) => [value, value]);
    const same = (values) => values.map((value) => [value, value]);
    at("filters").append(
      control("q", "Search ids", null, true),
      control("status", "Status", [
        ...any("any"),
        ...testFindings.filter((f) => f.count).map((f) => [f.name, `${f.title} (${count(f.count)})`]),
        ["fine", "nothing to say"],
      ]),
      control("runner", "Runner", [...any("any"), ...same(data.runners.map((runner) => runner.name))]),
      control("outcome", "Outcome there", [...any("any"), ...same(Object.keys(OUTCOME_GROUPS))]),
      control("why", "Reason", [
        ...any("any"),
        ...[...whysByCode.keys()].sort().map((code) => [`code:${code}`, code === "other" ? "without a code" : code]),
        ...reasonLines.slice(0, 200).map((reason) => [reason.line, `${reason.line} (${count(reason.tests)})`]),
      ]),
      control("file", "File", [...any("any"), ...same([...data.files].sort())]),
      control("backend", "Backend", [...any("any"), ...axis("backend")]),
      control("dtype", "Dtype", [...any("any"), ...axis("dtype")]),
      control("on", "On the device", [["ran", "ran on"], ["not", "could run on, and did not"], ["failed", "failed on"]]),
      control("kind", "Kind of device", [...any("any"), ...same(data.kinds)]),
      control("sort", "Order", [["id", "by id"], ["time", "slowest first"], ["memory", "largest first"]]),
    );
    at("filters").addEventListener("submit", (event) => event.preventDefault());
    at("clear").addEventListener("click", () => change(EMPTY));
  }

  function showControls() {
    for (const [name, input] of Object.entries(controls)) {
      if (input.value !== filter[name]) input.value = filter[name];
      // A reason that is too rare for the list, or a link to what this page does not have.
      if (input.value !== filter[name]) {
        input.append(element("option", { value: filter[name] }, filter[name]));
        input.value = filter[name];
      }
    }
  }

  // The list of tests --------------------------------------------------------------------------------------------

  let shown = [];

  function showTests() {
    shown = matching();
    const isFiltered = Object.keys(EMPTY).some((key) => key !== "page" && key !== "sort" && filter[key] !== EMPTY[key]);
    at("count").textContent = isFiltered ? `${count(shown.length)} of ${plural(size, "test")}` : plural(size, "test");
    at("clear").disabled = !isFiltered;
    showPage();
    showCharts();
  }

  function showPage() {
    const pages = Math.max(1, Math.ceil(shown.length / PAGE));
    const page = Math.min(Math.max(0, Number(filter.page) || 0), pages - 1);
    const tests = shown.slice(page * PAGE, (page + 1) * PAGE);
    at("list").replaceChildren(...tests.map(testItem));
    at("list").setAttribute("start", String(page * PAGE + 1));
    const turn = (to, text) =>
      element("button", {
        type: "button",
        disabled: to < 0 || to >= pages,
        onclick: () => {
          change({ page: String(to) });
          at("tests").scrollIntoView();
        },
      }, text);
    at("pages").replaceChildren(
      ...(pages > 1
        ? [
            turn(page > 0 ? 0 : -1, "First"), turn(page - 1, "Previous"),
            element("span", {}, `page ${count(page + 1)} of ${count(pages)}`),
            turn(page + 1, "Next"), turn(page < pages - 1 ? pages - 1 : -1, "Last"),
          ]
        : []),
    );
  }

  function statusOf(n) {
    const found = testFindings.filter((finding) => findingsOf[n] & finding.bit);
    return found.find((finding) => finding.isRed) || found[0];
  }

  function testItem(n) {
    const status = statusOf(n);
    const mark = status
      ? badge(toneOf(status), SYMBOLS[status.name], status.title)
      : badge("good", "✓", ranSomewhere(n) ? "ran" : "fine");
    const chips = sides.filter((side) => side.outcome[n] !== ".").map((side) => {
      const outcome = data.letters[side.outcome[n]];
      const [tone, symbol] = OUTCOMES[outcome];
      const on = side.kind()[n];
      const isElsewhere = on >= 0 && sides.some((other) => other !== side && other.runner === side.runner && other.outcome[n] !== ".");
      const time = side.ms()[n] >= 0 ? ` ${duration(side.ms()[n] / 1000)}` : "";
      const where = isElsewhere ? `${side.runner} (${data.kinds[on]})` : side.runner;
      return badge(tone, symbol, `${where}: ${outcome}${time}`);
    });
    const details = element(
      "details",
      {
        ontoggle: () => {
          if (details.open && !details.querySelector(".more")) details.append(more(n));
        },
      },
      element("summary", {}, mark, element("span", { class: "id" }, idOf(n))),
    );
    return element("li", {}, details, element("div", { class: "chips" }, ...chips));
  }

  function list(...pairs) {
    const known = pairs.filter(([, value]) => value !== undefined && value !== "");
    return element("dl", {}, ...known.flatMap(([key, value]) => [element("dt", {}, key), element("dd", {}, value)]));
  }

  function more(n) {
    const cell = cellOf[n] >= 0 ? data.cells[cellOf[n]].filter(Boolean).join(" x ") : "";
    const needs = needsOf()[n] >= 0 ? needsText(data.needs[needsOf()[n]]) : "";
    const told = Object.fromEntries((data.told[n] || []).map(([kind, text]) => [data.findings[kind].name, text]));
    const findings = testFindings
      .filter((finding) => findingsOf[n] & finding.bit)
      .map((finding) => [finding.title, told[finding.name] || finding.meaning]);
    return element(
      "div",
      { class: "more" },
      list(["cell", cell], ["needs", needs], ...findings),
      element("div", { class: "places" }, ...sides.filter((side) => side.outcome[n] !== ".").map((side) => sideDetails(side, n))),
    );
  }

  function sideDetails(side, n) {
    const extra = side.more[n] || {};
    const kind = side.kind()[n];
    const whys = side.why()[n] >= 0 ? data.whys[side.why()[n]] : [];
    const number = (value, text) => (value >= 0 ? text(value) : "");
    return element(
      "div",
      {},
      element("h3", {}, side.runner),
      list(
        ["outcome", data.letters[side.outcome[n]]],
        ["ran on", kind >= 0 ? data.kinds[kind] : ""],
        ["time", number(side.ms()[n], (ms) => duration(ms / 1000))],
        ["memory", number(side.mib()[n], memory)],
        ["attempts", extra.attempts ? String(extra.attempts) : ""],
        ["parity", extra.parity !== undefined ? `${extra.parity.toFixed(2)} of what is allowed` : ""],
        ["idle", extra.idle ? "it was granted a device and did not use it" : ""],
        ["undeclared", extra.unmarked ? "it used CUDA and declares no device" : ""],
        ...(extra.findings || []).map((told) => ["found", data.texts[told]]),
        ["promised", extra.breach !== undefined ? data.texts[extra.breach] : ""],
        ["message", extra.message !== undefined ? data.texts[extra.message] : ""],
        ...whys.flatMap(([code, text, remedy]) => [["not run", code ? `[${code}] ${text}` : text], ["remedy", remedy]]),
      ),
    );
  }

  function needsText(needs) {
    const one = (key, value) => {
      if (key === "memory") return `memory ${memory(Math.round(value / 1048576))}`;
      if (value === true) return key.replaceAll("_", " ");
      const text = Array.isArray(value) ? value.map((v) => (typeof v === "object" ? JSON.stringify(v) : v)).join(", ") : value;
      return `${key.replaceAll("_", " ")} ${text}`;
    };
    return Object.entries(needs).map(([key, value]) => one(key, value)).join("; ");
  }

  // Everything above the list ------------------------------------------------------------------------------------

  function showHeadline() {
    at("headline").className = `headline ${data.isRed ? "bad" : "good"}`;
    at("headline").textContent = `${data.isRed ? "✗" : "✓"} ${data.headline}`;
  }

  function showFindings() {
    const rank = (finding) => (finding.isRed ? 0 : finding.isAllowed ? 2 : 1);
    const present = data.findings.filter((finding) => finding.count).sort((a, b) => rank(a) - rank(b));
    const item = (finding) => {
      const title = `${finding.isRed ? "✗ red" : finding.isAllowed ? "allowed" : "to know"}: ${finding.title}: ${count(finding.count)}`;
      return element(
        "li",
        { class: toneOf(finding) },
        finding.ofTests
          ? element("button", { type: "button", class: "plain", onclick: () => only({ status: finding.name }) }, title)
          : element("span", { class: "title" }, title),
        element("div", { class: "dim" }, `${finding.meaning}.`),
        ...finding.others.slice(0, 50).map(([subject, text]) => element("div", {}, element("strong", {}, subject), text ? `: ${text}` : "")),
        finding.others.length > 50 ? element("div", {}, `and ${count(finding.others.length - 50)} more`) : "",
      );
    };
    const shifts = data.shifts.map((line) => element("li", { class: "warn" }, `to know: ${line}`));
    at("findings").append(
      present.length + shifts.length
        ? element("ul", { class: "findings" }, ...present.map(item), ...shifts)
        : element("p", {}, "Nothing: every test ran where it should, and nothing failed."),
    );
  }

  function showMatrix() {
    const head = element("tr", {}, ...["backend", "dtype", ...data.kinds].map((text, n) => element("th", { scope: "col", ...(n ? {} : { class: "backend" }) }, text)));
    let before;
    const rows = data.matrix.map((row) => {
      const isFirst = row.backend !== before;
      before = row.backend;
      const name = row.backend || (row.dtype ? "no backend" : "no cell");
      const squares = row.squares.map((numbers, n) => element("td", {}, square(row, data.kinds[n], numbers)));
      return [
        // On a narrow screen the backend is a line of its own instead of a column.
        isFirst
          ? element("tr", { class: "group" }, element("th", { scope: "rowgroup", colspan: data.kinds.length + 2 }, name))
          : "",
        element(
          "tr",
          isFirst ? { class: "first" } : {},
          element("th", { scope: "row", class: isFirst ? "backend" : "backend dim" }, name),
          element("th", { scope: "row" }, row.dtype || "–"),
          ...squares,
        ),
      ];
    });
    at("matrix").append(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows.flat().filter(Boolean))));
    if (data.outside) at("matrix").append(element("p", { class: "note" }, data.outside));
  }

  function square(row, kind, [tests, ran, failed, idle]) {
    if (!tests) return element("span", { class: "square empty" }, element("span", { "aria-label": "no test" }, "–"));
    const [tone, symbol] = failed ? ["bad", "✗"] : !ran ? ["none", "○"] : idle || ran < tests ? ["warn", "◐"] : ["good", "✓"];
    const notes = [failed ? `${count(failed)} failed` : "", idle ? `${count(idle)} idle` : ""].filter(Boolean).join(", ");
    const label = `${row.backend || "no backend"} ${row.dtype || "no dtype"} on ${kind}: ${ran} of ${tests} ran${notes ? `, ${notes}` : ""}`;
    return element(
      "button",
      {
        type: "button",
        class: `square ${tone}`,
        "aria-label": label,
        onclick: () =>
          only({
            backend: row.backend || NO_AXIS,
            dtype: row.dtype || NO_AXIS,
            kind,
            on: failed ? "failed" : ran < tests ? "not" : "ran",
          }),
      },
      `${symbol} ${count(ran)} / ${count(tests)}`,
      element("small", {}, notes || (ran === tests ? "all ran" : ran ? `${count(tests - ran)} did not run` : "none ran")),
    );
  }

  function showRunners() {
    const columns = [
      ["runner", (r) => element("button", { type: "button", class: "plain", onclick: () => only({ runner: r.name }) }, r.name)],
      ["devices", (r) => r.devices],
      ["ran", (r) => count(r.ran), true],
      ["failed", (r) => count(r.failed), true],
      ["not run", (r) => count(r.notRun), true],
      ["time", (r) => duration(r.seconds), true],
      ["software", (r) => [r.torch && `torch ${r.torch}${r.build ? ` (${r.build})` : ""}`, r.transformers && `transformers ${r.transformers}`, r.driver && `driver ${r.driver}`].filter(Boolean).join(", ")],
      ["promises", (r) => r.promises],
      ["ledgers", (r) => `${r.sources.join(", ")} (${r.started.slice(0, 16).replace("T", " ")})`],
    ];
    const head = columns.map(([text, , isNumber]) => element("th", isNumber ? { scope: "col", class: "number" } : { scope: "col" }, text));
    const rows = data.runners.map((runner) =>
      element("tr", {}, ...columns.map(([, value, isNumber], n) =>
        element(n ? "td" : "th", { ...(n ? {} : { scope: "row" }), ...(isNumber ? { class: "number" } : {}) }, value(runner)))));
    at("runners").append(element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)));
  }

  function showReasons() {
    const LISTED = 30;
    const item = (reason) =>
      element(
        "li",
        {},
        element("span", { class: "number" }, count(reason.tests)),
        element(
          "div",
          {},
          element("button", { type: "button", class: "plain", onclick: () => only({ why: reason.line }) }, reason.line),
          reason.remedy ? element("div", { class: "dim" }, reason.remedy) : "",
        ),
      );
    const rest = reasonLines.slice(LISTED);
    at("reasons").append(
      reasonLines.length
        ? element("ul", { class: "reasons" }, ...reasonLines.slice(0, LISTED).map(item))
        : element("p", {}, "Every test ran on every runner that tells of it."),
      rest.length
        ? element("details", {}, element("summary", {}, `and ${plural(rest.length, "reason")} more`), element("ul", { class: "reasons" }, ...rest.map(item)))
        : "",
    );
  }

  // Charts -------------------------------------------------------------------------------------------------------

  /** Horizontal bars, each with its name above and its number after it. */
  function bars(title, rows, text) {
    const width = Math.max(240, at("charts").firstElementChild?.clientWidth || at("charts").clientWidth || 600);
    const ROW = 34;
    const top = Math.max(...rows.map((row) => row.value), 1e-9);
    const room = width - 76;
    const letters = Math.floor(width / 7.4);
    const label = `${title}: ${rows.map((row) => `${row.name} ${text(row.value)}`).join("; ")}`;
    const picture = drawn("svg", { viewBox: `0 0 ${width} ${rows.length * ROW}`, height: rows.length * ROW, role: "img", "aria-label": label });
    rows.forEach((row, n) => {
      const long = Math.max(2, (row.value / top) * room);
      picture.append(
        drawn("text", { x: 0, y: n * ROW + 12 }, shortened(row.name, letters), drawn("title", {}, row.name)),
        drawn("rect", { x: 0, y: n * ROW + 17, width: long, height: 11, rx: 2 }),
        drawn("text", { class: "dim", x: long + 6, y: n * ROW + 27 }, text(row.value)),
      );
    });
    return figure(title, rows.length ? picture : element("p", { class: "note" }, "No test that is left tells of it."));
  }

  /** What does not fit is cut at its front: ids differ at their end. */
  const shortened = (text, room) => (text.length > room ? `…${text.slice(text.length - room + 1)}` : text);

  const figure = (title, ...inner) => element("figure", {}, element("figcaption", {}, title), ...inner);

  function histogram(title, edges, counts, names) {
    const width = Math.max(240, at("charts").firstElementChild?.clientWidth || at("charts").clientWidth || 600);
    const height = 190;
    const top = Math.max(...counts, 1);
    const step = width / counts.length;
    const label = `${title}: ${counts.map((number, n) => `${names[n]} ${number}`).join("; ")}`;
    const picture = drawn("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
    counts.forEach((number, n) => {
      const tall = number ? Math.max(2, (number / top) * (height - 46)) : 0;
      const middle = n * step + step / 2;
      picture.append(
        drawn("rect", { x: n * step + 2, y: height - 22 - tall, width: Math.max(1, step - 4), height: tall, rx: 2 }),
        drawn("text", { x: middle, y: height - 26 - tall, "text-anchor": "middle", class: "dim" }, number ? compact(number) : ""),
        drawn("text", { x: middle, y: height - 6, "text-anchor": "middle" }, edges[n]),
      );
    });
    picture.append(drawn("line", { x1: 0, x2: width, y1: height - 21.5, y2: height - 21.5 }));
    return figure(title, picture);
  }

  const compact = (number) => (number >= 10000 ? `${Math.round(number / 1000)}k` : String(number));

  function showCharts() {
    const columns = shownSides();
    const byFile = new Map();
    const EDGES = [0.001, 0.01, 0.1, 1, 10, 60, Infinity];
    const counts = EDGES.map(() => 0);
    const times = new Top(BARS);
    const peaks = new Top(BARS);
    for (const n of shown) {
      let total = 0;
      let slowest = -1;
      let peak = -1;
      for (const side of columns) {
        const ms = side.ms()[n];
        if (ms >= 0) {
          total += ms;
          slowest = Math.max(slowest, ms);
          counts[EDGES.findIndex((edge) => ms / 1000 < edge)]++;
        }
        peak = Math.max(peak, side.mib()[n]);
      }
      if (total) byFile.set(fileOf[n], (byFile.get(fileOf[n]) || 0) + total);
      if (slowest > 0) times.offer(n, slowest);
      if (peak > 0) peaks.offer(n, peak);
    }
    const files = new Top(BARS);
    for (const [file, ms] of byFile) files.offer(file, ms);
    const seconds = (ms) => duration(ms / 1000);
    at("charts").replaceChildren(
      bars("Time by file, on all runners together", files.rows((file) => data.files[file]), seconds),
      bars("Slowest tests, on their slowest runner", times.rows(idOf), seconds),
      histogram(
        "How long tests take",
        ["<1ms", "<10ms", "<0.1s", "<1s", "<10s", "<1min", "more"],
        counts,
        ["under 1 ms", "under 10 ms", "under 0.1 s", "under 1 s", "under 10 s", "under a minute", "more"],
      ),
      bars("Largest memory peaks", peaks.rows(idOf), memory),
    );
  }

  /** The few largest of many. */
  class Top {
    constructor(size) {
      this.size = size;
      this.best = [];
      this.least = -Infinity;
    }
    offer(key, value) {
      if (this.best.length === this.size && value <= this.least) return;
      this.best.push([key, value]);
      if (this.best.length > this.size) {
        this.best.sort((a, b) => b[1] - a[1]);
        this.best.pop();
        this.least = this.best[this.size - 1][1];
      }
    }
    rows(name) {
      return this.best.sort((a, b) => b[1] - a[1]).map(([key, value]) => ({ name: name(key), value }));
    }
  }

  // Theme --------------------------------------------------------------------------------------------------------

  function setTheme(theme) {
    if (theme === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.setAttribute("data-theme", theme);
  }

  function startTheme() {
    let theme = "auto";
    try {
      theme = localStorage.getItem("cudaenv-theme") || "auto";
    } catch {
      // A page from a file may have no storage.
    }
    at("theme").value = theme;
    setTheme(theme);
    at("theme").addEventListener("change", () => {
      setTheme(at("theme").value);
      try {
        localStorage.setItem("cudaenv-theme", at("theme").value);
      } catch {
        // The choice then lasts as long as the page.
      }
    });
  }

  startTheme();
  showHeadline();
  showFindings();
  showMatrix();
  showRunners();
  showReasons();
  makeControls();
  showControls();
  showTests();
  let resized;
  window.addEventListener("resize", () => {
    clearTimeout(resized);
    resized = setTimeout(showCharts, 150);
  });
  window.addEventListener("hashchange", () => {
    filter = { ...EMPTY, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
    showControls();
    showTests();
  });
  document.documentElement.setAttribute("data-ready", "");
})();
