// A field above a table: rows without all of its words are hidden. The words are in the URL.
(() => {
  const field = document.querySelector("input[data-filters]");
  const table = field && document.getElementById(field.dataset.filters);
  if (!table) return;
  const rows = [...table.querySelectorAll("tbody tr")];
  const texts = rows.map((row) => row.textContent.toLowerCase());

  function filter() {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row, i) => {
      row.hidden = !words.every((word) => texts[i].includes(word));
    });
    const url = new URL(location.href);
    if (field.value) url.searchParams.set("type", field.value);
    else url.searchParams.delete("type");
    history.replaceState(null, "", url);
  }

  field.value = new URL(location.href).searchParams.get("type") || "";
  field.addEventListener("input", filter);
  if (field.value) filter();
})();
