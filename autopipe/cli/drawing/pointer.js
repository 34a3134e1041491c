// Zooming, moving and explaining: wheel, pointer, buttons and keys.
const tip = document.getElementById("tip");

function show(start, stop) {
  const length = Math.min(Math.max(stop - start, end * 1e-5), end);
  view.from = Math.min(Math.max(0, start), end - length);
  view.to = view.from + length;
  draw();
}
const zoom = (factor, around) => show(around - (around - view.from) * factor, around + (view.to - around) * factor);
const middle = () => (view.from + view.to) / 2;
const all = () => show(0, end);
const repetend = () => show(...(data.steady || [0, end]));

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    const moved = (event.deltaX / plot()) * (view.to - view.from);
    show(view.from + moved, view.to + moved);
  } else {
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), instant(event.offsetX));
  }
}, { passive: false });

let held = null;
const release = () => { held = null; canvas.style.cursor = "grab"; };
canvas.addEventListener("pointerdown", (event) => {
  held = { x: event.offsetX, from: view.from, to: view.to };
  canvas.setPointerCapture(event.pointerId);
  canvas.style.cursor = "grabbing";
  tip.hidden = true;
});
canvas.addEventListener("pointerup", release);
canvas.addEventListener("pointercancel", release);
canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
canvas.addEventListener("pointermove", (event) => {
  if (held) {
    const moved = ((held.x - event.offsetX) / plot()) * (held.to - held.from);
    show(held.from + moved, held.to + moved);
  } else {
    explain(event.offsetX, event.offsetY);
  }
});
canvas.addEventListener("dblclick", all);
document.getElementById("nearer").addEventListener("click", () => zoom(0.5, middle()));
document.getElementById("farther").addEventListener("click", () => zoom(2, middle()));
document.getElementById("all").addEventListener("click", all);
document.getElementById("repetend").addEventListener("click", repetend);
document.getElementById("repetend").hidden = !data.steady;
canvas.addEventListener("keydown", (event) => {
  const moved = (view.to - view.from) / 8;
  const actions = {
    "+": () => zoom(0.5, middle()), "-": () => zoom(2, middle()), "0": all, r: repetend,
    ArrowLeft: () => show(view.from - moved, view.to - moved),
    ArrowRight: () => show(view.from + moved, view.to + moved),
  };
  if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
});

function explain(x, y) {
  const device = top.findLastIndex((each) => each <= y), inside = y - top[device];
  if (device < 0 || inside >= row || x < left || x > left + plot()) { tip.hidden = true; return; }
  tip.textContent = lines(device, inside, x, y).join("\n");
  tip.hidden = false;
  const below = y + 14 + tip.offsetHeight < canvas.clientHeight;
  tip.style.left = Math.max(0, Math.min(x + 14, view.width - tip.offsetWidth - 4)) + "px";
  tip.style.top = (below ? y + 14 : y - tip.offsetHeight - 8) + "px";
}

function lines(device, inside, x, y) {
  const name = (each) => rows[each].device + (heading ? ` of ${rows[each].step.name}` : "");
  const time = instant(x), list = bars[device], index = firstAfter(list, 4, 3, time) * 4;
  const arrow = arrows.find(([ends]) => distance(x, y, ends) < 3);
  if (inside <= bar && index < list.length && list[index + 2] <= time) {
    const kind = kinds[list[index]], [, unit, start, stop] = list.subarray(index, index + 4);
    const used = memoryText(memoryAt(device, start));
    return [
      kind.prefix + unit, `${kind.phase}, stage ${kind.stage}, ${data.physical ? "micro-batch" : "unit"} ${unit}, device ${name(device)}`,
      `${timeText(start)} to ${timeText(stop)}: ${timeText(stop - start)}`, `memory in use ${used}`,
    ];
  }
  const wide = (2 / plot()) * (view.to - view.from); // A narrower bar is drawn so wide.
  const work = ends[device];
  for (let place = work.length - 4; inside <= bar && place >= 0; place -= 4) {
    const [kind, stage, start, stop] = work.subarray(place, place + 4);
    if (time < start || time > Math.max(stop, start + wide)) continue;
    const what = stage < 0 ? "parameters of all stages" : `gradients of stage ${stage}`;
    return [endKinds[kind].name, `${what}, device ${name(device)}`, `${timeText(start)} to ${timeText(stop)}: ${timeText(stop - start)}`];
  }
  if (arrow) {
    const [source, target, start, stop, size, task] = arrow[1];
    return [`${task}: ${memoryText(size)} from ${rows[source].device} to ${name(target)}`, timeText(stop - start)];
  }
  return [`device ${name(device)} at ${timeText(time)}`, `memory in use ${memoryText(memoryAt(device, time))}`];
}
function distance(x, y, [x1, y1, x2, y2]) {
  const length = (x2 - x1) ** 2 + (y2 - y1) ** 2;
  const share = length ? Math.max(0, Math.min(1, ((x - x1) * (x2 - x1) + (y - y1) * (y2 - y1)) / length)) : 0;
  return Math.hypot(x - x1 - share * (x2 - x1), y - y1 - share * (y2 - y1));
}

window.addEventListener("resize", draw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
