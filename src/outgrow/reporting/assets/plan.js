/* The page of a plan. Times on the charts are whole nanoseconds since the step began. */

const RUN = 0, RECOMPUTE = 1, WAIT = 2, COPYING = 3;
const LANE_HEIGHT = 46, LANE_GAP = 12, LANE_TOP = 22, MEMORY_HEIGHT = 270, LEFT = 74, RIGHT = 12;

/* Numbers from their differences. */
function summed(differences) {
  const numbers = new Float64Array(differences.length);
  let total = 0;
  for (let i = 0; i < numbers.length; i++) numbers[i] = total += differences[i];
  return numbers;
}

/* The first place in a sorted array whose number is above `limit`. */
function firstAbove(sorted, limit) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > limit) high = middle; else low = middle + 1;
  }
  return low;
}

/* Data with columns as arrays; classes say how a span is colored. */
function unpack(data) {
  const phases = data.phases, palette = [...phases, "recompute", "wait", "copying", "offload", "evict", "park", "fetch"];
  const lanes = [["compute", "compute"], ["out", "copy out"], ["back", "copy in"]].map(([key, name]) => {
    const raw = data[key];
    const lane = {
      key, name, activity: raw.activity, start: summed(raw.start), end: summed(raw.end), op: summed(raw.op), value: raw.value,
      live: raw.live ? summed(raw.live) : null,
    };
    lane.kind = Uint8Array.from(raw.activity, (activity, i) =>
      activity === RUN ? data.ops.phase[lane.op[i]] : phases.length + activity - 1);
    return lane;
  });
  const ops = { ...data.ops, end: summed(data.ops.end), plainLive: summed(data.ops.plain_live) };
  ops.start = new Float64Array(ops.end.length);
  for (let i = 1; i < ops.end.length; i++) ops.start[i] = ops.end[i - 1];
  const end = Math.max(1, ops.end.at(-1) || 0, ...lanes.map((lane) => lane.end.at(-1) || 0));
  return { data, palette, lanes, ops, end, compute: lanes[0] };
}

const opName = (model, op) => (op < model.ops.name.length ? model.data.names[model.ops.name[op]] : "the end of the step");
const opModule = (model, op) => (op < model.ops.name.length ? model.data.modules[model.ops.module[op]] : "");
const ofModule = (name) => (name ? " of " + name : "");

function valueWords(model, number) {
  const values = model.data.values, module = model.data.modules[values.module[number]];
  return `${values.kind[number]} value${ofModule(module)}`;
}

/* What to say of one span. */
function describe(model, lane, i) {
  const { data, ops } = model, op = lane.op[i], value = lane.value[i], activity = lane.activity[i];
  const seconds = (lane.end[i] - lane.start[i]) / 1e9;
  const rows = [["from", formatSeconds(lane.start[i] / 1e9)], ["takes", formatSeconds(seconds)]];
  let head, where;
  if (activity === RUN || activity === RECOMPUTE) {
    head = opName(model, op) + (activity === RECOMPUTE ? ", run again" : "");
    where = (activity === RECOMPUTE ? "recompute" : data.phases[ops.phase[op]]) + ofModule(opModule(model, op));
    rows.push(["makes", formatBytes(ops.adds[op])]);
    if (ops.workspace[op]) rows.push(["workspace", formatBytes(ops.workspace[op])]);
  } else if (activity === WAIT) {
    head = "The device waits";
    where = (value >= 0 ? "for the " + valueWords(model, value) : "for room: copies out") + `, before ${opName(model, op)}${ofModule(opModule(model, op))}`;
  } else {
    head = activity === COPYING ? "Processor time of a copy" : data.activities[activity];
    where = valueWords(model, value);
    rows.push(["bytes", formatBytes(data.values.bytes[value])]);
    if (seconds > 0 && activity !== COPYING) rows.push(["speed", formatBytes(data.values.bytes[value] / seconds) + "/s"]);
  }
  if (lane.live) {
    rows.push(["live bytes", formatBytes(lane.live[i])], ["of the budget", formatPercent(lane.live[i] / data.budget_bytes)]);
    if (op < ops.plainLive.length) rows.push(["plain, at this op", formatBytes(ops.plainLive[op])]);
  }
  return { head, where, rows };
}

/* The most of `levels` in each pixel of [from, to], -1 where there is none. */
function envelope(starts, ends, levels, from, to, width) {
  const most = new Float64Array(width).fill(-1), scale = width / (to - from);
  for (let i = firstAbove(ends, from); i < ends.length && starts[i] < to; i++) {
    const first = Math.max(0, Math.floor((starts[i] - from) * scale));
    const last = Math.min(width - 1, Math.max(first, Math.ceil((ends[i] - from) * scale) - 1));
    for (let x = first; x <= last; x++) if (levels[i] > most[x]) most[x] = levels[i];
  }
  return most;
}

/* A curve of steps, filled down to `floor`. */
function drawCurve(context, most, left, yOf, floor, stroke, fill) {
  const line = new Path2D(), area = new Path2D();
  let open = false, y = 0, x = 0;
  const close = () => { area.lineTo(left + x, floor); area.closePath(); open = false; };
  for (x = 0; x < most.length; x++) {
    if (most[x] < 0) { if (open) close(); continue; }
    y = yOf(most[x]);
    if (!open) { line.moveTo(left + x, y); area.moveTo(left + x, floor); area.lineTo(left + x, y); open = true; }
    line.lineTo(left + x, y); line.lineTo(left + x + 1, y);
    area.lineTo(left + x, y); area.lineTo(left + x + 1, y);
  }
  if (open) close();
  context.fillStyle = fill;
  context.fill(area);
  context.strokeStyle = stroke;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke(line);
}

