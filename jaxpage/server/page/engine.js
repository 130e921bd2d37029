// The live view: asks the server once a second while somebody can see it.

import { call } from "./api.js";
import { byId, make, setText } from "./dom.js";
import { drawPool, ownerColour } from "./pool.js";
import { drawRates } from "./rates.js";

const PERIOD = 1000, PERIOD_OF_FAILURES = 5000; // milliseconds
const HISTORY = 120; // seconds

const KINDS = [ // of blocks: field, name, explanation
  ["own", "held by one", "Blocks that one sequence holds"],
  ["shared", "shared", "Blocks that several sequences hold: a common prefix is stored once"],
  ["cached", "cached", "Held by nobody, and found again by a prompt with the same beginning"],
  ["empty", "empty", "Never used, or forgotten"],
];

export class EngineView {
  /** `page.ownIds()`: requests to be marked as the user's own. */
  constructor(page) {
    this.page = page;
    this.views = []; // of the last two minutes, the newest at the end
    this.isHeld = false;
    this.isAsking = false;
    this.timer = null;
    this.marked = null; // id of the request whose blocks stand out
    this.panel = byId("engine");
    byId("engine-pause").addEventListener("click", () => this.#hold());
    document.addEventListener("visibilitychange", () => this.poll());
    // It may have become visible, too.
    new ResizeObserver(() => { this.#draw(); this.poll(); }).observe(this.panel);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
    const table = byId("requests");
    const mark = (event) => this.#mark(event.target.closest("tr")?.dataset.key ?? null);
    table.addEventListener("mouseover", mark);
    table.addEventListener("focusin", mark);
    table.addEventListener("mouseleave", () => this.#mark(null));
    table.addEventListener("focusout", () => this.#mark(null));
    table.addEventListener("keydown", (event) => this.#onKey(event));
  }

  /** Ask now, whatever came of it the last time. */
  start() {
    clearTimeout(this.timer);
    this.timer = null;
    this.poll();
  }

  /** Ask, if it is time to, and again as long as the view is visible. */
  async poll() {
    if (this.isAsking || this.isHeld || this.timer !== null || !this.#isVisible()) return;
    this.isAsking = true;
    let wait = PERIOD;
    try {
      const response = await call("page/engine", { signal: AbortSignal.timeout(30_000) });
      this.#take(await response.json());
    } catch (error) {
      wait = PERIOD_OF_FAILURES;
      this.#fail(error);
    }
    this.isAsking = false;
    this.timer = setTimeout(() => this.start(), wait);
  }

  #isVisible() {
    return document.visibilityState === "visible" && this.panel.offsetParent !== null;
  }

  #hold() {
    this.isHeld = !this.isHeld;
    byId("engine-pause").setAttribute("aria-pressed", String(this.isHeld));
    this.panel.classList.toggle("held", this.isHeld);
    if (this.isHeld) setText(byId("engine-state"), "held");
    this.poll();
  }

  #fail(error) {
    this.panel.classList.add("stale");
    const state = byId("engine-state");
    if (error.status === 401) {
      setText(state, "needs the API key");
      this.page.askForKey();
    } else if (error.name === "TimeoutError") setText(state, "no answer for 30 s");
    else setText(state, error.message);
  }

  #take(view) {
    if (view.time === this.views.at(-1)?.time) return; // another tab has just asked
    // Another engine, if the counters went back.
    if (view.stats.num_steps < (this.views.at(-1)?.stats.num_steps ?? 0)) this.views = [];
    this.views = [...this.views, view].filter((v) => v.time > view.time - HISTORY);
    this.panel.classList.remove("stale");
    byId("engine-body").hidden = false;
    const { stats } = view;
    const isIdle = stats.num_running + stats.num_waiting === 0;
    if (!this.isHeld) setText(byId("engine-state"), isIdle ? "idle" : "at work");
    this.#showNumbers(view);
    this.#showPool(view);
    this.#showRequests(view);
    this.#showPrograms(view);
    this.#draw();
  }

  /** How much a counter grew in a second, over about `seconds` up to now; null: not known yet. */
  #rate(count, seconds) {
    const last = this.views.at(-1);
    const first = this.views.find((view) => view.time >= last.time - seconds - 0.5);
    const elapsed = last.time - first.time;
    return elapsed > 0 ? (count(last) - count(first)) / elapsed : null;
  }

  #showNumbers({ stats, pool }) {
    const generated = this.#rate((v) => v.stats.generation_tokens, 2);
    const prompts = this.#rate((v) => v.stats.prompt_tokens, 2);
    const hits = stats.prefix_cache_queries ? stats.prefix_cache_hits / stats.prefix_cache_queries : null;
    const cells = [
      ["Generated", count(generated), "tokens/s"],
      ["Prompt", count(prompts), "tokens/s"],
      ["Running", count(stats.num_running), "sequences"],
      ["Waiting", count(stats.num_waiting), "sequences"],
      ["KV pool", percent(stats.kv_cache_usage), `of ${count(pool.blocks)} blocks`],
      ["Prefix cache", hits === null ? "–" : percent(hits), "of prompt tokens found"],
    ];
    if (stats.num_preemptions) cells.push(["Preempted", count(stats.num_preemptions), "times since start"]);
    if (pool.host_blocks) cells.push(["Host memory", percent(pool.host_blocks_used / pool.host_blocks), `of ${count(pool.host_blocks)} blocks`]);
    if (stats.num_recompiles) cells.push(["Recompiled", count(stats.num_recompiles), "times since ready"]);
    const list = byId("numbers");
    while (list.children.length > cells.length) list.lastElementChild.remove();
    cells.forEach(([name, value, unit], i) => {
      const cell = list.children[i] ?? list.appendChild(make("div", {},
        make("dt"), make("dd", { class: "value" }), make("dd", { class: "unit" })));
      [name, value, unit].forEach((text, j) => setText(cell.children[j], text));
    });
  }

  #showPool({ pool, cells }) {
    const shares = byId("shares"), kinds = byId("kinds");
    if (!shares.children.length) {
      for (const [kind, name, title] of KINDS) {
        shares.append(make("span", { class: kind }));
        kinds.append(make("div", { title }, make("dt", {}, make("span", { class: `key ${kind}` }), name), make("dd")));
      }
    }
    KINDS.forEach(([kind], i) => {
      shares.children[i].style.flexGrow = String(pool[kind]);
      setText(kinds.children[i].lastElementChild, count(pool[kind]));
    });
    const unit = cells.blocks === 1 ? "a square is a block" : `a square is ${count(cells.blocks)} blocks`;
    setText(byId("pool-hint"), `A block has the KV of ${pool.block_size} tokens; ${unit}. Colours are owners; choose a request to see its blocks.`);
  }

