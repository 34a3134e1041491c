"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("timeline");
  const tip = document.getElementById("tip");
  const range = document.getElementById("range");
  const pen = canvas.getContext("2d");
  const devices = data.memory.length;
  const left = 44, right = 86, top = 22, bar = 22, curve = 24, row = bar + curve + 8;
  const highest = Math.max(1, ...data.memory.map((points) => Math.max(...points.map((point) => point[1]))));
  const byDevice = Array.from({ length: devices }, () => []);
  for (const span of data.spans) byDevice[span[0]].push(span);
  let from = 0, to = data.end || 1, width = 0;
  let arrows = [];

  const seconds = (value) => {
    for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
      if (Math.abs(value) >= scale) return Number((value / scale).toPrecision(4)) + " " + unit;
    }
    return (value * 1e9).toFixed(0) + " ns";
  };
  const bytes = (value) => {
    for (const [unit, scale] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (value >= scale) return (value / scale).toPrecision(3) + " " + unit;
    }
    return value + " B";
  };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const plot = () => width - left - right;
  const place = (time) => left + ((time - from) / (to - from)) * plot();
  const instant = (x) => from + ((x - left) / plot()) * (to - from);
  const name = (span) => `${span[1]}${data.phases[span[2]]}${span[3]}`;

  // First index whose end lies after `time`: spans of a device follow one another.
  const firstAfter = (spans, time) => {
    let low = 0, high = spans.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle][5] > time) high = middle; else low = middle + 1;
    }
    return low;
  };

  function drawTasks(device, y) {
    pen.font = "11px ui-monospace, Menlo, Consolas, monospace";
    pen.textAlign = "center";
    let painted = -1;
    const spans = byDevice[device];
    for (let index = firstAfter(spans, from); index < spans.length && spans[index][4] < to; index++) {
      const span = spans[index];
      const start = Math.max(left, place(span[4])), end = Math.min(left + plot(), place(span[5]));
      if (end - painted < 0.25) continue;
      painted = end;
      const forward = data.phases[span[2]] === "F";
      pen.fillStyle = data.colours[span[1]][forward ? 0 : 1];
      pen.fillRect(start, y, Math.max(end - start - (end - start > 3 ? 1 : 0), 0.25), bar);
      const label = end - start > 64 ? name(span) : String(span[3]);
      if (end - start > label.length * 6.8 + 2) {
        pen.fillStyle = forward ? "#10131a" : "#ffffff";
        pen.fillText(label, (start + end) / 2, y + 15);
      }
    }
  }

  function drawMemory(device, y) {
    const points = data.memory[device];
    const height = (used) => y + curve - (used / highest) * (curve - 2);
    let index = 0;
    while (index + 1 < points.length && points[index + 1][0] <= from) index++;
    pen.beginPath();
    pen.moveTo(left, y + curve);
    pen.lineTo(left, height(points[index][1]));
    for (index++; index < points.length && points[index][0] < to; index++) {
      const x = place(points[index][0]);
      pen.lineTo(x, height(points[index - 1][1]));
      pen.lineTo(x, height(points[index][1]));
    }
    pen.lineTo(left + plot(), height(points[index - 1][1]));
    pen.lineTo(left + plot(), y + curve);
    pen.closePath();
    pen.globalAlpha = 0.25;
    pen.fillStyle = colour("--curve");
    pen.fill();
    pen.globalAlpha = 1;
  }

  function drawTransfers() {
    arrows = [];
    const seen = data.transfers.filter((each) => each[3] > from && each[2] < to);
    if (seen.length > 600) return;
    pen.strokeStyle = colour("--quiet");
    pen.globalAlpha = 0.6;
    for (const each of seen) {
      const y = (device) => top + device * row + bar / 2;
      const ends = [place(each[2]), y(each[0]), place(each[3]), y(each[1])];
      arrows.push([ends, each]);
      pen.beginPath();
      pen.moveTo(ends[0], ends[1]);
      pen.lineTo(ends[2], ends[3]);
      pen.stroke();
    }
    pen.globalAlpha = 1;
  }

  function drawScale() {
    const rough = (to - from) / Math.max(2, plot() / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
    pen.fillStyle = colour("--quiet");
    pen.strokeStyle = colour("--line");
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
      const x = place(time);
      pen.fillText(time === 0 ? "0" : seconds(time), x, 12);
      pen.beginPath();
      pen.moveTo(x, top - 5);
      pen.lineTo(x, top + devices * row);
      pen.stroke();
    }
  }

  function drawSteady() {
    if (!data.steady) return;
    const [start, end, count] = data.steady;
    const a = Math.max(left, place(start)), b = Math.min(left + plot(), place(end)), y = top + devices * row;
    if (b <= a) return;
    pen.strokeStyle = colour("--quiet");
    pen.strokeRect(a, y, b - a, 0);
    pen.fillStyle = colour("--quiet");
    pen.textAlign = "center";
    pen.fillText(`repetend ×${count}`, (a + b) / 2, y + 14);
  }

  function draw() {
    const ratio = window.devicePixelRatio || 1;
    width = canvas.clientWidth;
    const height = top + devices * row + 22;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    drawScale();
    for (let device = 0; device < devices; device++) {
      const y = top + device * row;
      pen.fillStyle = colour("--lane");
      pen.fillRect(left, y, plot(), bar);
      pen.save();
      pen.beginPath();
      pen.rect(left, 0, plot(), height);
      pen.clip();
      drawTasks(device, y);
      drawMemory(device, y + bar + 2);
      pen.restore();
      pen.fillStyle = colour("--ink");
      pen.font = "12px system-ui, sans-serif";
      pen.textAlign = "right";
      pen.fillText(String(device), left - 8, y + 15);
      pen.textAlign = "left";
      pen.fillStyle = colour("--quiet");
      pen.fillText(bytes(Math.max(...data.memory[device].map((point) => point[1]))), left + plot() + 8, y + bar + 18);
    }
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, plot(), height);
    pen.clip();
    drawTransfers();
    pen.restore();
    drawSteady();
    range.textContent = `${from === 0 ? "0" : seconds(from)} to ${seconds(to)}`;
    canvas.dataset.from = from;
    canvas.dataset.to = to;
  }

  function show(start, end) {
    const length = Math.min(Math.max(end - start, data.end * 1e-5), data.end);
    from = Math.min(Math.max(0, start), data.end - length);
    to = from + length;
    draw();
  }
  const zoom = (factor, around) => show(around - (around - from) * factor, around + (to - around) * factor);
  const middle = () => (from + to) / 2;

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const moved = (event.deltaX / plot()) * (to - from);
      show(from + moved, to + moved);
    } else {
      zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), instant(event.offsetX));
    }
  }, { passive: false });

  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.offsetX, from, to };
    canvas.setPointerCapture(event.pointerId);
    canvas.style.cursor = "grabbing";
  });
  canvas.addEventListener("pointerup", () => { held = null; canvas.style.cursor = "grab"; });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("pointermove", (event) => {
    if (held) {
      const moved = ((held.x - event.offsetX) / plot()) * (held.to - held.from);
      show(held.from + moved, held.to + moved);
    } else {
      explain(event.offsetX, event.offsetY);
    }
  });
  canvas.addEventListener("dblclick", () => show(0, data.end));
  document.getElementById("nearer").addEventListener("click", () => zoom(0.5, middle()));
  document.getElementById("farther").addEventListener("click", () => zoom(2, middle()));
  document.getElementById("all").addEventListener("click", () => show(0, data.end));
  canvas.addEventListener("keydown", (event) => {
    const moved = (to - from) / 8;
    const actions = {
      "+": () => zoom(0.5, middle()), "-": () => zoom(2, middle()), "0": () => show(0, data.end),
      ArrowLeft: () => show(from - moved, to - moved), ArrowRight: () => show(from + moved, to + moved),
    };
    if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  });

  function explain(x, y) {
    const device = Math.floor((y - top) / row), inside = y - top - device * row;
    if (device < 0 || device >= devices || x < left || x > left + plot()) { tip.hidden = true; return; }
    const time = instant(x);
    const lines = [];
    const arrow = arrows.find(([ends]) => distance(x, y, ends) < 3);
    const spans = byDevice[device], span = spans[firstAfter(spans, time)];
    if (inside <= bar && span && span[4] <= time) {
      lines.push(name(span), `stage ${span[1]}, micro-batch ${span[3]}, device ${device}`);
      lines.push(`${seconds(span[4])} to ${seconds(span[5])}: ${seconds(span[5] - span[4])}`);
    } else if (arrow) {
      const [source, target, start, end, size, task] = arrow[1];
      lines.push(`${task}: ${bytes(size)} from ${source} to ${target}`, `${seconds(end - start)}`);
    } else {
      const points = data.memory[device];
      const point = points.findLast((each) => each[0] <= time) || points[0];
      lines.push(`device ${device} at ${seconds(time)}`, `${bytes(point[1])} in use`);
    }
    tip.textContent = lines.join("\n");
    tip.hidden = false;
    tip.style.left = Math.max(0, Math.min(x + 14, width - tip.offsetWidth - 4)) + "px";
    tip.style.top = y + 14 + "px";
  }
  function distance(x, y, [x1, y1, x2, y2]) {
    const length = (x2 - x1) ** 2 + (y2 - y1) ** 2;
    const share = length ? Math.max(0, Math.min(1, ((x - x1) * (x2 - x1) + (y - y1) * (y2 - y1)) / length)) : 0;
    return Math.hypot(x - x1 - share * (x2 - x1), y - y1 - share * (y2 - y1));
  }

  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