function label(context, text, x, y, ink, back) {
  context.lineJoin = "round";
  context.lineWidth = 4;
  context.strokeStyle = back;
  context.strokeText(text, x, y);
  context.fillStyle = ink;
  context.fillText(text, x, y);
}

class Charts {
  constructor(model) {
    this.model = model;
    this.from = 0;
    this.to = model.end;
    this.memory = el("canvas", { "aria-hidden": "true" });
    this.lanes = el("canvas", { "aria-hidden": "true" });
    this.over = el("canvas", { class: "over", "aria-hidden": "true" });
    this.small = el("canvas", { "aria-hidden": "true" });
    const { data } = model;
    this.stage = el("div", { class: "stage", tabindex: "0", role: "application", "aria-label":
      `Live bytes and three lanes over the step. Planned peak ${formatBytes(data.peak.bytes)} at ${data.peak.where}, plain peak ` +
      `${formatBytes(data.plain.peak_bytes)}, budget ${formatBytes(data.budget_bytes)}. Plus and minus zoom, arrows move, 0 shows all.` },
      this.memory, this.lanes, this.over);
    this.overview = el("div", { class: "overview", title: "Drag to choose what is shown above" }, this.small);
    this.range = el("span", { class: "range" });
    this.most = Math.max(data.budget_bytes, data.plain.peak_bytes, data.peak.bytes) * 1.07;
    this.listen();
  }

  tools() {
    const button = (text, name, act) => el("button", { type: "button", "aria-label": name, title: name, onclick: act }, text);
    return el("div", { class: "bar-tools" },
      button("+", "Zoom in", () => this.zoom(0.5)),
      button("\u2212", "Zoom out", () => this.zoom(2)),
      button("\u2190", "Earlier", () => this.pan(-0.25)),
      button("\u2192", "Later", () => this.pan(0.25)),
      button("All", "Show the whole step", () => this.view(0, this.model.end)),
      button("Peak", "Zoom to the peak", () => this.toPeak()),
      el("span", { class: "grow" }), this.range);
  }

  toPeak() {
    const at = this.model.data.peak.seconds * 1e9, lane = this.model.compute, span = this.model.data.peak.span;
    const long = span < 0 ? this.model.end : Math.max((lane.end[span] - lane.start[span]) * 12, this.model.end / 400);
    this.view(at - long / 2, at + long / 2);
  }

  view(from, to) {
    const least = 2000, end = this.model.end;
    const long = Math.min(end, Math.max(least, to - from));
    from = Math.min(Math.max(0, from), end - long);
    this.from = from;
    this.to = from + long;
    this.draw();
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    const long = (this.to - this.from) * factor, share = (at - this.from) / (this.to - this.from);
    this.view(at - share * long, at - share * long + long);
  }

  pan(share) { const by = (this.to - this.from) * share; this.view(this.from + by, this.to + by); }

  timeAt(x) { return this.from + ((x - LEFT) / this.width) * (this.to - this.from); }

  xOf(time) { return LEFT + ((time - this.from) / (this.to - this.from)) * this.width; }

