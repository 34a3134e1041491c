// Painting: a row of bars and a curve of memory a device, below a scale and the repetend's bracket.
const thin = Math.max(1, Math.min(9, Math.floor(9000 / devices) - 1)); // A canvas has a largest height.
const [bar, curve, gap] = devices <= 12 ? [22, 24, 8] : devices <= 48 ? [15, 12, 5] : [thin, 0, 1];
const row = bar + curve + gap;
const highest = Math.max(1, ...peaks);
const roomiest = Math.max(0, ...data.limits.map((limit) => limit ?? 0));
const full = roomiest >= highest && roomiest <= 2 * highest ? roomiest : highest;
const least = 3; // Pixels a bar: of more and thinner ones, each phase's share of the time is drawn.
const top = rows.map(({ index }, place) => head + (index + 1) * heading + place * row);
const bottom = head + steps.length * heading + devices * row;
let arrows = [];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function paintBars(device, y) {
  const list = bars[device];
  const first = firstAfter(list, 4, 3, view.from);
  let last = first;
  while (last * 4 < list.length && list[last * 4 + 2] < view.to) last++;
  if ((last - first) * least > plot()) return paintShares(list, first, last, y);
  pen.font = `${bar < 20 ? 10 : 11}px ui-monospace, Menlo, Consolas, monospace`;
  pen.textAlign = "center";
  for (let index = first * 4; index < last * 4; index += 4) {
    const kind = kinds[list[index]];
    const start = Math.max(left, place(list[index + 2])), stop = Math.min(left + plot(), place(list[index + 3]));
    pen.fillStyle = kind.fill;
    pen.fillRect(start, y, Math.max(stop - start - (stop - start > 4 ? 1 : 0), 0.5), bar);
    const labels = [kind.prefix + list[index + 1], kind.letter + list[index + 1], String(list[index + 1])];
    const label = bar < 12 ? undefined : labels.find((each) => each.length * 6.8 + 3 < stop - start);
    if (label === undefined) continue;
    pen.fillStyle = kind.ink;
    pen.fillText(label, (start + stop) / 2, y + bar / 2 + 4);
  }
}

// The work at the end of a step is often a hundredth of it: a bar is at least two pixels wide.
function paintEnds(device, y) {
  const list = ends[device];
  pen.font = `${bar < 20 ? 10 : 11}px ui-monospace, Menlo, Consolas, monospace`;
  pen.textAlign = "center";
  for (let index = 0; index < list.length; index += 4) {
    if (list[index + 3] <= view.from || list[index + 2] >= view.to) continue;
    const kind = endKinds[list[index]];
    const start = Math.max(left, place(list[index + 2])), stop = Math.min(left + plot(), place(list[index + 3]));
    pen.fillStyle = kind.fill;
    pen.fillRect(start, y, Math.max(stop - start - (stop - start > 4 ? 1 : 0), 2), bar);
    if (bar < 12 || stop - start < 10) continue;
    pen.fillStyle = kind.ink;
    pen.fillText(kind.letter, (start + stop) / 2, y + bar / 2 + 4);
  }
}

// Too many bars to tell apart: columns of some pixels, filled as far as the device is busy, in the colours of what runs.
function paintShares(list, first, last, y) {
  const size = Math.max(4, Math.ceil((8 * plot()) / (last - first)));
  const count = Math.ceil(plot() / size);
  const shares = new Map();
  for (let index = first * 4; index < last * 4; index += 4) {
    const start = Math.max(0, place(list[index + 2]) - left), stop = Math.min(plot(), place(list[index + 3]) - left);
    let columns = shares.get(list[index]);
    if (!columns) shares.set(list[index], (columns = new Float64Array(count)));
    for (let column = Math.floor(start / size); column * size < stop && column < count; column++) {
      columns[column] += Math.min(stop, (column + 1) * size) - Math.max(start, column * size);
    }
  }
  const heights = new Float64Array(count);
  for (const kind of [...shares.keys()].sort((a, b) => b - a)) {
    const columns = shares.get(kind);
    pen.fillStyle = kinds[kind].fill;
    for (let column = 0; column < count; column++) {
      const width = Math.min(size, plot() - column * size);
      const height = (columns[column] / width) * bar;
      if (height > 0) pen.fillRect(left + column * size, y + bar - heights[column] - height, width, height);
      heights[column] += height;
    }
  }
}

