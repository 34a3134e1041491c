// The data of the page, and time on its axis: what is seen of it, and times and sizes as texts.
const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("timeline");
const pen = canvas.getContext("2d");
const devices = data.memory.length;
const end = data.end || 1;
const left = 44, head = 44;
const heading = data.groups.length > 1 ? 26 : 0; // Above each of several steps: its name and its length.
const view = { from: 0, to: end, width: 0 };

const plot = () => Math.max(1, view.width - left - right);
const place = (time) => left + ((time - view.from) / (view.to - view.from)) * plot();
const instant = (x) => view.from + ((x - left) / plot()) * (view.to - view.from);

function scaled(value, units, rest) {
  for (const [unit, scale] of units) {
    if (Math.abs(value) >= scale) return Number((value / scale).toPrecision(4)) + " " + unit;
  }
  return value === 0 ? "0" : rest(value);
}
function timeText(value) {
  if (!data.physical) return String(Number(value.toPrecision(6)));
  return scaled(value, [["s", 1], ["ms", 1e-3], ["µs", 1e-6]], (each) => (each * 1e9).toFixed(0) + " ns");
}
function memoryText(value) {
  if (!data.physical) return String(value);
  return scaled(value, [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]], (each) => each + " B");
}

// Index of the first of a flat list's items of `size` numbers whose number at `offset` lies after `time`.
function firstAfter(list, size, offset, time) {
  let low = 0, high = list.length / size;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle * size + offset] > time) high = middle; else low = middle + 1;
  }
  return low;
}

// Rows of all steps, one after the other: which step each belongs to, and its device there.
const steps = data.groups.map(([name, count, end]) => ({ name, count, end }));
const rows = steps.flatMap((step, index) => Array.from({ length: step.count }, (_, number) => ({ step, index, number })));
rows.forEach((each, place) => { each.device = data.devices[place]; });

// Bars of a device: kind, unit, start, end; they follow one another. Memory: time, use from then on.
const bars = data.bars.map((list) => Float64Array.from(list));
const memory = data.memory.map((list) => Float64Array.from(list));
const peaks = memory.map((list) => list.reduce((most, each, index) => (index % 2 ? Math.max(most, each) : most), 0));
// Gradient sums and updates of a device: kind, stage (-1: all), start, end.
const ends = data.ends.map((list) => Float64Array.from(list));
const endKinds = data.endKinds.map(([name, letter, fill, ink]) => ({ name, letter, fill, ink }));
const kinds = data.kinds.map(([prefix, letter, phase, fill, ink, stage]) => ({ prefix, letter, phase, fill, ink, stage }));

function memoryAt(device, time) {
  const list = memory[device];
  return list[Math.max(0, firstAfter(list, 2, 0, time) - 1) * 2 + 1];
}

// Each device's peak beside its row, with its limit where that is known.
const over = peaks.map((peak, device) => data.limits[device] !== null && peak > data.limits[device]);
const peakTexts = peaks.map((peak, device) => {
  const limit = data.limits[device];
  return memoryText(peak) + (limit === null ? "" : `${over[device] ? " over " : " of "}${memoryText(limit)}`);
});
const narrow = 600; // Pixels of a page in which the peaks leave no room for their limits.
const shownPeak = (device) => (view.width < narrow ? memoryText(peaks[device]) : peakTexts[device]);
let right = 0;
function fitLabels() {
  right = 20 + 6.6 * Math.max(...peaks.map((_, device) => shownPeak(device).length));
}
