// Elements out of data, and the change of a page in place: what has the focus or is open stays so.
// Text is only ever set as text.

const SVG = "http://www.w3.org/2000/svg";
const SHAPES = new Set(["svg", "g", "path", "rect", "line", "text", "circle"]);

/** An element; children that are no elements become text, and null ones nothing. */
export function h(tag, attributes, ...children) {
  const made = SHAPES.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

/** Give `parent` these children, and keep the elements that it has wherever the kind is the same. */
export function fill(parent, ...children) {
  const fresh = [...h("div", {}, children).childNodes];
  const old = [...parent.childNodes];
  fresh.forEach((node, place) => {
    const kept = old[place];
    if (!kept) parent.append(node);
    else if (kept.nodeName !== node.nodeName) kept.replaceWith(node);
    else if (node.nodeType === Node.TEXT_NODE) {
      if (kept.data !== node.data) kept.data = node.data;
    } else change(kept, node);
  });
  for (const node of old.slice(fresh.length)) node.remove();
}

function change(kept, fresh) {
  for (const { name } of [...kept.attributes]) {
    if (name !== "open" && !fresh.hasAttribute(name)) kept.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (kept.getAttribute(name) !== value) kept.setAttribute(name, value);
  }
  fill(kept, ...fresh.childNodes);
}

/** A table whose rows become cards where the page is narrow. Cells are text, elements, or lists of both. */
export function table(caption, columns, rows) {
  const head = columns.map((column) => h("th", { scope: "col" }, column));
  const body = rows.map((row) =>
    h("tr", {}, row.map((cell, at) =>
      h(at ? "td" : "th", { scope: at ? null : "row", "data-label": columns[at] }, h("span", {}, cell)))));
  return h("table", {},
    h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body));
}

/** The numbers behind a chart. */
export function behind(caption, columns, rows) {
  return h("details", {}, h("summary", {}, `Table: ${caption}`), table(caption, columns, rows));
}