  listen() {
    const { stage, overview } = this;
    let held = null;
    stage.addEventListener("wheel", (event) => {
      const out = event.deltaY > 0;
      if (out && this.to - this.from >= this.model.end) return;  // all is shown: the page scrolls on
      event.preventDefault();
      const x = event.clientX - stage.getBoundingClientRect().left;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / this.width);
      else this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 240))), this.timeAt(x));
      this.hover(event);
    }, { passive: false });
    stage.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      held = { x: event.clientX, from: this.from, to: this.to };
      stage.setPointerCapture(event.pointerId);
      stage.classList.add("dragging");
    });
    stage.addEventListener("pointermove", (event) => {
      if (held) {
        const by = ((held.x - event.clientX) / this.width) * (held.to - held.from);
        this.view(held.from + by, held.to + by);
      }
      this.hover(event);
    });
    const release = () => { held = null; stage.classList.remove("dragging"); };
    stage.addEventListener("pointerup", release);
    stage.addEventListener("pointercancel", release);
    stage.addEventListener("pointerleave", () => this.leave());
    stage.addEventListener("dblclick", () => this.view(0, this.model.end));
    stage.addEventListener("keydown", (event) => {
      const acts = {
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.view(0, this.model.end),
        ArrowLeft: () => this.pan(-0.1), ArrowRight: () => this.pan(0.1), Home: () => this.view(0, this.to - this.from),
        End: () => this.view(this.model.end, this.model.end + this.to - this.from),
      };
      if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      acts[event.key]();
    });
    let brush = null;
    const timeIn = (event) => ((event.clientX - overview.getBoundingClientRect().left - LEFT) / this.width) * this.model.end;
    overview.addEventListener("pointerdown", (event) => {
      const at = timeIn(event), near = (8 / this.width) * this.model.end, whole = this.to - this.from >= this.model.end;
      if (!whole && Math.abs(at - this.from) < near) brush = { fixed: this.to };
      else if (!whole && Math.abs(at - this.to) < near) brush = { fixed: this.from };
      else if (!whole && at > this.from && at < this.to) brush = { grip: at - this.from };
      else brush = { fixed: at };
      overview.setPointerCapture(event.pointerId);
    });
    overview.addEventListener("pointermove", (event) => {
      if (!brush) return;
      const at = timeIn(event);
      if (brush.grip !== undefined) this.view(at - brush.grip, at - brush.grip + this.to - this.from);
      else this.view(Math.max(0, Math.min(at, brush.fixed)), Math.min(this.model.end, Math.max(at, brush.fixed)));
    });
    for (const name of ["pointerup", "pointercancel"]) overview.addEventListener(name, () => { brush = null; });
  }

  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.paint();
    });
  }

  paint() {
    this.width = Math.max(50, this.stage.clientWidth - LEFT - RIGHT);
    this.paintMemory();
    this.paintLanes();
    this.paintOverview();
    fitCanvas(this.over, this.stage.clientHeight);
    const { end } = this.model;
    this.range.textContent = this.to - this.from >= end ? `the whole step, ${formatSeconds(end / 1e9)}`
      : `${formatSeconds(this.from / 1e9)} to ${formatSeconds(this.to / 1e9)}, ${formatSeconds((this.to - this.from) / 1e9)} of ${formatSeconds(end / 1e9)}`;
  }

  paintMemory() {
    const { data, ops, compute } = this.model;
    const { context, height } = fitCanvas(this.memory, MEMORY_HEIGHT);
    const floor = height - 4, yOf = (bytes) => floor - (bytes / this.most) * (floor - 8);
    const ink = color("ink"), soft = color("soft"), back = color("card"), right = LEFT + this.width;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const [mark, words] of byteTicks(this.most, 5)) {
      context.fillStyle = color("line");
      context.fillRect(LEFT, Math.round(yOf(mark)), this.width, 1);
      context.fillStyle = soft;
      context.fillText(words, LEFT - 8, Math.max(8, yOf(mark)));
    }
    const width = Math.floor(this.width);
    const plain = envelope(ops.start, ops.end, ops.plainLive, this.from, this.to, width);
    const planned = envelope(compute.start, compute.end, compute.live, this.from, this.to, width);
    drawCurve(context, plain, LEFT, yOf, floor, color("plain"), color("plain-fill"));
    drawCurve(context, planned, LEFT, yOf, floor, color("planned"), color("planned-fill"));
    const line = Math.round(yOf(data.budget_bytes)) + 0.5;
    context.setLineDash([7, 5]);
    context.strokeStyle = color("budget");
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(LEFT, line);
    context.lineTo(right, line);
    context.stroke();
    context.setLineDash([]);
    context.textBaseline = "bottom";
    label(context, `budget ${formatBytes(data.budget_bytes)}`, right - 4, line - 3, color("budget"), back);
    const plainAt = ops.start[data.plain.peak_op];
    if (data.plain.peak_bytes > data.budget_bytes * 1.02) {
      this.mark(context, plainAt, yOf(data.plain.peak_bytes), color("plain"), [`plain ${formatBytes(data.plain.peak_bytes)}`, data.plain.where], soft, back, -1);
    }
    this.mark(context, data.peak.seconds * 1e9, yOf(data.peak.bytes), color("planned"), [`planned peak ${formatBytes(data.peak.bytes)}`, data.peak.where], ink, back, 1);
  }

  /* A dot at a moment, with two lines of text beside it. */
  mark(context, time, y, ink, lines, text, back, below) {
    if (!(time >= this.from && time <= this.to)) return;
    const x = this.xOf(time), leftwards = x > LEFT + this.width * 0.6;
    context.beginPath();
    context.arc(x, y, 4.5, 0, 7);
    context.fillStyle = ink;
    context.fill();
    context.lineWidth = 2;
    context.strokeStyle = back;
    context.stroke();
    context.textBaseline = "middle";
    const room = Math.floor((leftwards ? x - LEFT : LEFT + this.width - x) / 6.6);
    const short = lines.map((line) => (line.length > room ? line.slice(0, Math.max(0, room - 1)) + "\u2026" : line));
    const wide = Math.max(...short.map((line) => context.measureText(line).width)) + 12;
    const left = leftwards ? x - 9 - wide : x + 9, top = below > 0 ? y + 9 : Math.max(0, y - 10);
    context.globalAlpha = 0.86;
    context.fillStyle = back;
    context.beginPath();
    context.roundRect(left, top, wide, 34, 5);
    context.fill();
    context.globalAlpha = 1;
    context.textAlign = "left";
    context.fillStyle = text;
    short.forEach((line, number) => context.fillText(line, left + 6, top + 10 + number * 15));
  }

  laneTop(number) { return LANE_TOP + number * (LANE_HEIGHT + LANE_GAP); }

  paintLanes() {
    const { lanes } = this.model, height = this.laneTop(3);
    const { context } = fitCanvas(this.lanes, height);
    const soft = color("soft"), width = Math.floor(this.width);
    context.textBaseline = "middle";
    this.axis(context, soft, height);
    lanes.forEach((lane, number) => {
      const top = this.laneTop(number);
      context.textAlign = "right";
      context.fillStyle = color("ink");
      context.fillText(lane.name, LEFT - 8, top + LANE_HEIGHT / 2);
      context.fillStyle = color("hover");
      context.fillRect(LEFT, top, this.width, LANE_HEIGHT);
      this.paintLane(context, lane, top, width);
    });
  }

  /* Time marks above the lanes: round moments inside of what is shown. */
  axis(context, soft, height) {
    const span = (this.to - this.from) / 1e9, marks = roundSteps(span, Math.max(3, this.width / 120), 10);
    const step = marks.length > 1 ? marks[1] : span;
    const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    for (let k = Math.ceil(this.from / 1e9 / step - 1e-9); k * step <= this.to / 1e9 + 1e-12; k++) {
      const x = Math.round(this.xOf(k * step * 1e9));
      context.fillStyle = color("line");
      context.fillRect(x, LANE_TOP - 5, 1, height);
      context.fillStyle = soft;
      context.textAlign = x > LEFT + this.width - 20 ? "right" : "center";
      const unit = this.to >= 1e9 ? [1, "s"] : this.to >= 1e6 ? [1e3, "ms"] : [1e6, "\u00b5s"];
      const digits = Math.max(0, places - Math.round(Math.log10(unit[0])));
      context.fillText((k * step * unit[0]).toFixed(digits) + " " + unit[1], x, LANE_TOP - 13);
    }
  }

  paintLane(context, lane, top, width) {
    const { palette } = this.model, inks = palette.map(color), scale = width / (this.to - this.from);
    const cover = new Map();  // by kind, the share of each pixel that thin spans take
    context.textAlign = "left";
    for (let i = firstAbove(lane.end, this.from); i < lane.end.length && lane.start[i] < this.to; i++) {
      const first = Math.max(0, (lane.start[i] - this.from) * scale), last = Math.min(width, (lane.end[i] - this.from) * scale);
      const kind = lane.kind[i];
      if (last - first < 1.5) {
        if (!cover.has(kind)) cover.set(kind, new Float32Array(width));
        const shares = cover.get(kind);
        for (let x = Math.floor(first); x < Math.min(width, Math.ceil(last)); x++) {
          shares[x] += Math.min(last, x + 1) - Math.max(first, x);
        }
        continue;
      }
      context.fillStyle = inks[kind];
      const edge = Math.floor(first), end = Math.ceil(last);  // whole pixels: a lane that is never idle has no stripes
      context.fillRect(LEFT + edge, top, end - edge, LANE_HEIGHT);
      if (last - first > 5) {
        context.fillStyle = "rgba(255, 255, 255, .4)";
        context.fillRect(LEFT + end - 1, top, 1, LANE_HEIGHT);
      }
      if (last - first > 46) {
        const words = describe(this.model, lane, i);
        const text = lane.key === "compute" ? words.head : words.where, room = Math.floor((last - first - 10) / 6.6);
        context.fillStyle = "#ffffff";
        context.save();
        context.beginPath();
        context.rect(LEFT + first, top, last - first, LANE_HEIGHT);
        context.clip();
        context.fillText(text.length > room ? text.slice(0, Math.max(1, room - 1)) + "\u2026" : text, LEFT + first + 5, top + LANE_HEIGHT / 2);
        context.restore();
      }
    }
    const filled = new Float32Array(width);
    for (const kind of [...cover.keys()].sort((a, b) => b - a)) {  // waits and recompute at the bottom, where they line up
      const shares = cover.get(kind);
      context.fillStyle = inks[kind];
      for (let x = 0; x < width; x++) {
        if (shares[x] <= 0) continue;
        const high = Math.min(1 - filled[x], Math.max(shares[x], lane.live ? 0 : 0.06)) * LANE_HEIGHT;  // a short copy is seen, too
        context.fillRect(LEFT + x, top + LANE_HEIGHT - filled[x] * LANE_HEIGHT - high, 1, high);
        filled[x] += shares[x];
      }
    }
  }

  paintOverview() {
    const { ops, compute, end } = this.model, { context, height } = fitCanvas(this.small, 46);
    const floor = height - 1, yOf = (bytes) => floor - (bytes / this.most) * (floor - 3), width = Math.floor(this.width);
    if (this.overviewWidth !== width) {
      this.overviewWidth = width;
      this.overviewPlain = envelope(ops.start, ops.end, ops.plainLive, 0, end, width);
      this.overviewPlanned = envelope(compute.start, compute.end, compute.live, 0, end, width);
    }
    drawCurve(context, this.overviewPlain, LEFT, yOf, floor, color("plain"), color("plain-fill"));
    drawCurve(context, this.overviewPlanned, LEFT, yOf, floor, color("planned"), color("planned-fill"));
    const x = LEFT + (this.from / end) * this.width, last = LEFT + (this.to / end) * this.width;
    context.fillStyle = color("window");
    context.fillRect(x, 0, Math.max(2, last - x), height);
    context.fillStyle = color("planned");
    context.fillRect(x, 0, 2, height);
    context.fillRect(Math.max(x, last - 2), 0, 2, height);
    context.strokeStyle = color("line");
    context.strokeRect(LEFT + 0.5, 0.5, this.width - 1, height - 1);
  }

  /* The lane that a place on the stage belongs to; memory counts as the compute lane. */
  laneAt(y) {
    const inLanes = y - MEMORY_HEIGHT;
    if (inLanes < LANE_TOP) return 0;
    return Math.min(2, Math.floor((inLanes - LANE_TOP + LANE_GAP / 2) / (LANE_HEIGHT + LANE_GAP)));
  }

  hover(event) {
    const box = this.stage.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    if (x < LEFT || x > LEFT + this.width) { this.leave(); return; }
    const { context, height } = fitCanvas(this.over, this.stage.clientHeight);
    context.fillStyle = color("soft");
    context.fillRect(Math.round(x), 0, 1, height);
    const lane = this.model.lanes[this.laneAt(y)];
    const found = this.spansAt(lane, x);
    if (!found) {
      tip.show(event, lane.name, "idle", [["at", formatSeconds(this.timeAt(x) / 1e9)]]);
      return;
    }
    const { head, where, rows } = describe(this.model, lane, found.longest);
    if (found.count > 1) rows.push(["beside it in this pixel", `${formatCount(found.count - 1)} more: zoom in`]);
    const left = Math.max(LEFT, this.xOf(lane.start[found.longest])), right = Math.min(LEFT + this.width, this.xOf(lane.end[found.longest]));
    if (right - left > 2) {
      context.strokeStyle = color("ink");
      context.lineWidth = 1.5;
      context.strokeRect(left, MEMORY_HEIGHT + this.laneTop(this.laneAt(y)), right - left, LANE_HEIGHT);
    }
    tip.show(event, head, where, rows);
  }

  /* The spans under a pixel, or else one that is at most three pixels away. */
  spansAt(lane, x) {
    for (const reach of [0.5, 3]) {
      const from = this.timeAt(x - reach), to = this.timeAt(x + reach);
      let longest = -1, count = 0;
      for (let i = firstAbove(lane.end, from); i < lane.end.length && lane.start[i] <= to; i++) {
        count++;
        if (longest < 0 || lane.end[i] - lane.start[i] > lane.end[longest] - lane.start[longest]) longest = i;
      }
      if (count) return { longest, count };
    }
    return null;
  }

  leave() {
    fitCanvas(this.over, this.stage.clientHeight);
    tip.hide();
  }
}

