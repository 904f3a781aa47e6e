"use strict";
/* What both pages share: reading the data, words for sizes and times, the tooltip, tables that sort. */

async function readData() {
  const text = document.getElementById("data").textContent.trim();
  const packed = atob(text), bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser cannot decompress data (it is from before 2023): open the page in a newer one");
  }
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

/* An element with attributes and children; text is never read as HTML. */
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

function formatBytes(size) {
  const sign = size < 0 ? "-" : "";
  size = Math.abs(size);
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (size < 1024) return sign + (unit === "B" ? Math.round(size) : size.toFixed(size < 10 ? 2 : 1)) + " " + unit;
    size /= 1024;
  }
  return sign + size.toFixed(2) + " TiB";
}

function formatSeconds(seconds) {
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size >= 1) return seconds.toFixed(2) + " s";
  if (size >= 1e-3) return (seconds * 1e3).toFixed(1) + " ms";
  return (seconds * 1e6).toFixed(size >= 1e-5 ? 0 : 1) + " \u00b5s";
}

/* With a decimal where it matters: near nothing and near all. */
function formatPercent(share) {
  const percent = share * 100, near = Math.abs(percent) < 10 || (percent > 98 && percent < 102);
  return percent.toFixed(near ? 1 : 0) + "%";
}
const formatCount = (count) => count.toLocaleString("en-US");

const FORMATS = {
  bytes: formatBytes,
  seconds: formatSeconds,
  percent: (number) => +number.toFixed(1) + "%",
  factor: (number) => number.toFixed(2) + " \u00d7",
  count: formatCount,
  "": (number) => String(number),
};

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

/* Tick marks: round numbers that cut [0, most] into about `wanted` parts. */
function roundSteps(most, wanted, base) {
  if (!(most > 0)) return [0];
  const rough = most / wanted;
  let step;
  if (base === 2) {
    step = 2 ** Math.round(Math.log2(rough));
  } else {
    const power = 10 ** Math.floor(Math.log10(rough));
    step = [1, 2, 5, 10].map((m) => m * power).find((m) => m >= rough * 0.999);
  }
  const marks = [];
  for (let at = 0; at <= most * 1.0001; at += step) marks.push(at);
  return marks;
}

/* Sizes of marks on one axis, all in the unit of the largest. */
function byteTicks(most, wanted) {
  const power = Math.max(0, Math.min(3, Math.floor(Math.log2(Math.max(1, most)) / 10)));
  const unit = 1024 ** power, marks = roundSteps(most, wanted, 2).filter((mark) => mark <= most);
  const digits = Math.max(0, ...marks.map((mark) => ((mark / unit) % 1 ? ((mark * 4) / unit) % 1 ? 3 : (mark * 2) / unit % 1 ? 2 : 1 : 0)));
  return marks.map((mark) => [mark, mark === 0 ? "0" : `${(mark / unit).toFixed(digits)} ${["B", "KiB", "MiB", "GiB"][power]}`]);
}

const tip = {
  node: document.getElementById("tip"),
  show(event, head, where, rows) {
    this.node.replaceChildren(
      el("div", { class: "head" }, head),
      ...(where ? [el("div", { class: "where" }, where)] : []),
      el("table", {}, el("tbody", {}, rows.map(([name, text]) => el("tr", {}, el("td", {}, name), el("td", {}, text))))),
    );
    this.node.hidden = false;
    const box = this.node.getBoundingClientRect();
    const x = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 16;
    const y = Math.min(event.clientY + 16, innerHeight - box.height - 8);
    this.node.style.left = Math.max(4, x) + "px";
    this.node.style.top = Math.max(4, y) + "px";
  },
  hide() { this.node.hidden = true; },
};

/* A canvas as wide as its parent, sharp on any display. */
function fitCanvas(canvas, height) {
  const width = Math.max(50, canvas.parentElement.clientWidth), scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = '12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
  return { context, width, height };
}

/*
 * A table whose headers sort it. Columns: {name, unit, title, get(row), cell(row)?, word?}; a word sorts from A, a number
 * from the largest. Only the first rows are made; a button makes more, since a table of 20,000 rows takes seconds.
 */
