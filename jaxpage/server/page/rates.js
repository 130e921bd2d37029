// Tokens per second over time, as two lines.

import { begin } from "./pool.js";

const HEIGHT = 64, TOP = 14; // pixels; the largest value is written above

/** Draw what views of the last `seconds` tell. Returns the same as a sentence. */
export function drawRates(canvas, views, seconds) {
  const width = canvas.parentElement.clientWidth;
  const paint = begin(canvas, width, HEIGHT);
  const style = getComputedStyle(canvas);
  const generated = rates(views, (stats) => stats.generation_tokens);
  const prompts = rates(views, (stats) => stats.prompt_tokens);
  const most = Math.max(1, ...generated.map((p) => p.rate), ...prompts.map((p) => p.rate));
  const end = views.at(-1).time;
  const x = (time) => width * (1 - (end - time) / seconds);
  const y = (rate) => HEIGHT - 1 - (HEIGHT - TOP - 2) * rate / most;

  paint.strokeStyle = paint.fillStyle = style.getPropertyValue("--line");
  paint.fillRect(0, HEIGHT - 1, width, 1);
  paint.fillRect(0, TOP, width, 1);
  paint.fillStyle = style.getPropertyValue("--muted");
  paint.font = `11px ${style.fontFamily}`;
  paint.fillText(`peak ${Math.round(most).toLocaleString("en")}`, 0, TOP - 4);
  line(paint, prompts, x, y, style.getPropertyValue("--prompts"));
  line(paint, generated, x, y, style.getPropertyValue("--generated"));
  const mean = views.length > 1 ? generated.reduce((sum, p) => sum + p.rate, 0) / generated.length : 0;
  return `Generated ${Math.round(mean)} tokens a second on average, ${Math.round(most)} at most.`;
}

function rates(views, count) {
  return views.slice(1).map((view, i) => ({
    from: views[i].time,
    time: view.time,
    rate: (count(view.stats) - count(views[i].stats)) / (view.time - views[i].time || 1),
  }));
}

function line(paint, points, x, y, colour) {
  paint.strokeStyle = colour;
  paint.lineWidth = 1.5;
  paint.beginPath();
  for (const { time, rate } of points) paint.lineTo(x(time), y(rate));
  paint.stroke();
}