/* --- the sections --- */

function headCards(data) {
  const { prediction, plain } = data, last = data.history.steps.at(-1);
  const over = prediction.plain_step_seconds > 0 ? prediction.step_seconds / prediction.plain_step_seconds : 1;
  const share = (seconds) => prediction.step_seconds > 0 ? `${formatPercent(seconds / prediction.step_seconds)} of the step` : "";
  const cards = [
    card("Peak, predicted", formatBytes(prediction.peak_bytes),
      `${formatPercent(prediction.peak_bytes / data.budget_bytes)} of the budget of ${formatBytes(data.budget_bytes)}`, prediction.peak_bytes / data.budget_bytes),
    card("Plain step's peak", formatBytes(plain.peak_bytes), `${formatPercent(prediction.peak_bytes / plain.peak_bytes)} of it under the plan`),
    card("Step, predicted", formatSeconds(prediction.step_seconds), over === 1 ? "as long as the plain step"
      : `${formatPercent(Math.abs(over - 1))} ${over > 1 ? "more" : "less"} than the plain step's ${formatSeconds(prediction.plain_step_seconds)}`),
    card("Device waits", formatSeconds(prediction.stall_seconds), share(prediction.stall_seconds)),
    card("Recomputing", formatSeconds(prediction.recompute_seconds), `${formatBytes(prediction.recomputed_bytes)} made anew`),
    card("Leaves and comes back", formatBytes(prediction.offloaded_bytes + prediction.evicted_bytes),
      prediction.evicted_bytes ? `${formatBytes(prediction.evicted_bytes)} of it evicted` : "as planned, nothing evicted"),
  ];
  if (last) {
    cards.push(card("Peak, measured", formatBytes(last.measured_peak_bytes), "of the last step", last.measured_peak_bytes / last.budget_bytes));
    cards.push(card("Step, measured", formatSeconds(last.step_seconds), `the last of ${formatCount(data.history.first_step + data.history.steps.length - 1)}`));
  }
  return el("div", { class: "cards" }, cards);
}

