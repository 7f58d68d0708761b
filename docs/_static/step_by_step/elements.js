"use strict";

// Make an element with attributes and children; strings become text, so no data is ever read as HTML.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== ""));
  return made;
}

// A table whose first column names its rows. Cells are text or elements; `marked` rows are said to be the chosen one.
function tableOf(caption, headings, rows, marked = -1) {
  const head = element("tr", {}, headings.map((words) => element("th", { scope: "col" }, words)));
  const body = rows.map((cells, i) =>
    element(
      "tr",
      { class: i === marked ? "chosen" : null, "aria-current": i === marked ? "true" : null },
      cells.map((cell, j) => (j === 0 ? element("th", { scope: "row" }, cell) : element("td", {}, cell))),
    ),
  );
  return element(
    "table",
    {},
    element("caption", {}, caption),
    element("thead", {}, head),
    element("tbody", {}, body),
  );
}

// A number as a reader would write it; null stands for minus infinity, which JSON does not have.
function shown(number, digits = 4) {
  return number === null ? "−∞" : String(Number(number.toPrecision(digits))).replace("-", "−");
}

// Words of a place that a screen reader says whenever they change: from when the focus comes there for the first time, so
// that nothing is said while the page loads.
function liveRegion(place) {
  const made = element("div", { class: "telling", "aria-atomic": "true" });
  place.addEventListener("focusin", () => made.setAttribute("aria-live", "polite"), { once: true });
  return made;
}

// Say a title and lines in one go: they are one paragraph, and it takes the place of the one before. An element with a role of
// its own in it, such as strong, would be said once more.
function tell(region, title, ...lines) {
  const parts = lines.flatMap((line) => ["\n", element("span", {}, line)]);
  region.replaceChildren(element("p", {}, element("span", { class: "title" }, title), parts));
}

// A list to choose from, with its label.
function field(label, select) {
  return element("span", { class: "field" }, element("label", { for: select.id }, label), select);
}
