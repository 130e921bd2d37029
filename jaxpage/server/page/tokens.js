// The tokens of an answer, each coloured by its probability, with alternatives in a tooltip.

import { byId, make } from "./dom.js";

const LEVELS = [0.9, 0.6, 0.3, 0.1]; // probabilities at which the colour changes
const WORDS = { "\n": "line break", " ": "space", "\t": "tab", "": "part of a character" };

/** Tokens as one widget: a single stop of the Tab key, within which the arrow keys move. */
export class Tokens {
  constructor() {
    this.tokens = [];
    this.current = 0; // the one that Tab comes to
    this.element = make("div", {
      class: "tokens",
      role: "listbox",
      "aria-orientation": "horizontal",
      "aria-label": "Tokens of the answer, with their probabilities. The arrow keys move between them.",
      onkeydown: (event) => this.#onKey(event),
    });
    this.element.addEventListener("focusin", (event) => this.#choose(event.target));
    this.element.addEventListener("focusout", hideTip);
    this.element.addEventListener("mouseover", (event) => this.#show(event.target));
    this.element.addEventListener("mouseleave", () => this.#show(document.activeElement));
  }

  /** Show tokens of a list that only grew since the last call. */
  update(tokens) {
    for (const token of tokens.slice(this.tokens.length)) {
      const index = this.tokens.push(token) - 1;
      this.element.append(...this.#option(token, index));
    }
  }

  #option(token, index) {
    const text = token.token;
    const option = make("span", {
      class: `token level-${level(token.logprob)}`,
      role: "option",
      tabIndex: index === 0 ? 0 : -1,
      "aria-selected": "false",
      "data-index": String(index),
    }, text === "" ? "◌" : text);
    if (!text.trim()) option.setAttribute("aria-label", named(text));
    return [option];
  }

  #choose(target) {
    const option = optionOf(target);
    if (!option) return;
    const before = this.element.children[this.current];
    before.tabIndex = -1;
    before.setAttribute("aria-selected", "false");
    this.current = Number(option.dataset.index);
    option.tabIndex = 0;
    option.setAttribute("aria-selected", "true");
    this.#show(option);
  }

  #show(target) {
    const option = this.element.contains(target) ? optionOf(target) : null;
    if (option) showTip(option, this.tokens[Number(option.dataset.index)]);
    else hideTip();
  }

  #onKey(event) {
    if (event.key === "Escape") {
      hideTip();
      return;
    }
    const last = this.tokens.length - 1;
    const to = {
      ArrowRight: this.current + 1,
      ArrowLeft: this.current - 1,
      ArrowDown: this.#inLine(1),
      ArrowUp: this.#inLine(-1),
      Home: 0,
      End: last,
    }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.element.children[Math.max(0, Math.min(last, to))].focus();
  }

  /** The token of the next line (or the one before) that stands nearest to the current one. */
  #inLine(step) {
    const options = this.element.children;
    const from = options[this.current].getBoundingClientRect();
    let best = this.current, least = Infinity, line = null;
    for (let i = this.current + step; i >= 0 && i < options.length; i += step) {
      const place = options[i].getBoundingClientRect();
      if (Math.abs(place.top - from.top) < from.height / 2) continue;
      line ??= place.top;
      if (Math.abs(place.top - line) > from.height / 2) break;
      const distance = Math.abs(place.left - from.left);
      if (distance < least) [best, least] = [i, distance];
    }
    return best;
  }
}

function optionOf(target) {
  return target instanceof Element ? target.closest(".token") : null;
}

/** 0: almost sure, 4: unlikely. */
export function level(logprob) {
  const probability = Math.exp(logprob);
  const index = LEVELS.findIndex((least) => probability >= least);
  return index < 0 ? LEVELS.length : index;
}

function named(text) {
  if (text in WORDS) return WORDS[text];
  return /^\n+$/.test(text) ? `${text.length} line breaks` : "white space";
}

/** A token as it can be read: with its spaces, and what is no letter by its name. */
function quoted(text) {
  return text === "" ? "(part of a character)" : JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"').replaceAll(" ", "␣");
}

function percent(logprob) {
  const value = Math.exp(logprob) * 100;
  if (value >= 99.95) return "100 %";
  return value < 0.1 ? "< 0.1 %" : `${value.toFixed(1)} %`;
}

function showTip(option, token) {
  const tip = byId("tip");
  const alternatives = token.top_logprobs ?? [];
  const rows = alternatives.map((other) => make("tr",
    other.token === token.token ? { class: "chosen" } : {},
    make("td", { class: "text" }, quoted(other.token)),
    make("td", { class: "n" }, percent(other.logprob)),
  ));
  tip.replaceChildren(
    make("p", {}, make("b", { class: "text" }, quoted(token.token)), ` ${percent(token.logprob)}`),
    make("p", { class: "fine" }, `logprob ${token.logprob.toFixed(3)}`),
  );
  if (rows.length) {
    tip.append(make("table", {}, make("caption", {}, "Most likely here"), make("tbody", {}, ...rows)));
  }
  tip.hidden = false;
  document.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby");
  option.setAttribute("aria-describedby", "tip");
  place(tip, option.getClientRects()[0] ?? option.getBoundingClientRect());
}

/** Below the token, or above where there is no room; never beyond the window. */
function place(tip, at) {
  const { width, height } = tip.getBoundingClientRect();
  const margin = 8;
  const left = Math.max(margin, Math.min(at.left, innerWidth - width - margin));
  const below = at.bottom + 6;
  const top = below + height + margin <= innerHeight ? below : Math.max(margin, at.top - height - 6);
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

export function hideTip() {
  byId("tip").hidden = true;
  document.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby");
}