function chartSection(model, charts) {
  const { data } = model, used = new Set(model.lanes.flatMap((lane) => [...new Set(lane.kind)]));
  const names = { copying: "processor time of copies", wait: "device waits", fetch: "copy back", evict: "evict (beyond the plan)", recompute: "run again" };
  const item = (mark, text) => el("span", {}, mark, el("div", {}, text));
  return el("section", {},
    el("h2", {}, "Memory and lanes over the step"),
    el("p", { class: "about" }, "Live bytes at the worst moment of each op, and what the device and its two copy lanes do. " +
      "Wheel or + and \u2212 zoom, dragging moves, a double click shows all; or choose a part in the strip below. " +
      "Where ops are thinner than a pixel, each pixel shows their shares of its time."),
    el("div", { class: "legend" },
      item(swatch("planned", "rule"), ["planned, peak ", el("b", {}, formatBytes(data.peak.bytes)), ` at ${data.peak.where}`]),
      item(swatch("plain", "rule"), ["plain, peak ", el("b", {}, formatBytes(data.plain.peak_bytes)), ` at ${data.plain.where}`]),
      item(swatch("budget", "rule dashes"), ["budget ", el("b", {}, formatBytes(data.budget_bytes))])),
    charts.tools(), charts.stage,
    el("div", { class: "legend" }, model.palette.map((name, kind) => (used.has(kind) ? item(swatch(name), names[name] || name) : null))),
    charts.overview);
}

