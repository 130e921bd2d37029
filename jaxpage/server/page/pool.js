// The KV pool as a grid of squares.

const MOST_HEIGHT = 190; // pixels, as for all sizes here
const LARGEST = 14, SMALLEST = 3;
const HUES = [212, 268, 178, 320, 235, 152, 292, 195]; // of owners, in turn; none is that of shared blocks

const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;

/** The colour of what the running sequence in this row of the table owns. */
export function ownerColour(row) {
  if (row < 0) return isDark() ? "hsl(212 15% 55%)" : "hsl(212 15% 60%)";
  const lightness = [0, -10, 9][Math.floor(row / HUES.length) % 3] + (isDark() ? 62 : 52);
  return `hsl(${HUES[row % HUES.length]} 40% ${lightness}%)`;
}

/**
 * Draw `cells`, each filled from the bottom with what its blocks are: shared, of one sequence, cached. `marked`: the row
 * of the sequence whose cells stand out; -1: none.
 */
export function drawPool(canvas, cells, numBlocks, marked) {
  const width = canvas.parentElement.clientWidth;
  const number = cells.own.length;
  const size = cellSize(number, width);
  const columns = Math.max(1, Math.floor(width / size));
  const paint = begin(canvas, width, Math.ceil(number / columns) * size);
  const style = getComputedStyle(canvas);
  const colours = { shared: style.getPropertyValue("--shared"), cached: style.getPropertyValue("--cached"), empty: style.getPropertyValue("--empty") };
  const side = size - (size > 4 ? 1 : 0);
  for (let i = 0; i < number; i += 1) {
    const x = (i % columns) * size, y = Math.floor(i / columns) * size;
    const blocks = Math.min(cells.blocks, numBlocks - i * cells.blocks);
    paint.globalAlpha = marked >= 0 && cells.owners[i] !== marked ? 0.25 : 1;
    paint.fillStyle = colours.empty;
    paint.fillRect(x, y, side, side);
    let bottom = y + side;
    for (const kind of ["shared", "own", "cached"]) {
      const height = side * cells[kind][i] / blocks;
      paint.fillStyle = kind === "own" ? ownerColour(cells.owners[i]) : colours[kind];
      paint.fillRect(x, bottom - height, side, height);
      bottom -= height;
    }
  }
  paint.globalAlpha = 1;
}

/** The largest whole size with which all cells fit in. */
function cellSize(number, width) {
  for (let size = LARGEST; size > SMALLEST; size -= 1) {
    if (Math.ceil(number / Math.floor(width / size)) * size <= MOST_HEIGHT) return size;
  }
  return SMALLEST;
}

/** A cleared canvas of this size in CSS pixels, sharp on every screen. */
export function begin(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const paint = canvas.getContext("2d");
  paint.scale(ratio, ratio);
  return paint;
}