function sortedTable({ columns, rows, sort, descending, foot, label, shown = 60 }) {
  let current = rows, limit = shown, by = sort, down = descending;
  const body = el("tbody"), heads = [];
  const more = el("button", { type: "button", onclick: () => { limit += 500; fill(); } });
  const note = el("span");
  function ordered() {
    if (by === null || by === undefined) return current;
    const get = columns[by].get, word = columns[by].word;
    const keyed = current.map((row, place) => [get(row), place, row]);
    keyed.sort((a, b) => {
      const empty = (a[0] === null) - (b[0] === null);  // what is not there comes last either way
      if (empty) return empty;
      const order = word ? String(a[0]).localeCompare(String(b[0]), undefined, { numeric: true }) : a[0] - b[0];
      return (down ? -order : order) || a[1] - b[1];
    });
    return keyed.map((item) => item[2]);
  }
  function fill() {
    const all = ordered();
    body.replaceChildren(...all.slice(0, limit).map((row) => el("tr", {}, columns.map((column) => {
      if (column.cell) return el("td", { class: column.right ? "number" : null }, column.cell(row));
      const value = column.get(row);
      if (column.word) return el("td", { class: "word" }, value === null ? "" : value);
      if (value === null) return el("td", { class: "number none" }, "\u2013");
      return el("td", { class: value === 0 ? "number none" : "number" }, value === 0 ? "0" : FORMATS[column.unit || ""](value));
    }))));
    heads.forEach((head, number) => {
      if (!columns[number].fixed) head.setAttribute("aria-sort", number !== by ? "none" : down ? "descending" : "ascending");
    });
    const hidden = all.length - limit;
    more.hidden = hidden <= 0;
    more.textContent = `Show ${Math.min(500, hidden)} more`;
    note.textContent = hidden > 0 ? `${formatCount(limit)} of ${formatCount(all.length)} rows` : "";
  }
  columns.forEach((column, number) => {
    const button = el("button", { type: "button", title: column.title, onclick: () => {
      down = number === by ? !down : !column.word;
      by = number;
      fill();
    } }, column.name);
    const right = column.right || !(column.word || column.cell);
    heads.push(el("th", { scope: "col", class: right ? "number" : null }, column.fixed ? el("div", { class: "fixed" }, column.name) : button));
  });
  const table = el("table", { class: "grid", "aria-label": label }, el("thead", {}, el("tr", {}, heads)), body);
  if (foot) table.append(el("tfoot", {}, el("tr", {}, foot)));
  fill();
  return {
    node: el("div", {}, el("div", { class: "scroll" }, table), el("div", { class: "bar-tools" }, more, note)),
    show(other, otherFoot) {
      current = other;
      limit = shown;
      if (otherFoot) table.tFoot.replaceChildren(el("tr", {}, otherFoot));
      fill();
    },
  };
}

function card(label, value, remark, gauge) {
  const node = el("div", { class: "card" }, el("div", { class: "label" }, label), el("div", { class: "value" }, value));
  if (gauge !== undefined) {
    const share = Math.min(1, gauge) * 100;
    node.append(el("div", { class: "gauge" }, el("i", { class: gauge > 1 ? "over" : "", style: `width:${share}%` })));
  }
  node.append(el("div", { class: "remark" }, remark));
  return node;
}

function swatch(name, kind) {
  const style = kind ? `border-color:var(--${name})` : `background:var(--${name})`;
  return el("i", { class: "swatch " + (kind || ""), style, "aria-hidden": "true" });
}

function settingsSection(pairs) {
  return el("section", {}, el("h2", {}, "Settings"),
    el("dl", { class: "settings" }, pairs.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text)))));
}

/* Run the page, and say so where it cannot be shown. */
async function start(build) {
  const page = document.getElementById("page");
  try {
    build(await readData(), page);
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    page.replaceChildren(el("p", {}, "This report cannot be shown: " + error.message));
    throw error;
  }
}