const HOLDER_INKS = {
  parameters: "c0", buffers: "c9", gradients: "c1", "optimizer state": "c4", "shared state": "c5", inputs: "c8", "saved values": "c2",
  temporaries: "c6", "workspace of the op": "c3", "for making values anew": "recompute", "outside of the trace": "c7",
};

function holdersSection(model) {
  const { data } = model, { order, plan, plain } = data.holders;
  const total = (held) => Object.values(held.kinds).reduce((a, b) => a + b, 0);
  const most = Math.max(total(plan), total(plain), 1);
  const bar = (name, held) => el("div", { class: "stack-row" }, el("span", {}, name),
    el("div", { class: "stack", role: "img", "aria-label": `${name}: ` + order.filter((kind) => held.kinds[kind]).map((kind) => `${kind} ${formatBytes(held.kinds[kind])}`).join(", ") },
      order.filter((kind) => held.kinds[kind]).map((kind) => {
        const part = el("i", { style: `width:${(held.kinds[kind] / most) * 100}%;background:var(--${HOLDER_INKS[kind]})` });
        part.addEventListener("pointermove", (event) => tip.show(event, kind, `at the ${name} peak`, [["bytes", formatBytes(held.kinds[kind])], ["share", formatPercent(held.kinds[kind] / total(held))]]));
        part.addEventListener("pointerleave", () => tip.hide());
        return part;
      })), el("span", { class: "number" }, formatBytes(total(held))));
  const kinds = order.filter((kind) => plan.kinds[kind] || plain.kinds[kind]);
  const kindTable = sortedTable({
    label: "What holds the peaks, by kind",
    columns: [
      { name: "kind", word: true, get: (kind) => kind, cell: (kind) => el("span", {}, swatch(HOLDER_INKS[kind]), " " + kind) },
      { name: "planned", unit: "bytes", get: (kind) => plan.kinds[kind] || 0 },
      { name: "plain", unit: "bytes", get: (kind) => plain.kinds[kind] || 0 },
    ],
    rows: kinds, sort: 1, descending: true,
    foot: [el("td", {}, "all"), el("td", { class: "number" }, formatBytes(total(plan))), el("td", { class: "number" }, formatBytes(total(plain)))],
  });
  const values = data.values;
  const valueTable = sortedTable({
    label: "The largest values at the planned peak",
    columns: [
      { name: "bytes", unit: "bytes", get: (v) => values.bytes[v] },
      { name: "kind", word: true, get: (v) => values.kind[v] },
      { name: "module", word: true, get: (v) => data.modules[values.module[v]] || "(none)" },
      { name: "made by", word: true, get: (v) => (values.op[v] < 0 ? "before the step" : opName(model, values.op[v])) },
      { name: "plan", word: true, get: (v) => values.fate[v] },
    ],
    rows: plan.values, sort: 0, descending: true, shown: 15,
  });
  const others = plan.count - plan.values.length;
  return el("section", {}, el("h2", {}, "What holds the peak"),
    el("p", { class: "about" }, `The planned step peaks at ${data.peak.where}, ${formatSeconds(data.peak.seconds)} after it begins; the plain one at ${data.plain.where}.`),
    bar("planned", plan), bar("plain", plain),
    el("div", { class: "split" },
      el("div", {}, el("h3", {}, "By kind"), kindTable.node),
      el("div", {}, el("h3", {}, "The largest values at the planned peak"), valueTable.node,
        others > 0 ? el("p", { class: "about" }, `${formatCount(others)} smaller values are not listed.`) : null)));
}

const DECISIONS = [["kept", "keep"], ["offloaded", "offload"], ["recomputed", "recompute"], ["parked", "park"]];

/* Rows of modules put together by the first `depth` words of their names; 0 leaves them as they are. */
function grouped(data, depth) {
  const table = data.modules_table, fields = Object.keys(table).filter((name) => name !== "module"), rows = new Map();
  table.module.forEach((module, i) => {
    const full = data.modules[module], name = depth ? full.split(".").slice(0, depth).join(".") : full;
    if (!rows.has(name)) rows.set(name, { name, ...Object.fromEntries(fields.map((field) => [field, 0])) });
    const row = rows.get(name);
    for (const field of fields) row[field] += table[field][i];
  });
  return [...rows.values()];
}

