/* The page of a comparison: one chart of points, one table. */

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000, HEIGHT = 470, PAD = { left: 74, right: 20, top: 14, bottom: 52 };

function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/* From the least to the most of some numbers, with a little room, in round steps. */
function scaleOf(numbers, from, to) {
  let low = Math.min(...numbers), high = Math.max(...numbers);
  const room = (high - low || Math.abs(high) || 1) * 0.07;
  low = low >= 0 ? Math.max(0, low - room) : low - room;
  high += room;
  const marks = roundSteps(high - low, 7, 10), step = marks[1] || high - low;
  const places = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)), ticks = [];
  for (let k = Math.ceil(low / step); k * step <= high; k++) ticks.push(Number((k * step).toFixed(places)));
  return { at: (number) => from + ((number - low) / (high - low)) * (to - from), ticks };
}

function star(x, y, size) {
  const corners = Array.from({ length: 10 }, (_, k) => {
    const angle = (Math.PI * k) / 5 - Math.PI / 2, far = k % 2 ? size * 0.45 : size;
    return `${(x + far * Math.cos(angle)).toFixed(1)},${(y + far * Math.sin(angle)).toFixed(1)}`;
  });
  return svg("polygon", { points: corners.join(" ") });
}

function chart(data, inks, hidden) {
  const visible = data.series.filter((one) => !hidden.has(one.group) && one.marks.length);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${data.y_label} against ${data.x_label}`, style: "width:100%;display:block" });
  if (!visible.length) {
    picture.append(svg("text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing to show"));
    return picture;
  }
  const marks = visible.flatMap((one) => one.marks), lines = (line) => (line === null ? [] : [line]);
  const x = scaleOf([...marks.map((mark) => mark.x), ...lines(data.x_line)], PAD.left, WIDTH - PAD.right);
  const y = scaleOf([...marks.map((mark) => mark.y), ...lines(data.y_line)], HEIGHT - PAD.bottom, PAD.top);
  const words = (unit, number) => FORMATS[unit](number), right = WIDTH - PAD.right, bottom = HEIGHT - PAD.bottom;
  for (const tick of x.ticks) {
    picture.append(svg("line", { x1: x.at(tick), x2: x.at(tick), y1: PAD.top, y2: bottom, stroke: "var(--line)" }),
      svg("text", { x: x.at(tick), y: bottom + 18, "text-anchor": "middle" }, words(data.x_unit, tick)));
  }
  for (const tick of y.ticks) {
    picture.append(svg("line", { x1: PAD.left, x2: right, y1: y.at(tick), y2: y.at(tick), stroke: "var(--line)" }),
      svg("text", { x: PAD.left - 8, y: y.at(tick) + 4, "text-anchor": "end" }, words(data.y_unit, tick)));
  }
  const dash = { stroke: "var(--plain)", "stroke-dasharray": "7 5", "stroke-width": 1.5 };
  if (data.x_line !== null) picture.append(svg("line", { x1: x.at(data.x_line), x2: x.at(data.x_line), y1: PAD.top, y2: bottom, ...dash }));
  if (data.y_line !== null) picture.append(svg("line", { x1: PAD.left, x2: right, y1: y.at(data.y_line), y2: y.at(data.y_line), ...dash }));
  picture.append(svg("text", { class: "axis-name", x: (PAD.left + right) / 2, y: HEIGHT - 10, "text-anchor": "middle" }, data.x_label),
    svg("text", { class: "axis-name", x: 16, y: (PAD.top + bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 16 ${(PAD.top + bottom) / 2})` }, data.y_label));
  const placed = [];
  for (const one of visible.reverse()) {  // the first is on top
    const ink = inks.get(one.group), ordered = [...one.marks].sort((a, b) => a.x - b.x);
    if (one.joined && ordered.length > 1) {
      picture.append(svg("polyline", { points: ordered.map((mark) => `${x.at(mark.x)},${y.at(mark.y)}`).join(" "), fill: "none",
        stroke: ink, "stroke-width": 2, "stroke-linejoin": "round", ...(one.dashed ? { "stroke-dasharray": "6 5" } : {}) }));
    }
    for (const mark of ordered) {
      const dot = one.starred ? star(x.at(mark.x), y.at(mark.y), 11) : svg("circle", { cx: x.at(mark.x), cy: y.at(mark.y), r: 5.5 });
      dot.setAttribute("stroke", ink);
      dot.setAttribute("stroke-width", 2);
      dot.setAttribute("fill", one.dashed ? "var(--card)" : ink);
      dot.setAttribute("class", "mark");
      picture.append(dot);
      placed.push({ one, mark, px: x.at(mark.x), py: y.at(mark.y) });
    }
  }
  // Marks may lie on top of each other: all that are near the pointer are named, with the nearest one's figures.
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect(), scale = WIDTH / box.width;
    const far = ({ px, py }) => Math.hypot(px - (event.clientX - box.left) * scale, py - (event.clientY - box.top) * scale);
    const near = placed.filter((item) => far(item) < 10).sort((a, b) => far(a) - far(b));
    if (!near.length) { tip.hide(); return; }
    const { mark } = near[0], names = near.map((item) => item.one.label);
    tip.show(event, names[0], names.length > 1 ? "and " + names.slice(1, 12).join("; ") : "", [
      [data.x_label, words(data.x_unit, mark.x)], [data.y_label, words(data.y_unit, mark.y)],
      ...mark.notes.map((note) => [note, ""])]);
  });
  picture.addEventListener("pointerleave", () => tip.hide());
  return picture;
}

function build(data, page) {
  const groups = [...new Set(data.series.map((one) => one.group))], hidden = new Set();
  const inks = new Map(groups.map((group, i) => [group, `var(--c${i % 10})`]));
  const place = el("div", {}), draw = () => place.replaceChildren(chart(data, inks, hidden));
  const legend = el("div", { class: "bar-tools" }, groups.map((group, i) => {
    const button = el("button", { type: "button", "aria-pressed": "true", title: "Show or hide", onclick: () => {
      if (hidden.has(group)) hidden.delete(group); else hidden.add(group);
      button.setAttribute("aria-pressed", String(!hidden.has(group)));
      button.style.opacity = hidden.has(group) ? 0.4 : 1;
      draw();
    } }, swatch("c" + (i % 10)), " " + group);
    return button;
  }));
  draw();
  const columns = data.columns.map((column, i) => {
    const word = data.rows.some((row) => typeof row[i] === "string");
    return { name: column.name, unit: column.unit, word, get: (row) => row[i] };
  });
  const both = data.series.some((one) => one.dashed) && data.series.some((one) => !one.dashed);
  page.replaceChildren(
    el("header", {}, el("h1", {}, data.title), el("p", {}, data.subtitle)),
    el("div", { class: "cards" }, data.facts.map(([name, value, remark]) => card(name, value, remark))),
    el("section", {}, el("h2", {}, "Points"),
      el("p", { class: "about" }, "Point at a mark for its figures; click a name to hide it or show it." + (both ? " Dashed lines and hollow marks are predictions, full ones were measured." : "")),
      legend, place),
    el("section", {}, el("h2", {}, "Figures"),
      ...data.notes.map((note) => el("p", { class: "about" }, note)),
      sortedTable({ label: "All points", columns, rows: data.rows, sort: null, shown: 200 }).node),
    ...(data.settings.length ? [settingsSection(data.settings)] : []));
}

start(build);
