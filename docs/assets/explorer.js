// The table of the results page: window.RESULTS, filtered by what the reader chooses. The URL has
// the choices, so that a view can be linked: results.html?format=nvfp4:16&sort=-kl
(() => {
  const place = document.getElementById("results");
  if (!place || !window.RESULTS) return;
  const { models, rows } = window.RESULTS;

  const digits = (x) => (Math.abs(x) >= 1 ? x.toPrecision(4) : x.toFixed(4));
  const percent = (x) => `${(100 * x).toFixed(2)} %`;
  const above = (x) => `${x >= 1 ? "+" : ""}${(100 * (x - 1)).toFixed(2)} %`;
  const signed = (x) => `${x >= 0 ? "+" : ""}${x.toFixed(4)}`;

  // Key, heading, how a number is shown, and whether it is a difference.
  const COLUMNS = [
    ["format", "format"],
    ["method", "method"],
    ["inputs", "inputs"],
    ["kl", "KL", digits],
    ["perplexity", "perplexity", digits],
    ["change", "change", above, true],
    ["top1", "top-1", percent],
    ["kl_to_naive", "KL less naive's", signed, true],
    ["output_error", "output err", percent],
    ["bits", "bits", (x) => x.toFixed(2)],
  ];

  // What is chosen: all of one model and text, and any formats and methods.
  const chosen = { model: models[0].model, text: "", inputs: "float", format: "", method: "" };
  const defaults = { ...chosen };
  let sorting = { key: "", down: false };

  function readURL() {
    const params = new URLSearchParams(location.search);
    for (const key of Object.keys(chosen)) if (params.has(key)) chosen[key] = params.get(key);
    if (!models.some((each) => each.model === chosen.model)) chosen.model = defaults.model;
    const key = (params.get("sort") || "").replace(/^-/, "");
    if (COLUMNS.some((column) => column[0] === key)) {
      sorting = { key, down: params.get("sort").startsWith("-") };
    }
  }

  // Only choices that are not those of the page alone.
  function writeURL() {
    const url = new URL(location.href);
    const first = rows.find((row) => row.model === chosen.model).text;
    const sort = (sorting.down ? "-" : "") + sorting.key;
    const now = { ...chosen, text: chosen.text === first ? "" : chosen.text, sort };
    for (const [key, value] of Object.entries(now)) {
      if (value === (defaults[key] ?? "")) url.searchParams.delete(key);
      else url.searchParams.set(key, value);
    }
    history.replaceState(null, "", url);
  }

  const unique = (key, within) => [...new Set(within.map((row) => row[key]))];
  const named = (row) => `${row.format}:${row.block}`;
  for (const row of rows) row.format = named(row);
  const plain = (value) => (Array.isArray(value) ? value[0] : value);

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function choice(key, values, every) {
    const options = every ? ["", ...values] : values;
    if (!options.includes(chosen[key])) chosen[key] = options[0];
    const select = element("select", { "aria-label": key });
    for (const value of options) {
      const option = element("option", { value }, value || `every ${key}`);
      option.selected = value === chosen[key];
      select.append(option);
    }
    select.addEventListener("change", () => {
      chosen[key] = select.value;
      draw();
      writeURL();
    });
    return element("label", {}, element("span", {}, key), select);
  }

  function cell(row, [key, , show, isDifference]) {
    const value = row[key];
    if (!show) return element("td", {}, key === "method" ? element("code", {}, value) : value);
    const made = element("td", { class: "number" });
    if (value === undefined || value === null) return made;
    const text = show(plain(value));
    made.append(isDifference && value[3] ? element("strong", {}, text) : text);
    if (Array.isArray(value) && value[1] !== null) {
      made.append(element("small", {}, `${show(value[1])} to ${show(value[2])}`));
    }
    return made;
  }

  function draw() {
    const about = models.find((each) => each.model === chosen.model);
    const columns = COLUMNS.filter(([key]) => key !== "inputs" || !chosen.inputs);
    const ofModel = rows.filter((row) => row.model === chosen.model);
    const filters = element(
      "div",
      { class: "filters" },
      choice("model", models.map((each) => each.model)),
      choice("text", unique("text", ofModel)),
      choice("inputs", unique("inputs", ofModel), true),
      choice("format", unique("format", ofModel), true),
      choice("method", unique("method", ofModel), true),
    );
    const keys = ["text", "inputs", "format", "method"];
    const shown = ofModel.filter((row) => keys.every((key) => !chosen[key] || row[key] === chosen[key]));
    if (sorting.key) {
      const sign = sorting.down ? -1 : 1;
      const value = (row) => plain(row[sorting.key]) ?? Infinity;
      shown.sort((a, b) => (value(a) < value(b) ? -sign : value(a) > value(b) ? sign : 0));
    }
    const heads = columns.map(([key, heading, show]) => {
      const arrow = sorting.key === key ? (sorting.down ? " ↓" : " ↑") : "";
      const button = element("button", { type: "button" }, heading + arrow);
      button.addEventListener("click", () => {
        sorting = { key, down: sorting.key === key && !sorting.down };
        draw();
        writeURL();
      });
      const order = arrow ? (sorting.down ? "descending" : "ascending") : "none";
      return element("th", { class: show ? "number" : "", "aria-sort": order }, button);
    });
    const body = shown.map((row) => element("tr", {}, ...columns.map((column) => cell(row, column))));
    const table = element("table", { class: "explorer" }, element("thead", {}, element("tr", {}, ...heads)));
    table.append(element("tbody", {}, ...body));
    const count = element("p", { class: "count", "aria-live": "polite" }, `${shown.length} rows`);
    place.replaceChildren(filters, count, element("div", { class: "scroll", tabindex: "0" }, table));
  }

  readURL();
  draw();
})();