function modulesSection(model) {
  const { data } = model, table = data.modules_table;
  const deepest = Math.max(1, ...table.module.map((module) => data.modules[module].split(".").length));
  let depth = 0;
  if (table.module.length > 300) {  // as fine as a few hundred rows allow
    for (depth = deepest; depth > 1 && grouped(data, depth).length > 300; depth--);
  }
  const all = ["offloaded", "recomputed", "evicted", "parked", "recompute_seconds", "copy_seconds", "wait_seconds"];
  const present = new Set(all.filter((field) => table[field].some((amount) => amount > 0)));
  const heads = {
    kept: ["kept", "bytes", "Saved values that stay"], offloaded: ["offloaded", "bytes", "Saved values that leave and come back"],
    recomputed: ["recomputed", "bytes", "Saved values that are dropped and made anew"],
    evicted: ["evicted", "bytes", "What the cache sends away beyond the plan; it counts as kept as well"],
    parked: ["parked", "bytes", "What the program holds and does not need for a while"],
    compute_seconds: ["compute", "seconds", "Time of its ops"], recompute_seconds: ["run again", "seconds", "Time of its ops when run again"],
    copy_seconds: ["copies", "seconds", "Time of its values on the copy lanes"], wait_seconds: ["waits", "seconds", "Time for which its ops wait"],
  };
  let most = 1;
  const columns = [{ name: "module", word: true, get: (row) => row.name || "(outside of modules)" },
    { name: "", fixed: true, get: () => 0, cell: (row) => el("div", { class: "mix" }, DECISIONS.map(([field, ink]) => (row[field]
      ? el("i", { title: `${heads[field][0]} ${formatBytes(row[field])}`, style: `width:${(row[field] / most) * 100}%;background:var(--${ink})` }) : null))) },
    { name: "values", unit: "count", title: "Saved values", get: (row) => row.values }];
  for (const [field, [name, unit, title]] of Object.entries(heads)) {
    if (field === "kept" || field === "compute_seconds" || present.has(field)) columns.push({ name, unit, title, get: (row) => row[field] });
  }
  const foot = (rows) => columns.map((column) => {
    if (column.word) return el("td", {}, `all ${formatCount(rows.length)}`);
    if (column.fixed) return el("td", {});
    const sum = rows.reduce((total, row) => total + column.get(row), 0);
    return el("td", { class: "number" }, FORMATS[column.unit](sum));
  });
  const biggest = (rows) => Math.max(1, ...rows.map((row) => DECISIONS.reduce((sum, [field]) => sum + row[field], 0)));
  let rows = grouped(data, depth);
  most = biggest(rows);
  const shown = sortedTable({ label: "Decisions by module", columns, rows, sort: null, foot: foot(rows), shown: 40 });
  const filter = el("input", { type: "search", placeholder: "part of a name", "aria-label": "Only modules whose name has" });
  const select = el("select", { "aria-label": "How modules are put together" }, el("option", { value: "0" }, "every module"),
    Array.from({ length: deepest - 1 }, (_, i) => el("option", { value: String(i + 1) }, i ? `${i + 1} levels of names` : "1 level of names")));
  select.value = String(depth >= deepest ? 0 : depth);
  const update = () => {
    const word = filter.value.trim().toLowerCase();
    rows = grouped(data, Number(select.value)).filter((row) => row.name.toLowerCase().includes(word));
    most = biggest(rows);
    shown.show(rows, foot(rows));
  };
  filter.addEventListener("input", update);
  select.addEventListener("change", update);
  const legend = DECISIONS.filter(([field]) => field === "kept" || present.has(field));
  return el("section", {}, el("h2", {}, "Decisions by module"),
    el("p", { class: "about" }, "Saved values count for the module that saved them first. What is parked, because the program holds it without need, " +
      "may be a saved value too, and then counts twice. Click a column to sort by it."),
    el("div", { class: "bar-tools" }, el("label", {}, "Show ", select), el("label", {}, "with ", filter), el("span", { class: "grow" }),
      el("div", { class: "legend" }, legend.map(([field, ink]) => el("span", {}, swatch(ink), field)))),
    shown.node);
}

/* Dots for what was measured and a line for what was predicted, step by step. */
function historyChart(data, title, series, unit, limit) {
  const canvas = el("canvas", { role: "img", "aria-label": title }), steps = data.history.steps, format = FORMATS[unit];
  const top = 1.08 * Math.max(1e-12, limit || 0, ...series.flatMap((one) => steps.map((step) => one.get(step) || 0)));
  const left = 74, right = 14, height = 190, floor = height - 24;
  let width = 0;
  const xOf = (i) => left + ((i + 0.5) / steps.length) * width;
  const paint = () => {
    const { context, width: whole } = fitCanvas(canvas, height);
    width = whole - left - right;
    const yOf = (number) => floor - (number / top) * (floor - 6);
    context.textBaseline = "middle";
    const ticks = unit === "bytes" ? byteTicks(top, 4) : roundSteps(top, 4, 10).map((mark) => [mark, mark ? format(mark) : "0"]);
    for (const [mark, words] of ticks) {
      if (mark > top) continue;
      context.fillStyle = color("line");
      context.fillRect(left, Math.round(yOf(mark)), width, 1);
      context.fillStyle = color("soft");
      context.textAlign = "right";
      context.fillText(words, left - 8, Math.max(8, yOf(mark)));
    }
    const every = Math.ceil(steps.length / Math.max(1, width / 46));
    context.textAlign = "center";
    context.fillStyle = color("soft");
    for (let i = 0; i < steps.length; i += every) context.fillText(String(data.history.first_step + i), xOf(i), height - 10);
    if (limit) {
      context.setLineDash([7, 5]);
      context.strokeStyle = color("budget");
      context.strokeRect(left, Math.round(yOf(limit)) + 0.5, width, 0);
      context.setLineDash([]);
    }
    for (const one of series) {
      context.strokeStyle = context.fillStyle = color(one.ink);
      context.lineWidth = 1.5;
      context.beginPath();
      let open = false;
      steps.forEach((step, i) => {
        const number = one.get(step);
        if (number === null) { open = false; return; }
        if (one.dots) {
          context.moveTo(xOf(i) + 3, yOf(number));
          context.arc(xOf(i), yOf(number), steps.length > 300 ? 1.5 : 3, 0, 7);
        } else {
          const half = width / steps.length / 2;
          context[open ? "lineTo" : "moveTo"](xOf(i) - half, yOf(number));
          context.lineTo(xOf(i) + half, yOf(number));
          open = true;
        }
      });
      if (one.dots) context.fill(); else context.stroke();
    }
  };
  canvas.addEventListener("pointermove", (event) => {
    const i = Math.floor(((event.clientX - canvas.getBoundingClientRect().left - left) / width) * steps.length);
    if (i < 0 || i >= steps.length) { tip.hide(); return; }
    tip.show(event, `step ${data.history.first_step + i}`, title, series.map((one) => {
      const number = one.get(steps[i]);
      return [one.name, number === null ? "\u2013" : format(number)];
    }));
  });
  canvas.addEventListener("pointerleave", () => tip.hide());
  return { node: el("div", { class: "small" }, el("h3", {}, title), canvas), paint };
}