  #showRequests({ running, waiting, stats }) {
    const own = [...this.page.ownIds()].map(withoutKind);
    const rows = [...running.map((r, i) => ({ ...r, row: i })), ...waiting];
    const body = byId("requests");
    const isInside = body.contains(document.activeElement);
    while (body.rows.length > rows.length) body.deleteRow(-1);
    if (isInside && !body.contains(document.activeElement)) body.lastElementChild?.focus();
    rows.forEach((request, i) => {
      const row = body.rows[i] ?? body.appendChild(requestRow());
      if (i === 0 && !body.querySelector("[tabindex='0']")) row.tabIndex = 0;
      row.dataset.key = keyOf(request);
      const isOwn = own.some((id) => withoutKind(request.id).startsWith(id));
      const name = request.id + (request.index ? ` (${request.index})` : "");
      row.cells[0].title = name;
      setText(row.querySelector(".name"), shortName(name));
      row.querySelector(".yours").hidden = !isOwn;
      const swatch = row.querySelector(".swatch");
      swatch.hidden = request.row === undefined;
      swatch.style.setProperty("--owner", ownerColour(request.row ?? 0));
      const texts = [null, stateOf(request), `${count(request.prompt_tokens)} + ${count(request.output_tokens)}`,
        count(request.blocks), count(request.shared_blocks), duration(request.age)];
      texts.forEach((text, j) => { if (text !== null) setText(row.cells[j], text); });
    });
    const unlisted = stats.num_running + stats.num_waiting - rows.length;
    byId("requests-more").hidden = unlisted <= 0 && rows.length > 0;
    setText(byId("requests-more"), rows.length ? `and ${count(unlisted)} more` : "No request is being answered.");
  }

  #showPrograms({ programs }) {
    const body = byId("programs");
    while (body.rows.length > programs.length) body.deleteRow(-1);
    programs.forEach((program, i) => {
      const row = body.rows[i] ?? body.appendChild(make("tr", {},
        make("th", { scope: "row" }), make("td"), make("td", { class: "n" }), make("td", { class: "n" })));
      const calls = (view) => view.programs.find((p) => p.name === program.name)?.calls ?? 0;
      const rate = this.#rate(calls, 2);
      row.classList.toggle("used", rate > 0);
      const texts = [program.name, program.origin ?? "not compiled yet", count(program.calls), rate > 0 ? count(rate) : ""];
      texts.forEach((text, j) => setText(row.cells[j], text));
    });
  }

  /** The table is one stop of the Tab key; the arrow keys move between its rows. */
  #onKey(event) {
    const rows = byId("requests").rows;
    const from = event.target.sectionRowIndex;
    const to = { ArrowDown: from + 1, ArrowUp: from - 1, Home: 0, End: rows.length - 1 }[event.key];
    if (rows[to] === undefined) return;
    event.preventDefault();
    rows[from].tabIndex = -1;
    rows[to].tabIndex = 0;
    rows[to].focus();
  }

  #mark(key) {
    if (key === this.marked) return;
    this.marked = key;
    this.#draw();
  }

  #draw() {
    const view = this.views.at(-1);
    if (!view || !this.#isVisible()) return;
    const marked = view.running.findIndex((request) => keyOf(request) === this.marked);
    drawPool(byId("pool"), view.cells, view.pool.blocks, marked);
    setText(byId("rates-text"), drawRates(byId("rates"), this.views, HISTORY));
  }
}

function requestRow() {
  return make("tr", { tabIndex: -1 },
    make("th", { scope: "row" },
      make("span", { class: "swatch" }), make("span", { class: "name" }), make("span", { class: "yours" }, "yours")),
    make("td"), ...Array.from({ length: 4 }, () => make("td", { class: "n" })));
}

/** Without what all ids of a kind begin with, and of random ones the first digits. */
const shortName = (name) => withoutKind(name).replace(/^([0-9a-f]{8})[0-9a-f-]{16,}/, "$1");
const withoutKind = (id) => id.replace(/^(chatcmpl|cmpl|resp)-/, "");

function duration(seconds) {
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

const keyOf = (request) => `${request.id} ${request.index}`;

function stateOf(request) {
  if (request.row === undefined) return request.host_blocks ? "swapped out" : "waiting";
  const isPrompt = request.output_tokens === 0 && request.computed_tokens < request.prompt_tokens;
  if (!isPrompt) return "generating";
  return `prompt ${Math.floor(100 * request.computed_tokens / request.prompt_tokens)} %`;
}

const percent = (share) => `${(100 * share).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`;

function count(value) {
  if (value === null) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: value > 0 && value < 10 ? 1 : 0 });
}