function paintMemory(device, y) {
  const list = memory[device];
  const height = (used) => y + curve - (used / full) * (curve - 2);
  const first = Math.max(0, firstAfter(list, 2, 0, view.from) - 1);
  const last = Math.min(left + plot(), place(rows[device].step.end));
  if (last < left) return;
  let x = left, used = list[first * 2 + 1], most = used;
  pen.beginPath();
  pen.moveTo(left, height(used));
  for (let index = first * 2 + 2; index < list.length && list[index] < view.to; index += 2) {
    const next = place(list[index]);
    if (next - x >= 1) { // within a pixel the highest counts
      pen.lineTo(x, height(most));
      pen.lineTo(next, height(used));
      x = next;
      most = 0;
    }
    used = list[index + 1];
    most = Math.max(most, used);
  }
  pen.lineTo(x, height(most));
  pen.lineTo(last, height(used));
  pen.strokeStyle = pen.fillStyle = colour("--curve");
  pen.stroke();
  pen.lineTo(last, y + curve);
  pen.lineTo(left, y + curve);
  pen.globalAlpha = 0.18;
  pen.fill();
  pen.globalAlpha = 1;
  const limit = data.limits[device];
  if (limit === null || limit > full) return;
  pen.setLineDash([4, 3]);
  pen.strokeStyle = colour("--limit");
  pen.beginPath();
  pen.moveTo(left, height(limit));
  pen.lineTo(left + plot(), height(limit));
  pen.stroke();
  pen.setLineDash([]);
}

function paintTransfers() {
  arrows = [];
  const seen = data.transfers.filter((each) => each[3] > view.from && each[2] < view.to);
  if (seen.length > 600) return;
  pen.strokeStyle = colour("--quiet");
  pen.globalAlpha = 0.6;
  for (const each of seen) {
    const y = (device) => top[device] + bar / 2;
    const ends = [place(each[2]), y(each[0]), place(each[3]), y(each[1])];
    arrows.push([ends, each]);
    pen.beginPath();
    pen.moveTo(ends[0], ends[1]);
    pen.lineTo(ends[2], ends[3]);
    pen.stroke();
  }
  pen.globalAlpha = 1;
}

function paintScale() {
  const rough = (view.to - view.from) / Math.max(2, plot() / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  pen.fillStyle = colour("--quiet");
  pen.strokeStyle = colour("--line");
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "center";
  for (let index = Math.ceil(view.from / step); index * step <= view.to; index++) {
    const x = place(index * step);
    pen.fillText(timeText(index * step), x, 12);
    pen.beginPath();
    pen.moveTo(x, head - 4);
    pen.lineTo(x, bottom);
    pen.stroke();
  }
}

function paintRepetend() {
  if (!data.steady) return;
  const [start, stop, count] = data.steady;
  const a = Math.max(left, place(start)), b = Math.min(left + plot(), place(stop));
  if (b <= a) return;
  pen.strokeStyle = pen.fillStyle = colour("--quiet");
  pen.beginPath();
  if (start >= view.from) { pen.moveTo(a, head - 8); pen.lineTo(a, head - 14); } else pen.moveTo(a, head - 14);
  pen.lineTo(b, head - 14);
  if (stop <= view.to) pen.lineTo(b, head - 8);
  pen.stroke();
  pen.textAlign = "center";
  pen.fillText(`steady state ×${count}`, Math.min(Math.max((a + b) / 2, left + 40), left + plot() - 40), head - 18);
}

function paintLabels(device, y) {
  if (rows[device].number % Math.ceil(11 / row)) return;
  pen.fillStyle = colour("--ink");
  pen.font = `${row < 20 ? 10 : 12}px system-ui, sans-serif`;
  pen.textAlign = "right";
  pen.fillText(String(rows[device].device), left - 8, y + bar / 2 + 4);
  pen.textAlign = "left";
  pen.fillStyle = colour(over[device] ? "--limit" : "--quiet");
  pen.fillText(shownPeak(device), left + plot() + 8, y + (curve ? bar + curve / 2 + 4 : bar / 2 + 4));
}

function paintHeadings() {
  let y = head + heading - 7;
  for (const step of heading ? steps : []) {
    pen.fillStyle = colour("--ink");
    pen.font = "600 13px system-ui, sans-serif";
    pen.textAlign = "left";
    pen.fillText(`${step.name}: ${timeText(step.end)}`, 8, y);
    y += heading + step.count * row;
  }
}

function draw() {
  const ratio = window.devicePixelRatio || 1;
  view.width = canvas.clientWidth;
  fitLabels();
  const height = bottom + 4;
  canvas.style.height = height + "px";
  canvas.width = Math.round(view.width * ratio);
  canvas.height = Math.round(height * ratio);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, view.width, height);
  paintScale();
  paintRepetend();
  paintHeadings();
  for (let device = 0; device < devices; device++) paintLabels(device, top[device]);
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, plot(), height);
  pen.clip();
  for (let device = 0; device < devices; device++) {
    const y = top[device];
    pen.fillStyle = colour("--lane");
    pen.fillRect(left, y, Math.max(0, Math.min(plot(), place(rows[device].step.end) - left)), bar);
    paintBars(device, y);
    paintEnds(device, y);
    if (curve) paintMemory(device, y + bar + 2);
  }
  paintTransfers();
  pen.restore();
  document.getElementById("range").textContent = `${timeText(view.from)} to ${timeText(view.to)}`;
  canvas.dataset.from = view.from;
  canvas.dataset.to = view.to;
}