function measuredSection(data, painters) {
  const section = el("section", {}, el("h2", {}, "Predicted against measured")), steps = data.history.steps;
  if (!steps.length) {
    section.append(el("p", { class: "about" }, "Nothing was measured: this plan was made without training."));
    return section;
  }
  const last = steps.at(-1), { prediction } = data;
  const followed = last.predicted_peak_bytes !== null;
  // The plan on this page may be a newer one than the last step's: then only what that step noted can be compared.
  const same = last.predicted_peak_bytes === prediction.peak_bytes && last.predicted_step_seconds === prediction.step_seconds;
  const rows = [
    ["peak", "bytes", last.predicted_peak_bytes, last.measured_peak_bytes],
    ["time of the step", "seconds", last.predicted_step_seconds, last.step_seconds],
    ["device waits", "seconds", same ? prediction.stall_seconds : null, last.stall_seconds],
    ["running ops again", "seconds", same ? prediction.recompute_seconds : null, last.recompute_seconds],
    ["left the device", "bytes", same ? prediction.offloaded_bytes + prediction.evicted_bytes : null, last.offloaded_bytes],
    ["made anew", "bytes", same ? prediction.recomputed_bytes : null, last.recomputed_bytes],
  ].map(([name, unit, predicted, measured]) => ({ name, unit, predicted, measured, off: predicted ? (measured / predicted - 1) * 100 : null }));
  const amount = (row, number) => (number === null ? "\u2013" : FORMATS[row.unit](number));
  const table = sortedTable({
    label: "The last step, predicted and measured", rows, sort: null,
    columns: [
      { name: "the last step", word: true, fixed: true, get: (row) => row.name },
      { name: "predicted", fixed: true, right: true, get: (row) => row.predicted, cell: (row) => amount(row, row.predicted) },
      { name: "measured", fixed: true, right: true, get: (row) => row.measured, cell: (row) => amount(row, row.measured) },
      { name: "difference", fixed: true, right: true, get: (row) => row.off, cell: (row) => (row.off === null ? "\u2013" : (row.off > 0 ? "+" : "") + row.off.toFixed(1) + "%") },
    ],
  });
  const bytes = historyChart(data, "Peak of each step", [
    { name: "predicted", ink: "planned", get: (step) => step.predicted_peak_bytes },
    { name: "measured", ink: "c1", dots: true, get: (step) => step.measured_peak_bytes }], "bytes", last.budget_bytes);
  const seconds = historyChart(data, "Time of each step", [
    { name: "predicted", ink: "planned", get: (step) => step.predicted_step_seconds },
    { name: "measured", ink: "c1", dots: true, get: (step) => step.step_seconds }], "seconds");
  painters.push(bytes.paint, seconds.paint);
  const times = (count) => (count === 1 ? "once" : `${count} times`);
  section.append(
    el("p", { class: "about" }, followed ? "The last step followed a plan. Steps without a prediction were recorded, or departed from their plan."
      : "The last step followed no plan: it was recorded, or departed from its plan, so that there is no prediction to compare with."),
    table.node,
    el("div", { class: "split" }, bytes.node, seconds.node),
    el("div", { class: "legend" }, el("span", {}, swatch("planned", "rule"), "predicted"), el("span", {}, swatch("c1"), "measured"), el("span", {}, swatch("budget", "rule dashes"), "budget")),
    el("p", { class: "about" }, `Planning took ${formatSeconds(last.plan_seconds)}. Plans were made anew ${times(last.replans)}; memory ran out ${times(last.oom_retries)} (page faults).`));
  return section;
}

function build(data, page) {
  const model = unpack(data), charts = new Charts(model), painters = [() => charts.paint()];
  const alert = data.least_budget_bytes === null ? null : el("section", { class: "alert", role: "alert" }, el("p", {},
    `This plan does not fit its budget of ${formatBytes(data.budget_bytes)}: it peaks at ${formatBytes(data.prediction.peak_bytes)}. The least budget that any plan can hold is ${formatBytes(data.least_budget_bytes)}.`));
  page.replaceChildren(
    el("header", {}, el("h1", {}, data.title), el("p", {}, `Policy ${data.policy}, budget ${formatBytes(data.budget_bytes)}; ${formatCount(data.ops.name.length)} ops`)),
    ...(alert ? [alert] : []), headCards(data), chartSection(model, charts), holdersSection(model), modulesSection(model),
    measuredSection(data, painters), settingsSection(data.settings),
    el("footer", {}, "Times and memory of the plan are the simulator's. Sizes: 1 MiB is 1,048,576 bytes."));
  const paint = () => painters.forEach((one) => one());
  paint();
  let pending = 0;
  addEventListener("resize", () => { clearTimeout(pending); pending = setTimeout(paint, 60); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
}

start(build);
